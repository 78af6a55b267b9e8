"""Field cases O: what goes wrong for people who run a streaming server. One table; each case is an experiment.

Deeper suites stand beside it: ``test_shutdown``, ``test_listeners``, ``test_logs``, ``test_metrics``.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import time
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.capture import captured_log, check_quiet
from tests.support.cases import CaseTable
from tests.support.process import ROOT, ServerProcess, has_ipv6, read_until, tcp
from tests.support.stage import Stage, answers, get, peer_answer, post
from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.events import Started
from trio_sse.script import Script
from trio_sse.trace import Outcome

cases = CaseTable(
    {
        "O01": "Shutdown hangs while streams are open",
        "O02": "In-flight answers are cut on SIGTERM; new ones still accepted",
        "O03": "Clients are not told when drain time runs out",
        "O04": "Second signal must force exit",
        "O06": "Overload: refuse early with 429/503 and a hint",
        "O08": "Health endpoint blocked, or green while generation is stuck",
        "O10": "Unix socket listener",
        "O11": "IPv6 and dual stack",
        "O12": "Port in use",
        "O13": "Disconnect noise and lost causes in logs",
    },
    later={},
)

PROMPT = {"prompt": "hi", "max_new_tokens": 256}


def test_every_case_is_settled_or_listed_as_later() -> None:
    cases.check()


@cases.settles("O01")
@pytest.mark.net
def test_o01_shutdown_with_everything_open() -> None:
    with ServerProcess("--grace", "0.5", "--lab") as server:
        clients = [tcp(server.address) for _ in range(6)]
        stalled = tcp(server.address, receive_buffer=2048)
        for client in clients[:3]:
            client.sendall(get("/events?events=100000&interval_ms=20"))
            read_until(client, b"id: 1\n")
        clients[5].sendall(b"POST /generate HTTP/1.1\r\nHos")
        stalled.sendall(get("/events?events=100000&size=60000"))
        time.sleep(0.3)
        begin = time.monotonic()
        server.process.terminate()
        for idle in clients[3:5]:
            assert read_until(idle) == b""
        for client in clients[:3]:
            end = read_until(client)
            assert b"event: error" in end
            assert end.endswith(b"0\r\n\r\n")
        assert server.wait() == 0
        assert time.monotonic() - begin < 0.5 + 2 + 3
        with socket.create_server(server.address):
            pass
        assert "Traceback" not in server.printed()
        for client in (*clients, stalled):
            client.close()


@cases.settles("O02")
@pytest.mark.net
def test_o02_answers_in_flight_are_finished_and_no_new_ones_begun() -> None:
    with ServerProcess("--grace", "30", "--script", "events=20,interval_ms=50", "--slots", "3") as server:
        streams = [tcp(server.address) for _ in range(3)]
        behind = [get("/healthz"), get("/readyz"), post("/generate", PROMPT)]
        kept_alive = tcp(server.address)
        kept_alive.sendall(get("/healthz"))
        read_until(kept_alive, b"}")
        for stream, raw in zip(streams, behind, strict=True):
            stream.sendall(post("/generate", PROMPT) + raw)
            read_until(stream, b"w2 ")
        begin = time.monotonic()
        server.process.terminate()
        assert read_until(kept_alive) == b""
        with pytest.raises(ConnectionRefusedError):
            tcp(server.address)
        ends = [read_until(stream) for stream in streams]
        assert server.wait() == 0
        assert time.monotonic() - begin < 15
        for end, status in zip(ends, (b"200", b"503", b"503"), strict=True):
            stream_end, _, following = end.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert b"w20 " in stream_end
            assert following.startswith(b"HTTP/1.1 " + status)
            assert b"connection: close" in following.lower()
            assert (b"retry-after: 1" in following.lower()) is (status == b"503")
        for sock in (kept_alive, *streams):
            sock.close()


@cases.settles("O03")
async def test_o03_clients_are_told_when_the_grace_is_over(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=600, interval_ms=100, size=1000), slots=2, grace=1.0, window=500)
    reader, stalled = stage.connect(), stage.connect()
    for peer in (reader, stalled):
        peer.send(post("/v1/completions", {"model": "m", "prompt": "hi", "stream": True}))
    stalled.stall()
    await wait_all_tasks_blocked()
    begin = trio.current_time()
    assert await stage.server.shutdown() == 0
    assert trio.current_time() - begin == pytest.approx(2.0)  # the stalled one can hold it up for a second
    (answer,) = answers(bytes(reader.received))
    assert answer.complete
    assert b'"code":"shutting_down"' in answer.body
    assert b"[DONE]" not in answer.body
    assert b'"finish_reason":"' not in answer.body
    await wait_all_tasks_blocked()
    assert stage.outcomes == [Outcome.SHUTDOWN] * 2


@cases.settles("O04")
@pytest.mark.net
def test_o04_the_second_signal_ends_it() -> None:
    """Also as process 1: ``test_shutdown``."""
    with ServerProcess("--grace", "600", "--script", "events=1000,interval_ms=30000") as server:
        with tcp(server.address) as client:
            client.sendall(post("/generate", PROMPT))
            read_until(client, b"\r\n\r\n")
            server.process.send_signal(signal.SIGINT)
            server.wait_printed("shutting down")
            time.sleep(0.3)
            assert server.process.poll() is None
            begin = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            assert server.wait() not in (0, None)
            assert time.monotonic() - begin < 2 + 3


@cases.settles("O06")
async def test_o06_overload_is_refused_at_once(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=10, interval_ms=100), slots=2)
    for aborting in (0, 25):
        stage.records.clear()
        steps = stage.backend.steps  # type: ignore[attr-defined]
        peers = [stage.connect() for _ in range(50)]
        for peer in peers:
            peer.send(post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}))
        for peer in peers[:aborting]:
            peer.reset()
        await wait_all_tasks_blocked()
        assert stage.server.routes.admission.running == 2
        refused = [answers(bytes(peer.received))[0] for peer in peers if peer.received]
        gone = stage.outcomes.count(Outcome.CLIENT_DISCONNECTED)
        assert len(refused) >= 50 - 2 - aborting
        for answer in refused:
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert (answer.error["type"], answer.error["code"]) == ("rate_limit_error", "no_slot_available")
        assert stage.backend.steps == steps  # type: ignore[attr-defined]
        await trio.sleep(5)
        assert stage.outcomes.count(Outcome.COMPLETED) == 2
        assert len(refused) + gone + 2 <= 50
        for peer in peers[aborting:]:
            peer.close()
        await stage.settled()
    metrics = stage.connect()
    metrics.send(get("/metrics"))
    assert b"\ntrio_sse_slots 10.0\n" in (await peer_answer(metrics, "GET")).body  # and eight behind /events


class Stuck(Backend):
    """Its step takes as long as it is told to, and knows how old it is."""

    slots = 1

    def __init__(self) -> None:
        self._begun: float | None = None
        self.over = trio.Event()

    def step_age(self) -> float:
        return 0.0 if self._begun is None else trio.current_time() - self._begun

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        await events.send(Started())
        self._begun = trio.current_time()
        try:
            await self.over.wait()
        finally:
            self._begun = None


@cases.settles("O08")
async def test_o08_health_is_told_at_once_and_truthfully(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """All slots busy is not unready; a step that hangs is."""
    backend = Stuck()
    stage = Stage(nursery, backend, step_timeout=60.0)

    async def status(path: str) -> int:
        peer = stage.connect()
        begin = trio.current_time()
        peer.send(get(path, "Connection: close"))
        answer = await peer_answer(peer, "GET")
        assert trio.current_time() == begin
        return answer.status

    client = stage.connect()
    client.send(post("/generate", PROMPT))
    await wait_all_tasks_blocked()
    for _ in range(59):
        await trio.sleep(1)
        assert (await status("/healthz"), await status("/readyz")) == (200, 200)
    await trio.sleep(2)
    assert (await status("/healthz"), await status("/readyz")) == (200, 503)
    backend.over.set()
    await wait_all_tasks_blocked()
    assert await status("/readyz") == 200


@cases.settles("O10")
@pytest.mark.net
def test_o10_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for leave in (signal.SIGKILL, signal.SIGTERM):
        with ServerProcess("--uds", str(path), "--script", "events=1000,interval_ms=50") as server:
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(10)
                client.connect(str(path))
                client.sendall(post("/generate", PROMPT))
                read_until(client, b"w3 ")
            server.wait_printed("outcome=client_disconnected")
            server.process.send_signal(leave)
            server.wait()
    assert not path.exists()
    path.write_text("precious")
    with ServerProcess("--uds", str(path), ready=None) as server:
        assert server.wait() == 1
        assert str(path) in server.printed()
        assert f"errno {errno.EEXIST}" in server.printed()
    assert path.read_text() == "precious"


@cases.settles("O11")
@pytest.mark.net
@pytest.mark.parametrize("host", ["::1", "::", "0.0.0.0", "localhost", ""])
def test_o11_addresses(host: str) -> None:
    if host == "::" and not has_ipv6():
        return  # whether it can be bound at all is the kernel's affair
    if host == "::1" and not has_ipv6():
        with ServerProcess("--host", host, ready=None) as server:
            assert server.wait() == 1
            assert f"cannot listen on [{host}]" in server.printed()
        return
    with ServerProcess("--host", host) as server:
        assert f":{server.address[1]}\n" in server.printed()
        if host.startswith(":"):
            assert f"http://[{host}]:{server.address[1]}\n" in server.printed()
        reached = {"::1": ["::1"], "::": ["::1", "127.0.0.1"]}.get(host, ["127.0.0.1"])
        for address in reached:
            with tcp((address, server.address[1])) as client:
                client.sendall(get("/healthz", "Connection: close"))
                assert read_until(client).endswith(b'{"status":"ok"}')


@cases.settles("O12")
@pytest.mark.net
def test_o12_port_in_use(tmp_path: Path) -> None:
    """Known before anything is loaded, while the first one loads and while it drains; and free the moment it has stopped accepting."""
    (tmp_path / "never.py").write_text(
        "import trio, trio_sse\n"
        "class Never(trio_sse.Backend):\n"
        "    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED):\n"
        "        print('loading', flush=True)\n"
        "        await trio.sleep(1000)\n"
        "    async def generate(self, prepared, events): ...\n"
    )
    own = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with ServerProcess("--script", "events=1000,interval_ms=100", "--grace", "20") as first:
        port = ("--port", str(first.address[1]))
        with ServerProcess(*port, "--backend", "never:Never", environment=own, ready=None) as second:
            assert second.wait() == 1
            assert "loading" not in second.printed()
            for part in (f"127.0.0.1:{port[1]}", os.strerror(errno.EADDRINUSE), f"errno {errno.EADDRINUSE}"):
                assert part in second.printed()
        with tcp(first.address) as client:
            client.sendall(post("/generate", PROMPT))
            read_until(client, b"w2 ")
            first.process.terminate()
            first.wait_printed("shutting down")
            time.sleep(0.2)
            with ServerProcess(*port):  # as the first is draining, and over its connections' ports
                assert first.process.poll() is None


@cases.settles("O13")
async def test_o13_one_line_each_and_errors_only_for_our_faults(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    class Faulty(Backend):
        async def generate(self, prepared: Prepared, events: EventChannel) -> None:
            await events.send(Started())
            raise RuntimeError("broken")

    stage = Stage(nursery, script=Script(events=100, interval_ms=50, size=500), slots=20, window=3000, write_timeout=2.0)
    stream = post("/v1/completions", {"model": "m", "prompt": "hi", "stream": True, "max_tokens": 50})
    document = post("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 50})
    with captured_log() as log:
        events = get("/events?events=100&interval_ms=20")
        for raw in (stream, document, events, post("/generate", {"prompt": "hi"}), stream[:-5], stream[:20]):
            for leave in ("close", "reset", "stall"):
                peer = stage.connect()
                peer.send(raw)
                await trio.sleep(0.2)
                getattr(peer, leave)()
        await trio.sleep(100)
    check_quiet(log)
    assert len(log) == len(stage.records)
    for entry in log:
        fields = entry.fields  # type: ignore[attr-defined]
        assert fields["outcome"] in ("client_disconnected", "client_stalled", "rejected", "completed")
        assert fields["id"]
    broken = Stage(nursery, Faulty())
    with captured_log() as log:
        peer = broken.connect()
        peer.send(post("/generate", {"prompt": "hi"}))
        await peer_answer(peer)
        await wait_all_tasks_blocked()
    assert [entry.levelname for entry in log] == ["ERROR", "WARNING"]
    assert log[0].exc_info
    assert broken.records[0].request_id in log[0].getMessage()
