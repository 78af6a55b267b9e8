"""The transport's contract, run over every implementation: simulated, TCP, a Unix socket, TLS."""

from __future__ import annotations

import socket
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from tests.support.tls import certificates
from trio_sse.errors import ConnectionLost, PeerStalled
from trio_sse.simulated import SimulatedPeer, simulated_pair
from trio_sse.transport import SocketTransport, TlsTransport, Transport

PATIENCE = 10.0  # seconds, where a test waits for what must happen
STALL = 0.2  # the write timeout where it is to expire


class Peer(ABC):
    """The other end. It reads nothing unless told to."""

    @abstractmethod
    async def send(self, data: bytes) -> None: ...
    @abstractmethod
    async def read(self, count: int) -> bytes:
        """Exactly ``count`` bytes, or less at the end."""

    @abstractmethod
    async def wait_end(self) -> str:
        """Reads to the end: ``eof`` or ``reset``."""

    @abstractmethod
    async def shutdown_write(self) -> None: ...
    @abstractmethod
    def close(self) -> None: ...
    @abstractmethod
    def reset(self) -> None: ...


class _Simulated(Peer):
    def __init__(self, peer: SimulatedPeer) -> None:
        self._peer = peer
        peer.stall()

    async def send(self, data: bytes) -> None:
        self._peer.send(data)
        await trio.lowlevel.checkpoint()

    async def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._peer.read(count - len(data))
            data += part
            if not part:
                if self._peer.ended or self._peer.aborted:
                    break
                await trio.sleep(0.001)
        return data

    async def wait_end(self) -> str:
        self._peer.resume()
        await self._peer.wait_closed()
        return "reset" if self._peer.aborted else "eof"

    async def shutdown_write(self) -> None:
        self._peer.shutdown_write()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        self._peer.close()

    def reset(self) -> None:
        self._peer.reset()


