"""The end: on the fake clock to the second, and of real processes."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.process import ROOT, ServerProcess, read_until, tcp
from tests.support.stage import Stage, answers, get, peer_answer, post
from trio_sse.script import Script
from trio_sse.simulated import SimulatedPeer
from trio_sse.trace import Outcome

PROMPT = {"prompt": "hi", "max_new_tokens": 256}

# ---- On the fake clock ----


async def shut_down(stage: Stage) -> float:
    """Runs the graceful shutdown; the seconds it took. Its status must be 0."""
    begin = trio.current_time()
    assert await stage.server.shutdown() == 0
    return trio.current_time() - begin


def start(stage: Stage, raw: bytes) -> SimulatedPeer:
    peer = stage.connect()
    peer.send(raw)
    return peer


async def test_with_nothing_to_do(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    idle = stage.connect()
    used = start(stage, get("/healthz"))
    await wait_all_tasks_blocked()
    assert await shut_down(stage) == 0
    assert idle.ended
    assert not idle.received
    assert used.ended


async def test_open_streams_finish_and_then_it_is_over(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Not at the end of the grace, nor of the idle time: keep-alive is over too."""
    stage = Stage(nursery, script=Script(events=20, interval_ms=100), grace=10.0, keep_alive=5.0)
    peer = start(stage, post("/generate", PROMPT))
    await trio.sleep(0.05)
    assert await shut_down(stage) == pytest.approx(1.95)
    assert peer.received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert not peer.aborted
    assert stage.outcomes == [Outcome.COMPLETED]


async def test_no_new_work_on_live_connections(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """What comes behind a stream that is still running: health is told, everything else is refused, and the connection ends."""
    stage = Stage(nursery, script=Script(events=20, interval_ms=100), slots=4)
    found = {}
    peers = {path: start(stage, post("/generate", PROMPT)) for path in ("/healthz", "/readyz", "/events", "/generate")}
    await trio.sleep(0.05)
    nursery.start_soon(stage.server.shutdown)
    await wait_all_tasks_blocked()
    for path, peer in peers.items():
        peer.send((post(path, PROMPT) if path == "/generate" else get(path)) + get("/metrics"))
    for path, peer in peers.items():
        method = "POST" if path == "/generate" else "GET"
        await peer.wait_closed()
        stream, found[path] = answers(bytes(peer.received), "POST", method, "GET")
        assert stream.body.endswith(b"[DONE]\n\n")
    assert {path: answer.status for path, answer in found.items()} == {"/healthz": 200, "/readyz": 503, "/events": 503, "/generate": 503}
    for path, answer in found.items():
        assert answer.headers["connection"] == "close"
        if path != "/healthz":
            assert answer.error["code"] == "shutting_down"
            assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("who", ["stream", "json", "waiting", "stalled"])
async def test_when_the_grace_is_over(who: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=100, interval_ms=1000, size=500), grace=3.0, queue=1, window=1000)
    holder = start(stage, post("/generate", PROMPT)) if who == "waiting" else None
    await wait_all_tasks_blocked()
    body = {"model": "m", "prompt": "hi"}
    peer = start(stage, post("/v1/completions", body | {"stream": who in ("stream", "stalled")}))
    if who == "stalled":
        peer.stall()
    await wait_all_tasks_blocked()
    took = await shut_down(stage)
    await wait_all_tasks_blocked()
    assert took == pytest.approx(4 if who == "stalled" else 3)
    assert stage.outcomes == [Outcome.SHUTDOWN] * (2 if holder else 1)
    if who == "stalled":
        assert stage.connections == 0
    else:
        answer = answers(bytes(peer.received))[0]
        assert answer.complete
        assert b'"shutting_down"' in answer.body
        if who == "stream":
            assert b"[DONE]" not in answer.body
        else:
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
    assert stage.backend.active == 0  # type: ignore[attr-defined]
    assert not stage.exit_statuses


