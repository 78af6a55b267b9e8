"""Many, silent, slow and stalled peers on real sockets."""

from __future__ import annotations

import gc
import re
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from tests.support.capture import captured_log, check_quiet
from tests.support.process import ServerProcess, live, read_until, tcp
from tests.support.stage import get, post
from trio_sse.script import Script
from trio_sse.trace import Outcome

pytestmark = [pytest.mark.net, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]


# ---- Thousands that say little ----


def _wait_descriptors(server: ServerProcess, most: int) -> None:
    until = time.monotonic() + 30
    while server.descriptors() > most:
        assert time.monotonic() < until, (server.descriptors(), most)
        time.sleep(0.05)


def _close_wait(port: int) -> int:
    """Sockets of ours that a peer has closed and we have not: the sign of an end of file that nobody saw."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "08" for row in rows)


@pytest.fixture(scope="module")
def crowded():  # type: ignore[no-untyped-def]
    with ServerProcess("--max-connections", "1200", "--header-timeout", "3", "--log-level", "debug", "--lab") as server:
        # The allocator keeps what a first crowd has needed; what the next one needs on top is growth.
        first = [tcp(server.address) for _ in range(1000)]
        for client in first:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHo")
        time.sleep(0.2)
        for client in first:
            client.close()
        yield server


class Steady(threading.Thread):
    """A client that goes on asking while the crowd is there. ``failed`` is what went wrong."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__()
        self._server = server
        self.over = threading.Event()
        self.answered = 0
        self.failed: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                with tcp(self._server.address) as client:
                    client.sendall(get("/events?events=3&interval_ms=5", "Connection: close"))
                    assert b"event: done" in read_until(client)
                self.answered += 1
        except Exception as error:  # noqa: BLE001  (looked at by whoever joins)
            self.failed = error


@pytest.mark.parametrize("crowd", ["silent", "half-sent", "one-byte", "come-and-go", "come-and-reset", "half-closed", "half-sent-and-fin"])
def test_crowd(crowd: str, crowded: ServerProcess) -> None:
    server = crowded
    with tcp(server.address) as client:  # whatever is made at the first request is there
        client.sendall(get("/events?events=3", "Connection: close"))
        read_until(client)
    time.sleep(0.1)
    descriptors, (memory, _) = server.descriptors(), server.memory()
    printed = len(server.printed())
    steady = Steady(server)
    steady.start()
    try:
        if crowd.startswith("come-and"):
            for _ in range(10_000 if crowd == "come-and-go" else 2_000):
                client = tcp(server.address)
                if crowd == "come-and-reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
        else:
            said = {"half-sent": b"GET /healthz HTTP/1.1\r\nHo", "half-sent-and-fin": b"GET /hea", "one-byte": b"G"}.get(crowd, b"")
            clients = [tcp(server.address) for _ in range(1000)]
            for client in clients:
                client.sendall(said)
                if crowd in ("half-closed", "half-sent-and-fin"):
                    client.shutdown(socket.SHUT_WR)
            begin = time.monotonic()
            answers = [read_until(client) for client in clients]  # to the end: the server closes
            assert time.monotonic() - begin < 20
            expected = {"half-sent": b" 408 ", "one-byte": b" 408 ", "half-sent-and-fin": b" 400 "}.get(crowd)
            assert all((expected in answer[:20]) if expected else not answer for answer in answers)
            for client in clients:
                client.close()
    finally:
        steady.over.set()
        steady.join(30)
    assert steady.failed is None
    assert steady.answered
    _wait_descriptors(server, descriptors)
    assert _close_wait(server.address[1]) == 0
    now, _ = server.memory()
    assert memory is not None
    assert now is not None
    assert now - memory < 20_000_000
    before = server.cpu_ns()
    time.sleep(0.3)
    after = server.cpu_ns()
    assert before is not None
    assert after is not None
    assert after - before < 150_000_000  # idle: nothing spins
    said_since = server.printed()[printed:]
    assert not re.search(r" (warning|error) |Traceback", said_since), said_since[-2000:]


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_tasks_and_memory_return_to_the_baseline() -> None:
    """The same inside one process, where tasks can be counted; twice, so that growth would show."""
    async with live(max_connections=600) as stage:
        tasks, memory = [], []
        for _ in range(3):
            streams = [await stage.open(b"GET /heal" if number % 2 else b"") for number in range(500)]
            await stage.wait_connections(500)
            for stream in streams:
                stream.socket.close()
            await stage.wait_connections(0)
            await trio.sleep(0.05)
            gc.collect()
            tasks.append(trio.lowlevel.current_statistics().tasks_living)
            memory.append(_memory())
        assert tasks[0] == tasks[1] == tasks[2]
        assert memory[2] - memory[0] < 5_000_000