class _Stream(Peer):
    def __init__(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream
        self._lower = stream if isinstance(stream, trio.SocketStream) else stream.transport_stream

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = bytes(await self._stream.receive_some(count - len(data)))
            if not part:
                break
            data += part
        return data

    async def wait_end(self) -> str:
        try:
            while await self._stream.receive_some(65536):
                pass
        except trio.BrokenResourceError:
            return "reset"
        return "eof"

    async def shutdown_write(self) -> None:
        if isinstance(self._stream, trio.SSLStream):
            # close_notify; unwrap() also waits for the peer's, which is not ours to ask for here
            with trio.move_on_after(0.1):
                await self._stream.unwrap()
        else:
            await self._stream.send_eof()

    def close(self) -> None:
        self._lower.socket.close()

    def reset(self) -> None:
        self._lower.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._lower.socket.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    client.setblocking(False)
    return server, client


@asynccontextmanager
async def pair(kind: str) -> AsyncIterator[tuple[Transport, Peer]]:
    transport: Transport
    peer: Peer
    if kind == "simulated":
        transport, simulated = simulated_pair(window=50_000)
        peer = _Simulated(simulated)
    else:
        server, client = socket.socketpair() if kind == "unix" else _tcp_pair()
        client.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(client)) if kind != "unix" else _unix_stream(client)
        transport = SocketTransport(server)
        if kind == "tls":
            secured = TlsTransport(transport, certificates().server)
            encrypted = trio.SSLStream(stream, certificates().client, server_hostname="localhost", https_compatible=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(secured.handshake)
                nursery.start_soon(encrypted.do_handshake)
            transport, peer = secured, _Stream(encrypted)
        else:
            peer = _Stream(stream)
    with trio.fail_after(PATIENCE):  # noqa: ASYNC100  (the checkpoints are the caller's)
        try:
            yield transport, peer
        finally:
            transport.abort()
            peer.close()


def _unix_stream(client: socket.socket) -> trio.SocketStream:
    return trio.SocketStream(trio.socket.from_stdlib_socket(client))


KINDS = ["simulated", pytest.param("tcp", marks=pytest.mark.net), pytest.param("unix", marks=pytest.mark.net),
         pytest.param("tls", marks=pytest.mark.net)]  # fmt: skip
every = pytest.mark.parametrize("kind", KINDS)
plain = pytest.mark.parametrize("kind", KINDS[:3])


async def send(transport: Transport, data: bytes, patience: float = PATIENCE) -> None:
    transport.write(data)
    await transport.flush(patience)


async def clog(transport: Transport) -> int:
    """Writes until the peer takes no more; how much that was. Leaves a backlog."""
    total = 0
    while True:
        transport.write(b"x" * 10_000)
        total += 10_000
        with trio.move_on_after(0.1):
            await transport.flush(PATIENCE)
        if transport.backlog or transport.cut:
            return total
        assert total < 100_000_000


@every
async def test_bytes_arrive_in_order_both_ways(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        for number in range(100):
            transport.write(b"%4d" % number)
        await transport.flush(PATIENCE)
        assert transport.backlog == 0
        assert await peer.read(400) == b"".join(b"%4d" % number for number in range(100))
        await peer.send(b"hello")
        assert await transport.receive(3) == b"hel"
        assert await transport.receive(100) == b"lo"


@every
async def test_slow_reader_gets_everything(kind: str) -> None:
    data = bytes(range(256)) * 8192  # 2 MiB
    async with pair(kind) as (transport, peer):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, transport, data)
            got = b""
            while len(got) < len(data):
                got += await peer.read(min(50_000, len(data) - len(got)))
        assert got == data


@every
async def test_peer_that_does_not_read_stalls(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        begin = trio.current_time()
        with pytest.raises(PeerStalled):
            for _ in range(1000):
                await send(transport, b"x" * 65536, STALL)
        assert trio.current_time() - begin >= STALL
        transport.abort()
        assert await peer.wait_end() == "reset" or kind == "unix"  # a Unix socket has none


@every
async def test_each_byte_taken_starts_the_timeout_anew(kind: str) -> None:
    """Much slower than the timeout in all, never in one go."""
    async with pair(kind) as (transport, peer):
        if kind != "tls":
            await clog(transport)

        async def read_slowly() -> None:
            while not done.is_set():
                await trio.sleep(0.25)
                with trio.move_on_after(0.05):
                    await peer.read(10_000_000)  # TCP reopens a full window in lumps: so it has to be emptied

        done = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_slowly)
            begin = trio.current_time()
            while trio.current_time() - begin < 1.5:
                await send(transport, b"x" * 400_000, 0.75)
            done.set()


@plain
async def test_cancelled_flush_loses_nothing(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        total = await clog(transport)
        transport.write(b"end")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport.flush, PATIENCE)
            assert await peer.read(total + 3) == b"x" * total + b"end"
        assert transport.backlog == 0


@pytest.mark.net
async def test_cancelled_flush_over_tls_cuts() -> None:
    async with pair("tls") as (transport, _peer):
        await clog(transport)
        assert transport.cut
        with pytest.raises(ConnectionLost):
            transport.write(b"more")


@every
async def test_reset_is_seen_by_a_blocked_read_at_once(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        if kind == "unix":
            # It has no reset but that of unread bytes.
            await send(transport, b"x")

        async def leave() -> None:
            await trio.testing.wait_all_tasks_blocked(0.01)
            peer.reset()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            with pytest.raises(ConnectionLost) as lost:
                await transport.receive(100)
        assert lost.value.witness in ("reset", "tls_cut")
        with pytest.raises(ConnectionLost):
            for _ in range(10):
                await send(transport, b"x")
                await trio.sleep(0.01)


@every
async def test_blocked_flush_ends_with_the_peer(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        async def leave() -> None:
            await trio.sleep(0.05)
            peer.reset()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            with pytest.raises(ConnectionLost):
                await send(transport, b"x" * 20_000_000)


@every
async def test_half_closed_peer_is_not_gone(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        await peer.send(b"last words")
        await peer.shutdown_write()
        assert await transport.receive(100) == b"last words"
        for _ in range(3):
            assert await transport.receive(100) == b""
        await send(transport, b"probe")
        with trio.move_on_after(0.2) as scope:
            await transport.wait_gone()
        assert scope.cancelled_caught
        if kind == "tls":
            return  # trio's client has no half-close that it could read on after
        assert await peer.read(5) == b"probe"


@plain
async def test_closed_peer_is_gone_after_a_probe(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        peer.close()
        assert await transport.receive(100) == b""
        begin = trio.current_time()
        try:
            await send(transport, b"probe")
        except ConnectionLost:
            assert kind == "unix"  # it needs no probe
        await transport.wait_gone()
        assert trio.current_time() - begin < 1


@pytest.mark.net
async def test_closed_peer_without_a_goodbye_is_gone_over_tls() -> None:
    async with pair("tls") as (transport, peer):
        peer.close()
        with pytest.raises(ConnectionLost, match="tls_cut"):
            await transport.receive(100)


@pytest.mark.net
async def test_waiting_for_the_peer_to_go_does_not_spin() -> None:
    """Both ``recv`` and a wait for writability would return at once, for ever."""
    async with pair("tcp") as (transport, peer):
        await peer.shutdown_write()
        assert await transport.receive(100) == b""
        steps = 0

        class Counter(trio.abc.Instrument):
            def before_task_step(self, task: trio.lowlevel.Task) -> None:
                nonlocal steps
                steps += 1

        trio.lowlevel.add_instrument(counter := Counter())
        with trio.move_on_after(0.2):
            await transport.wait_gone()
        trio.lowlevel.remove_instrument(counter)
        assert steps < 10


@every
async def test_abort_and_close_are_idempotent(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        transport.abort()
        transport.abort()
        await transport.close()
        await transport.close()
        with pytest.raises(ConnectionLost):
            transport.write(b"x")
        with pytest.raises(ConnectionLost):
            await transport.receive(1)
        assert not transport.shutdown_write()
        assert await peer.wait_end() == "reset" or kind == "unix"


@every
async def test_close_is_end_of_file(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        await send(transport, b"bye")
        await transport.close()
        assert await peer.read(3) == b"bye"
        assert await peer.wait_end() == "eof"


@plain
async def test_shutdown_write_goes_on_reading(kind: str) -> None:
    async with pair(kind) as (transport, peer):
        await send(transport, b"bye")
        assert transport.shutdown_write()
        assert await peer.read(3) == b"bye"
        assert await peer.wait_end() == "eof"
        await peer.send(b"late")
        assert await transport.receive(100) == b"late"


@plain
async def test_closing_wakes_whoever_waits(kind: str) -> None:
    async with pair(kind) as (transport, _peer):
        await clog(transport)

        async def lost(wait: Callable[[], object]) -> None:
            with pytest.raises(ConnectionLost):
                await wait()  # type: ignore[misc]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lost, lambda: transport.receive(100))
            nursery.start_soon(lost, lambda: transport.flush(PATIENCE))
            await trio.testing.wait_all_tasks_blocked(0.01)
            transport.abort()


@pytest.mark.net
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word for it is Linux's")
async def test_what_lies_unsent_in_the_kernel_is_bounded() -> None:
    """A peer that does not read is written to until little more than TCP_NOTSENT_LOWAT is unsent, not until a send buffer is full."""
    async with pair("tcp") as (transport, _peer):
        with pytest.raises(PeerStalled):
            while True:
                await send(transport, b"x" * 4096, STALL)
        unsent, unacked = transport.unsent()
        assert unsent is not None
        assert unacked is not None
        assert 0 < unsent <= 16384 + 2 * 65536
        assert unacked >= unsent
    assert transport.unsent() == (None, None)  # closed


@pytest.mark.net
@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux")
@pytest.mark.parametrize(("write_timeout", "user_timeout"), [(1.0, 50_000), (30.0, 50_000), (60.0, 65_000), (1e9, 2**31 - 1)])
def test_vanished_peers_are_found(write_timeout: float, user_timeout: int) -> None:
    """Keepalive within 50 s; TCP_USER_TIMEOUT never below the write timeout."""
    server, client = _tcp_pair()
    with server, client:
        SocketTransport(server, write_timeout=write_timeout)

        def option(name: int) -> int:
            return server.getsockopt(socket.IPPROTO_TCP, name)

        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert option(socket.TCP_KEEPIDLE) + option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT) == 50
        assert option(socket.TCP_USER_TIMEOUT) == user_timeout
        assert option(socket.TCP_NODELAY) == 1


@pytest.mark.net
async def test_out_of_descriptors_while_waiting_for_the_peer_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_epoll() -> None:
        raise OSError(24, "Too many open files")

    async with pair("tcp") as (transport, _peer):
        monkeypatch.setattr("trio_sse.transport.select.epoll", no_epoll)
        with trio.move_on_after(0.05) as scope:
            await transport.wait_gone()
        monkeypatch.undo()
        assert scope.cancelled_caught


@pytest.mark.net
async def test_addresses() -> None:
    await trio.lowlevel.checkpoint()
    server, client = _tcp_pair()
    with client:
        transport = SocketTransport(server)
        assert transport.local == client.getpeername()
        transport.abort()
    one, other = socket.socketpair()
    with other:
        transport = SocketTransport(one)
        assert transport.local is None
        transport.abort()


@pytest.mark.net
@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\nHost: t\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"x" * 500, b"", None], ids=repr)
async def test_handshake_with_anything_else(hello: bytes | None) -> None:
    server, client = _tcp_pair()
    transport = TlsTransport(SocketTransport(server), certificates().server)
    if hello is None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    else:
        client.sendall(hello)
        client.shutdown(socket.SHUT_WR)
    with trio.fail_after(PATIENCE), pytest.raises(ConnectionLost):
        await transport.handshake()
    transport.abort()
    client.close()