@pytest.mark.parametrize(
    ("sent", "took", "told"),
    [(b"GET /hea", 1.0, b"HTTP/1.1 408 "), (post("/generate", None, raw=b"x" * 50)[:-9], 4.0, b"")],
    ids=["head", "body"],
)
async def test_half_sent_requests_hold_nothing_up(
    sent: bytes, took: float, told: bytes, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """A head that has begun gets a second; a body was promised an answer and gets the grace."""
    stage = Stage(nursery, grace=3.0)
    peer = start(stage, sent)
    await wait_all_tasks_blocked()
    assert await shut_down(stage) == pytest.approx(took)
    await wait_all_tasks_blocked()
    assert stage.connections == 0
    assert peer.received.startswith(told)
    assert bool(peer.received) == bool(told)


async def test_head_that_comes_in_time_is_answered(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, grace=3.0)
    raw = post("/generate", PROMPT)
    peer = start(stage, raw[:30])
    await wait_all_tasks_blocked()
    nursery.start_soon(stage.server.shutdown)
    await trio.sleep(0.5)
    peer.send(raw[30:])
    answer = await peer_answer(peer)
    assert (answer.status, answer.headers["connection"], answer.error["code"]) == (503, "close", "shutting_down")


async def test_lingering_does_not_hold_it_up(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, grace=10.0)
    start(stage, get("/nowhere", "Content-Length: 1000000"))
    await wait_all_tasks_blocked()
    assert await shut_down(stage) == pytest.approx(1.0)


async def test_work_that_does_not_end_is_abandoned(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, grace=2.0, cancel_grace=30.0)
    peer = start(stage, get("/events?events=20&interval_ms=1000&cancellation=must_drain"))
    await wait_all_tasks_blocked()
    begin = trio.current_time()
    assert await stage.server.shutdown() == 1
    assert trio.current_time() - begin == pytest.approx(3.0)
    assert stage.exit_statuses == [1]
    assert b"shutting_down" in peer.received


async def test_must_drain_work_that_ends_in_time(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, grace=2.0)
    start(stage, get("/events?events=5&interval_ms=500&cancellation=must_drain"))
    await trio.sleep(0.1)
    assert await shut_down(stage) == pytest.approx(2.4)


# ---- Real processes ----

SLOW = """
import time, trio, trio_sse

class Loading(trio_sse.Backend):
    "Loads for ever, in a thread."
    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED):
        await trio.to_thread.run_sync(time.sleep, 1000, abandon_on_cancel=False)
    async def generate(self, prepared, events): ...

class Stepping(trio_sse.Backend):
    "A step takes 30 s, in a thread, and can't be cut short."
    async def generate(self, prepared, events):
        await events.send(trio_sse.Started())
        await events.send(trio_sse.Token("x"))
        await trio.to_thread.run_sync(time.sleep, 30)
"""


@pytest.fixture
def own_backends(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "own_backends.py").write_text(SLOW)
    return {"PYTHONPATH": f"{ROOT}:{tmp_path}"}


def check_clean(server: ServerProcess) -> None:
    for sign in ("Traceback", "RunFinishedError", "TrioInternalError", "Cancelled", " error ", "Warning"):
        assert sign not in server.printed(), server.printed()


def pid_1() -> list[str]:
    """Runs what follows as the first process of a namespace of its own, as containers do."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--pid", "--fork", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to make process namespaces")
    return [unshare, "--pid", "--fork"]


@pytest.mark.net
def test_everything_at_once() -> None:
    """Three endless streams, two idle connections, one half-sent request, one stalled reader: over within grace + 2 s."""
    grace = 1
    with ServerProcess("--grace", str(grace), "--lab") as server:
        endless = [tcp(server.address) for _ in range(3)]
        for client in endless:
            client.sendall(get("/events?events=100000&interval_ms=50"))
            read_until(client, b"id: 2\n")
        used, unused = tcp(server.address), tcp(server.address)
        used.sendall(get("/healthz"))
        read_until(used, b"}")
        half = tcp(server.address)
        half.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Le")
        stalled = tcp(server.address, receive_buffer=2048)
        stalled.sendall(get("/events?events=100000&size=10000"))
        time.sleep(0.5)
        begin = time.monotonic()
        server.process.terminate()
        assert read_until(used) == b""
        assert read_until(unused) == b""
        assert time.monotonic() - begin < grace
        with pytest.raises(ConnectionRefusedError):
            tcp(server.address)
        for client in endless:
            last = read_until(client)
            assert b"event: error" in last
            assert b"shutting_down" in last
            assert last.endswith(b"\r\n0\r\n\r\n")
        assert server.wait() == 0
        assert time.monotonic() - begin < grace + 2 + 3  # 3: the machine's, not the server's
        assert time.monotonic() - begin > grace
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(server.address)
        check_clean(server)
        for client in (*endless, used, unused, half, stalled):
            client.close()


@pytest.mark.net
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_answers_in_flight_are_finished(number: signal.Signals) -> None:
    with ServerProcess("--grace", "30", "--script", "events=30,interval_ms=50") as server:
        with tcp(server.address) as client:
            client.sendall(post("/generate", PROMPT))
            read_until(client, b"w2 ")
            begin = time.monotonic()
            server.process.send_signal(number)
            rest = read_until(client)
            assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.wait() == 0
        assert time.monotonic() - begin < 10  # not the grace
        check_clean(server)


@pytest.mark.net
def test_signal_right_after_the_first_line() -> None:
    for _ in range(3):
        with ServerProcess(ready="listening on") as server:
            server.process.terminate()
            assert server.wait() == 0
            check_clean(server)


@pytest.mark.net
@pytest.mark.parametrize("as_pid_1", [False, True], ids=["", "pid-1"])
def test_signal_during_load(as_pid_1: bool, own_backends: dict[str, str]) -> None:
    prefix: Sequence[str] = pid_1() if as_pid_1 else ()
    options = ("--backend", "own_backends:Loading", "--grace", "600", "--lab")
    with ServerProcess(*options, environment=own_backends, prefix=prefix, ready="listening on") as server:
        with tcp(server.address) as client:  # what needs no model is served meanwhile
            client.sendall(get("/readyz") + get("/events?events=1000&interval_ms=100"))
            assert read_until(client, b"id: 2\n").startswith(b"HTTP/1.1 503 ")
            begin = time.monotonic()
            server.signal(signal.SIGTERM)
            assert b"shutting_down" in read_until(client)
        assert server.wait() == 0
        assert time.monotonic() - begin < 1 + 3
        check_clean(server)


@pytest.mark.net
@pytest.mark.parametrize("as_pid_1", [False, True], ids=["", "pid-1"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_second_signal(number: signal.Signals, as_pid_1: bool, own_backends: dict[str, str]) -> None:
    prefix: Sequence[str] = pid_1() if as_pid_1 else ()
    options = ("--backend", "own_backends:Stepping", "--grace", "600")
    with ServerProcess(*options, environment=own_backends, prefix=prefix) as server:
        with tcp(server.address) as client:
            client.sendall(post("/generate", PROMPT))
            read_until(client, b'"x"')
            pid = server.pid
            server.signal(number)
            server.wait_printed("shutting down")
            time.sleep(0.5)
            assert server.process.poll() is None
            begin = time.monotonic()
            server.signal(number)
            assert server.wait() == 128 + number
            assert time.monotonic() - begin < 2 + 3
        assert not Path(f"/proc/{pid}").exists()
        check_clean(server)


@pytest.mark.net
@pytest.mark.parametrize("as_pid_1", [False, True], ids=["", "pid-1"])
def test_work_that_cannot_be_stopped_is_abandoned_with_the_process(as_pid_1: bool, own_backends: dict[str, str]) -> None:
    prefix: Sequence[str] = pid_1() if as_pid_1 else ()
    options = ("--backend", "own_backends:Stepping", "--grace", "0.2")
    with ServerProcess(*options, environment=own_backends, prefix=prefix) as server, tcp(server.address) as client:
        client.sendall(post("/generate", PROMPT))
        read_until(client, b'"x"')
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        assert b"shutting_down" in read_until(client)
        assert server.wait() == 1
        assert time.monotonic() - begin < 0.2 + 2 + 3
        assert server.printed().count(" error ") == 1
        assert "abandoned with the process" in server.printed()
        assert "Traceback" not in server.printed()


@pytest.mark.net
@pytest.mark.slow
def test_stalled_client_and_two_signals_at_any_moment() -> None:
    for run in range(8):
        with ServerProcess("--grace", "0.3", "--script", "events=1000,size=5000") as server:
            client = tcp(server.address, receive_buffer=2048)
            client.sendall(post("/generate", PROMPT))
            time.sleep(random.random() * 0.3)
            server.process.terminate()
            time.sleep(random.random() * 0.6)
            server.process.terminate()
            assert server.wait(10) in (0, 128 + signal.SIGTERM, -signal.SIGTERM), run
            check_clean(server)
            client.close()