async def test_limit_on_real_sockets() -> None:
    async with live(max_connections=3, keep_alive=60.0, header_timeout=60.0) as stage:
        oldest = await stage.open()
        await stage.wait_connections(1)
        [await stage.open(b"GET /heal") for _ in range(2)]
        await stage.wait_connections(3)
        await trio.sleep(0.05)
        newcomer = await stage.open(get("/healthz"))
        with trio.fail_after(10):
            assert await oldest.receive_some(100) == b""  # the only idle one
            assert b"200 OK" in await newcomer.receive_some(1000)
        await newcomer.send_all(b"GET /heal")
        await trio.sleep(0.05)
        refused = await stage.open(get("/healthz"))
        with trio.fail_after(10):
            answer = b""
            while part := await refused.receive_some(1000):
                answer += bytes(part)
        assert b" 503 " in answer
        assert b"too_many_connections" in answer


# ---- Slow and stalled readers ----


@pytest.mark.parametrize("what", ["events", "heartbeats", "last-frame", "json"])
async def test_client_that_never_reads(what: str) -> None:
    """Let go at the write timeout, by a reset; generator, slot and socket are released."""
    script = {"events": Script(events=100_000, size=4000), "json": Script(events=40, size=60_000)}
    options: dict[str, object] = {"script": script.get(what), "write_timeout": 0.5}
    if what == "heartbeats":
        # Nothing but comments: a pipelined stream fills the window first.
        options |= {"heartbeat": 0.0005, "script": Script(events=1, prefill_ms=60_000)}
    elif what == "last-frame":
        # The window is full just when the stream's end is to be sent.
        options |= {"script": Script(events=256, size=60_000)}
    tokens = 256 if what == "last-frame" else 40
    path, body = "/generate", {"prompt": "hi", "max_new_tokens": tokens}
    if what == "json":
        path, body = "/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": tokens}
    async with live(**options) as stage:
        stream = await stage.open(post(path, body), receive_buffer=2048)
        begin = trio.current_time()
        assert await stage.wait_outcomes(1) == [Outcome.CLIENT_STALLED]
        assert 0.5 <= trio.current_time() - begin < 30
        await stage.wait_connections(0)
        stage.check_idle()
        record = stage.records[0]
        assert record.witness == "write_timeout"
        if what in ("events", "last-frame"):
            assert record.events_produced < 256  # the model had to wait
        with trio.fail_after(10), pytest.raises(trio.BrokenResourceError):
            while await stream.receive_some(100_000):
                pass


async def test_one_stalled_client_does_not_delay_the_others() -> None:
    async with live(script=Script(events=200, interval_ms=5, size=4000), slots=4, write_timeout=30.0) as stage:
        raw = post("/generate", {"prompt": "hi", "max_new_tokens": 200})
        [await stage.open(raw, receive_buffer=2048) for _ in range(3)]
        await trio.sleep(0.2)
        healthy = await stage.open(raw)
        begin = trio.current_time()
        data = b""
        with trio.fail_after(30):
            while b"[DONE]" not in data:
                data += bytes(await healthy.receive_some(65536))
        assert trio.current_time() - begin < 10
        assert data.count(b"token") == 200
        assert not stage.records or stage.outcomes == [Outcome.COMPLETED]


async def test_slow_client_receives_everything() -> None:
    """SO_RCVBUF of 2048: it empties its buffer, sleeps for 0.6 of the write timeout, and repeats."""
    write_timeout = 0.5
    async with live(write_timeout=write_timeout) as stage:
        sock = tcp(stage.address, receive_buffer=2048)
        sock.sendall(get("/events?events=60&size=4000"))
        sock.setblocking(False)
        data = b""
        begin = trio.current_time()
        with trio.fail_after(100):
            while b"event: done" not in data:
                await trio.sleep(0.6 * write_timeout)
                with suppress(BlockingIOError):
                    while True:
                        data += sock.recv(65536)
        assert trio.current_time() - begin > 2 * write_timeout  # it was slower in all than the timeout
        assert await stage.wait_outcomes(1) == [Outcome.COMPLETED]
        sock.close()
    body = _unchunked(data)
    texts = re.findall(rb'event: token\nid: (\d+)\ndata: \{"seq":(\d+),"text":"([^"]*)"\}\n\n', body)
    assert [int(number) for number, _, _ in texts] == list(range(1, 61))
    for number, _, text in texts:
        assert text == (b"w%s " % number * 4000)[:4000]
    rest = re.sub(rb"event: token\nid: \d+\ndata: [^\n]*\n\n", b"", body)
    assert rest.replace(b": hb\n", b"") == b'event: done\nid: 60\ndata: {"seq":60}\n\n'


