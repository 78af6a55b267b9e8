"""TLS: the same server behind it, and peers that do not say goodbye, or hello."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.support.capture import captured_log, check_quiet
from tests.support.process import LiveStage, ServerProcess, live, read_until, tcp
from tests.support.stage import answers, get, post
from tests.support.tls import certificates
from trio_sse.script import Script
from trio_sse.trace import Outcome

pytestmark = pytest.mark.net

PROMPT = {"prompt": "hi", "max_new_tokens": 100}
Client = trio.SSLStream[trio.SocketStream]


@asynccontextmanager
async def secure(tmp_path: Path, **options: object) -> AsyncIterator[LiveStage]:
    certificate, key = certificates().write(tmp_path)
    async with live(certfile=certificate, keyfile=key, **options) as stage:
        yield stage


async def hello(stage: LiveStage, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, *, receive_buffer: int | None = None) -> Client:
    context = ssl.create_default_context()
    certificates().authority.configure_trust(context)
    context.minimum_version = context.maximum_version = version
    lower = await stage.open(receive_buffer=receive_buffer)
    stream = trio.SSLStream(lower, context, server_hostname="localhost", https_compatible=True)
    with trio.fail_after(10):
        await stream.do_handshake()
    return stream


async def read(stream: Client, mark: bytes) -> bytes:
    data = b""
    with trio.fail_after(30):
        while mark not in data:
            part = await stream.receive_some(65536)
            assert part, data
            data += bytes(part)
    return data


versions = pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])


@versions
async def test_requests_over_tls(version: ssl.TLSVersion, tmp_path: Path) -> None:
    async with secure(tmp_path, script=Script(events=3, interval_ms=10), keep_alive=0.5) as stage:
        client = await hello(stage, version)
        own = f"Origin: https://localhost:{stage.address[1]}"
        await client.send_all(post("/generate", PROMPT) + get("/healthz") + get("/healthz", own))
        data = await read(client, b'{"status":"ok"}')
        while len(found := answers(data, "POST", "GET", "GET", closed=False)) < 3 or not found[2].complete:
            data += bytes(await client.receive_some(65536))
        assert [answer.status for answer in found] == [200, 200, 200]
        assert found[0].body.endswith(b"[DONE]\n\n")
        with trio.fail_after(30):
            assert await client.receive_some(100) == b""  # idle: close_notify, then the end
        await stage.wait_connections(0)


@versions
@pytest.mark.parametrize("leave", ["cut", "reset"])
async def test_leaving(version: ssl.TLSVersion, leave: str, tmp_path: Path) -> None:
    """An end without close_notify is a disconnect: streams, documents, one that waits; no probe is needed."""
    async with secure(tmp_path, script=Script(events=1000, interval_ms=5000), queue=1) as stage:
        clients = []
        for path, body in (("/generate", PROMPT), ("/v1/completions", {"model": "m", "prompt": "hi"})):
            client = await hello(stage, version)
            await client.send_all(post(path, body))
            clients.append(client)
            await stage.wait_until(lambda: stage.server.routes.admission.running + stage.server.routes.admission.waiting == len(clients))
        begin = trio.current_time()
        for client in reversed(clients):
            if leave == "reset":
                client.transport_stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.transport_stream.socket.close()
        assert await stage.wait_outcomes(2) == [Outcome.CLIENT_DISCONNECTED] * 2
        assert trio.current_time() - begin < 2
        await stage.wait_connections(0)
        stage.check_idle()


@versions
async def test_close_notify_is_a_half_close(version: ssl.TLSVersion, tmp_path: Path) -> None:
    """It is served to the end; and if it then closes after all, the next probe finds out."""
    async with secure(tmp_path, script=Script(events=4, interval_ms=400)) as stage:
        for goes in (False, True):
            stage.records.clear()
            client = _Raw(tcp(stage.address), version)
            client.send(post("/generate", PROMPT))
            await trio.to_thread.run_sync(client.read, b"w1 ")
            client.say_goodbye()
            if goes:
                client.sock.close()
                assert await stage.wait_outcomes(1) == [Outcome.CLIENT_DISCONNECTED]
            else:
                assert b"[DONE]" in await trio.to_thread.run_sync(client.read, b"[DONE]")
                assert await stage.wait_outcomes(1) == [Outcome.COMPLETED]
                client.sock.close()
            await stage.wait_connections(0)
            stage.check_idle()


class _Raw:
    """A client of our own over memory BIOs, since sockets do not let one go on reading after close_notify."""

    def __init__(self, sock: socket.socket, version: ssl.TLSVersion) -> None:
        context = ssl.create_default_context()
        certificates().authority.configure_trust(context)
        context.minimum_version = context.maximum_version = version
        self.sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
        self._shaken = False

    def _push(self) -> None:
        if self._outgoing.pending:
            self.sock.sendall(self._outgoing.read())

    def _shake(self) -> None:
        while not self._shaken:
            try:
                self._tls.do_handshake()
                self._shaken = True
            except ssl.SSLWantReadError:
                self._push()
                self._incoming.write(self.sock.recv(65536))
        self._push()

    def send(self, data: bytes) -> None:
        # The server shakes hands on trio's loop, which must run meanwhile.
        self._pending = data

    def read(self, mark: bytes) -> bytes:
        self._shake()
        if self._pending:
            self._tls.write(self._pending)
            self._pending = b""
            self._push()
        data = b""
        while mark not in data:
            try:
                data += self._tls.read(65536)
            except ssl.SSLWantReadError:
                part = self.sock.recv(65536)
                assert part, data
                self._incoming.write(part)
        return data

    def say_goodbye(self) -> None:
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.unwrap()  # sends close_notify, and would wait for the server's
        self._push()


async def test_client_that_stops_reading_and_never_closes(tmp_path: Path) -> None:
    async with secure(tmp_path, script=Script(events=10_000, size=4000), write_timeout=0.5) as stage:
        client = await hello(stage, receive_buffer=2048)
        await client.send_all(post("/generate", PROMPT | {"max_new_tokens": 256}))
        begin = trio.current_time()
        assert await stage.wait_outcomes(1) == [Outcome.CLIENT_STALLED]
        await stage.wait_connections(0)
        assert trio.current_time() - begin < 10
        stage.check_idle()


async def test_what_is_no_handshake_ends_quietly(tmp_path: Path) -> None:
    with captured_log() as log:
        async with secure(tmp_path, header_timeout=0.5) as stage:
            plain = await stage.open(get("/healthz"))
            silent = await stage.open()
            cut = await stage.open(b"\x16\x03\x01\x02\x00\x01\x00")
            gone = await stage.open(b"\x16\x03\x01")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.socket.close()
            with trio.fail_after(30):
                for stream in (plain, silent, cut):
                    try:
                        data = bytes(await stream.receive_some(1000))
                    except trio.BrokenResourceError:
                        data = b""
                    assert b"HTTP" not in data
            await stage.wait_connections(0)
            client = await hello(stage)
            await client.send_all(get("/healthz"))
            await read(client, b"ok")
            assert await stage.wait_outcomes(1) == [Outcome.COMPLETED]
    check_quiet(log)


async def test_the_connection_limit_counts_handshakes(tmp_path: Path) -> None:
    """A connection that never shakes hands is an idle one: it makes room. The refusal comes over TLS too."""
    async with secure(tmp_path, max_connections=2, header_timeout=60.0) as stage:
        for _ in range(5):
            await stage.open()
            await trio.sleep(0.02)  # one after the other: what comes in one instant is served in any order
        await stage.wait_connections(2)
        clients = [await hello(stage) for _ in range(2)]
        for client in clients:
            await client.send_all(b"GET /heal")
        await trio.sleep(0.1)
        refused = await hello(stage)
        await refused.send_all(get("/healthz"))
        assert b" 503 " in await read(refused, b"too_many_connections")
        await clients[0].send_all(b"thz HTTP/1.1\r\nHost: t\r\n\r\n")
        assert b" 200 " in await read(clients[0], b"ok")


async def test_early_refusal_over_tls(tmp_path: Path) -> None:
    async with secure(tmp_path, api_key=("k",)) as stage:
        for _ in range(3):
            client = await hello(stage)
            raw = post("/v1/chat/completions", None, raw=b"x" * 3_000_000)
            await client.send_all(raw)
            assert b" 401 " in await read(client, b"invalid_api_key")


def test_bare_process(tmp_path: Path) -> None:
    """The printed URL says https; and peers in every state do not delay the end."""
    certificate, key = certificates().write(tmp_path)
    with ServerProcess("--certfile", certificate, "--keyfile", key, "--grace", "1", "--lab") as server:
        assert f"https://127.0.0.1:{server.address[1]}" in server.printed()
        silent, plain = tcp(server.address), tcp(server.address)
        plain.sendall(b"GET")
        with tcp(server.address) as lower:
            context = ssl.create_default_context()
            certificates().authority.configure_trust(context)
            with context.wrap_socket(lower, server_hostname="localhost") as client:
                client.sendall(get("/events?events=100&interval_ms=1000"))
                read_until(client, b"id: 1\n")
                server.process.terminate()
                data = b""
                while part := client.recv(65536):
                    data += part
                assert b"shutting_down" in data
        assert server.wait(10) == 0
        for sock in (silent, plain):
            sock.close()
        assert "Traceback" not in server.printed()