def _unchunked(data: bytes) -> bytes:
    body = b""
    rest = data.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


# ---- Clients that leave ----


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_leaving_on_real_sockets(leave: str) -> None:
    """Streams, documents, and one that waits for a slot: seen at once, though nothing is being written."""
    async with live(script=Script(events=1000, interval_ms=2000), queue=5) as stage:
        for path, body in (
            ("/generate", {"prompt": "hi"}),
            ("/v1/completions", {"model": "m", "prompt": "hi"}),
            ("/v1/completions", {"model": "m", "prompt": "hi", "stream": True}),
        ):
            holder = await stage.open(post(path, body))
            await stage.wait_until(lambda: stage.server.routes.admission.running == 1)
            waiter = await stage.open(post(path, body))
            await stage.wait_until(lambda: stage.server.routes.admission.waiting == 1)
            stage.records.clear()
            begin = trio.current_time()
            for stream in (waiter, holder):
                if leave == "reset":
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stream.socket.close()
                assert (await stage.wait_outcomes(1))[-1] is Outcome.CLIENT_DISCONNECTED
                stage.records.clear()
            assert trio.current_time() - begin < 1
            await stage.wait_connections(0)
            stage.check_idle()


async def test_half_closed_on_real_sockets() -> None:
    """``nc -N``: served to the end, probed meanwhile."""
    async with live(script=Script(events=2, interval_ms=1300)) as stage:
        streams = []
        for path, body in (("/generate", {"prompt": "hi"}), ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 2})):
            stream = await stage.open(post(path, body))
            await stream.send_eof()
            data = b""
            with trio.fail_after(30):
                while part := await stream.receive_some(65536):
                    data += bytes(part)
            assert b"w2 " in data
            if path == "/generate":
                assert data.count(b": hb\n\n") >= 2
            streams.append(stream)
        assert await stage.wait_outcomes(2) == [Outcome.COMPLETED] * 2
        for stream in streams:
            await stream.aclose()


async def test_storm_of_resets() -> None:
    """Requests whose client resets at once, or a few milliseconds later: as many ends as begins, no slot lost, nothing on the log."""
    with captured_log() as log:
        async with live(script=Script(events=50, interval_ms=1), slots=4, queue=100) as stage:
            raw = post("/v1/completions", {"model": "m", "prompt": "hi", "stream": True})
            for number in range(300):
                stream = await stage.open(raw)
                await trio.sleep((number % 7) * 0.0005)
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stream.socket.close()
            await stage.wait_connections(0)
            stage.check_idle()
            last = await stage.open(raw)
            data = b""
            with trio.fail_after(10):
                while b"[DONE]" not in data:
                    data += bytes(await last.receive_some(65536))
            assert set(stage.outcomes) <= {Outcome.CLIENT_DISCONNECTED, Outcome.COMPLETED}
    check_quiet(log)


# ---- Early refusals ----


@pytest.mark.parametrize("why", ["key", "path", "size", "full"])
async def test_refusal_reaches_a_client_that_writes_first(why: str) -> None:
    """8 MB, read only after the write: a plain close would have the kernel reset the connection and take the answer along."""
    options: dict[str, object] = {"api_key": ("k",), "script": Script(events=1000, interval_ms=1000), "max_body": 16_000_000}
    path = "/nowhere" if why == "path" else "/v1/chat/completions"
    key = "Authorization: Bearer wrong" if why == "key" else "Authorization: Bearer k"
    status = {"key": b"401", "path": b"404", "size": b"413", "full": b"429"}[why]
    async with live(**(options | ({"max_body": 1_000_000} if why == "size" else {}))) as stage:
        if why == "full":
            await stage.open(post("/generate", {"prompt": "hi"}, key))
        body = b'{"messages":[{"role":"user","content":"' + b"x" * 8_000_000 + b'"}]}'
        raw = post(path, None, key, raw=body)
        for run in range(10):
            client = await stage.open()
            for begin in range(0, len(raw), 800_000):
                await client.send_all(raw[begin : begin + 800_000])
                if run == 0:
                    await trio.sleep(0.02)
            data = b""
            with trio.fail_after(30):
                while part := await client.receive_some(65536):
                    data += bytes(part)
                    if why == "full" and b'"param":null}}' in data:
                        break  # read to its end: the connection lives on
            assert data.startswith(b"HTTP/1.1 " + status)
            assert data.endswith(b"}}")
            await client.aclose()
        stage.nursery.cancel_scope.cancel()
