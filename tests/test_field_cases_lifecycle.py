"""Field cases L: what goes wrong for people between a request's begin and its end. One table; each case is an experiment.

Most run on the fake clock, where the bounds are exact. Deeper suites stand beside it: ``test_faults`` (every fault at every moment),
``test_connection_netns`` (peers that vanish), ``test_shutdown``, ``test_engine``; memory and descriptors over time are the soak's.
"""

from __future__ import annotations

import ast
import gc
import json
import random
import socket
import ssl
import threading
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trio_sse
from tests.fakes.small_tokenizers import byte_level
from tests.fakes.step_model import expected
from tests.faults.backends import EngineBackend
from tests.support.capture import captured_log, check_quiet
from tests.support.cases import CaseTable
from tests.support.process import live
from tests.support.stage import Answer, Stage, get, peer_answer, post
from tests.support.tls import certificates
from tests.test_engine_backend import Loader
from trio_sse.backends.base import Backend, Prepared
from trio_sse.backends.scripted import ScriptedBackend
from trio_sse.backends.transformers import TransformersBackend
from trio_sse.channel import EventChannel
from trio_sse.dialects import openai
from trio_sse.dialects.base import Answer as Answerer, AnswerContext
from trio_sse.errors import UpstreamFailed
from trio_sse.events import Event, Finish, GenerationRequest, Started, Token
from trio_sse.script import Script
from trio_sse.simulated import SimulatedPeer
from trio_sse.trace import Outcome, Record

LATER = "about the gateway in front of another engine, which is not built yet"
cases = CaseTable(
    {
        "L01": "Client closes mid-stream and the model keeps generating",
        "L02": "Client leaves during prefill, before any token",
        "L03": "Non-streaming request is not cancelled on disconnect",
        "L04": "A queued request whose client left is still executed when a slot frees",
        "L06": "Slots leak on aborts until the server accepts and never answers",
        "L07": "Cancel lands between admission and the start of the stream (RST storm)",
        "L08": "Cleanup runs as an abort on normal completion, or twice",
        "L09": "Stalled reader: memory grows or the send hangs for ever",
        "L11": "Half-open peer (network gone, no FIN)",
        "L13": "One stalled client delays the others",
        "L14": "Optional layers hide the disconnect",
        "L15": "Cancel arrives while a thread is inside a step; the close call itself errors and is swallowed",
        "L16": "Exception in the generate thread leaves the consumer waiting for ever",
        "L17": "A consumer-side timeout or error does not stop the worker",
        "L19": "Calls from a worker thread after the trio run ended, or a deadlock on a full channel at shutdown",
        "L20": "Async generators that hold a nursery or cancel scope",
        "L21": "ExceptionGroup wrapping defeats except-clauses for disconnects",
        "L22": "Shielded cleanup without a time limit",
        "L23": "Cancelled upstream requests leak pool slots until everything times out",
        "L24": "Adapter does not close upstream when the client leaves",
        "L26": "Upstream goes silent but keeps the socket open",
        "L27": "Tokens of concurrent requests get mixed or lost",
        "L29": "Deadline per request, including queue time",
        "L30": "Explicit cancel by id",
    },
    later=dict.fromkeys(("L22", "L23", "L24", "L26"), LATER),
)


def test_every_case_is_settled_or_listed_as_later() -> None:
    cases.check()


CHAT = "/v1/chat/completions"
EVERYTHING = {"api_key": ("secret",), "cors_origin": ("https://a.example",), "request_deadline": 3600.0, "heartbeat": 0.05}
KEY = "Authorization: Bearer secret"


def chat(*headers: str, stream: bool = True, tokens: int = 2000) -> bytes:
    body = {"model": "m", "stream": stream, "max_tokens": tokens, "messages": [{"role": "user", "content": "hi"}]}
    return post(CHAT, body, *headers)


def scripted(stage: Stage) -> ScriptedBackend:
    assert isinstance(stage.backend, ScriptedBackend)
    return stage.backend


def leave(peer: SimulatedPeer, how: str) -> None:
    {"close": peer.close, "reset": peer.reset}[how]()


async def works(stage: Stage, *headers: str) -> Answer:
    peer = stage.connect()
    peer.send(chat(*headers, tokens=1))
    answer = await peer_answer(peer)
    assert answer.status == 200, answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")
    peer.close()
    await stage.settled()
    return answer


both_ways = pytest.mark.parametrize("how", ["close", "reset"])
with_options = pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["bare", "everything"])


@cases.settles("L01")
@both_ways
@with_options
async def test_l01_close_in_mid_stream(how: str, options: dict[str, Any], nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    headers = [KEY] if options else []
    stage = Stage(nursery, script=Script(events=2000, interval_ms=20), **options)
    peer = stage.connect()
    peer.send(chat(*headers))
    while peer.received.count(b"data: ") < 3:
        await peer.wait_news()
    leave(peer, how)
    steps = scripted(stage).steps
    await trio.sleep(0.12)  # a step and 100 ms
    assert scripted(stage).steps <= steps + 1
    await stage.settled()
    assert stage.connections == 0
    assert stage.outcomes == [Outcome.CLIENT_DISCONNECTED]
    await works(stage, *headers)


@cases.settles("L02")
@both_ways
async def test_l02_leaving_in_prefill(how: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Seen by a reader, for there is nothing to write: no step runs, and the next request starts at once."""
    stage = Stage(nursery, script=Script(events=64, prefill_ms=5000))
    peer = stage.connect()
    peer.send(chat(tokens=64))
    await trio.sleep(0.2)
    leave(peer, how)
    begin = trio.current_time()
    await wait_all_tasks_blocked()
    await stage.settled()
    assert trio.current_time() == begin
    assert scripted(stage).steps == 0
    assert stage.outcomes == [Outcome.CLIENT_DISCONNECTED]


@cases.settles("L02")
async def test_l02_prefill_ends_with_its_chunk(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """The engine's prefill is cut into chunks: the one under way is the last."""
    backend = EngineBackend(step=1.0)
    await nursery.start(backend.engine.run)
    stage = Stage(nursery, backend)
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "a long prompt " * 8}))
    await trio.sleep(2.5)
    assert backend.engine.steps == 3
    peer.reset()
    await trio.sleep(1)
    assert backend.engine.steps == 3
    assert backend.model.used == 0
    await stage.settled()


@cases.settles("L03")
@both_ways
async def test_l03_document_that_nobody_waits_for(how: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=2000, interval_ms=20))
    peer = stage.connect()
    peer.send(chat(stream=False))
    await trio.sleep(0.205)
    assert scripted(stage).steps == 10
    leave(peer, how)
    await trio.sleep(0.12)
    assert scripted(stage).steps <= 11
    await stage.settled()
    assert stage.outcomes == [Outcome.CLIENT_DISCONNECTED]
    assert stage.records[0].status is None
    assert b"200" not in peer.received


@cases.settles("L04")
async def test_l04_the_line_is_left_at_once(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=50, interval_ms=20), slots=1, queue=4)
    admission = stage.server.routes.admission
    peers = []
    for _ in range(4):
        peers.append(stage.connect())
        peers[-1].send(chat(tokens=50))
        await wait_all_tasks_blocked()
    assert (admission.running, admission.waiting) == (1, 3)
    peers[1].close()
    peers[2].reset()
    await wait_all_tasks_blocked()
    assert (admission.running, admission.waiting) == (1, 1)
    for peer in (peers[0], peers[3]):
        await peer.wait_received(b"[DONE]")
    await wait_all_tasks_blocked()
    assert scripted(stage).steps == 100  # of A and D
    gone, done = Outcome.CLIENT_DISCONNECTED, Outcome.COMPLETED
    assert stage.outcomes == [gone, gone, done, done]


@cases.settles("L04")
async def test_l04_without_a_line_it_is_429(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=50, interval_ms=20), slots=1, queue=0)
    stage.connect().send(chat(tokens=50))
    await wait_all_tasks_blocked()
    peer = stage.connect()
    peer.send(chat(tokens=50))
    answer = await peer_answer(peer)
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")


@cases.settles("L06")
@pytest.mark.slow
async def test_l06_a_thousand_aborts_at_random_moments(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    rng = random.Random(6)
    stage = Stage(nursery, script=Script(events=8, interval_ms=10), slots=2, queue=1)
    request = chat(tokens=8)

    async def abort() -> None:
        peer = stage.connect()
        if rng.random() < 0.3:  # before the request is whole
            peer.send(request[: rng.randrange(len(request))])
        else:
            peer.send(request)
            await trio.sleep(rng.random() * 0.1)  # before the first token, in mid-stream, during the last chunk, after it
        leave(peer, rng.choice(["close", "reset"]))

    for _ in range(250):
        async with trio.open_nursery() as clients:
            for _ in range(4):
                clients.start_soon(abort)
        await wait_all_tasks_blocked()
    await stage.settled()
    assert stage.connections == 0
    assert len(stage.records) > 600
    for _ in range(2):
        await works(stage)


@cases.settles("L07")
@pytest.mark.slow
async def test_l07_storm_of_resets(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Every start has its end, and no work goes on for more than a step. (On real sockets: test_connection_load.)"""
    rng = random.Random(7)
    backend = EngineBackend(step=0.002)
    await nursery.start(backend.engine.run)
    stage = Stage(nursery, backend, slots=4)
    for _ in range(500):
        peer = stage.connect()
        peer.send(chat(tokens=64))
        if rng.random() < 0.7:
            await trio.sleep(rng.random() * 0.003)
        peer.reset()
    await trio.sleep(0.1)  # the step that is under way
    await stage.settled()
    assert all(work.ended for work in backend.works)
    assert len(backend.works) > 100
    assert all(record.tokens_after_verdict <= 1 for record in stage.records)
    assert (backend.engine.sequences, backend.model.used) == (0, 0)


@cases.settles("L08")
async def test_l08_completion_is_no_abort_and_nothing_is_counted_twice(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """A hundred that complete, and a hundred whose client goes in the instant of the last chunk."""
    stage = Stage(nursery, script=Script(events=3, interval_ms=20))
    admission = stage.server.routes.admission
    for number in range(200):
        peer = stage.connect()
        peer.send(chat(tokens=3))
        await peer.wait_received(b"w3 w" if number >= 100 else b"[DONE]")
        peer.close()
        assert 0 <= admission.running <= 1
        await stage.settled()
    assert stage.outcomes[:100] == [Outcome.COMPLETED] * 100
    assert set(stage.outcomes[100:]) <= {Outcome.COMPLETED, Outcome.CLIENT_DISCONNECTED}
    assert len(stage.records) == 200
    assert not [mark for record in stage.records[:100] for mark in record.marks if mark[0] == "cancel_delivered"]


@cases.settles("L09")
async def test_l09_stalled_readers_stop_their_own_work(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(Script(events=100_000, size=1024), slots=20)
    stage = Stage(nursery, backend, window=4096, write_timeout=5.0, channel_capacity=4)
    peers = [stage.connect() for _ in range(20)]
    for peer in peers:
        peer.stall()
        peer.send(chat(tokens=100_000))
    await wait_all_tasks_blocked()
    steps = backend.steps
    assert steps <= 20 * (1 + 4 + 64)  # what is in the kernel and in one write, in the channel, and offered
    await trio.sleep(4.9)
    assert backend.steps == steps
    await trio.sleep(0.2)
    assert backend.steps <= steps + 20
    await stage.settled()
    assert stage.outcomes == [Outcome.CLIENT_STALLED] * 20
    assert all(peer.aborted for peer in peers)


@cases.settles("L11")
@pytest.mark.net
async def test_l11_accepted_sockets_look_for_peers_that_vanish() -> None:
    """Within a minute, and never before the write timeout. test_connection_netns drops the packets and waits."""
    async with live(script=Script(events=3, interval_ms=10), write_timeout=30.0) as stage:
        await stage.open(chat(tokens=3))
        await stage.wait_outcomes(1)
        (connection,) = stage.server._connections
        sock = connection.transport._sock  # type: ignore[attr-defined]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, tries = (sock.getsockopt(socket.IPPROTO_TCP, name) for name in names)
        assert idle + interval * tries <= 60
        assert 30_000 <= sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000


@cases.settles("L13")
async def test_l13_three_stalled_readers_beside_a_healthy_one(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """The same steps as alone, exactly: a step has its time on the fake clock. What the machine makes of it, a benchmark says."""
    gaps = {}
    for stalled in (0, 3):
        async with trio.open_nursery() as alone:
            backend = EngineBackend(step=0.01)
            backend.slots = 4
            await alone.start(backend.engine.run)
            stage = Stage(alone, backend, window=100, channel_capacity=1, write_timeout=60.0)
            for _ in range(stalled):
                peer = stage.connect()
                peer.stall()
                peer.send(chat(tokens=64))
            await trio.sleep(2)
            stuck = [backend.model.steps_of(cache) for cache in backend.model.opened]
            peer = stage.connect()
            peer.send(chat(tokens=64))
            times = []
            seen = 0
            while b"[DONE]" not in peer.received:
                await peer.wait_news()
                count = peer.received.count(b"data: ")
                if count > seen:
                    seen = count
                    times.append(trio.current_time())
            gaps[stalled] = [round(after - before, 6) for before, after in pairwise(times)]
            assert [backend.model.steps_of(cache) for cache in backend.model.opened[:stalled]] == stuck
            assert backend.engine.paused_sequences == stalled
            alone.cancel_scope.cancel()
    assert gaps[0] == gaps[3]
    assert len(gaps[0]) > 60


@cases.settles("L14")
@pytest.mark.net
@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
async def test_l14_every_option_at_once(stream: bool, tmp_path: Path) -> None:
    """Key, CORS, deadline, heartbeats, traces, and TLS below them. The bare bounds: L01 has the other options on the fake clock."""
    certfile, keyfile = certificates().write(tmp_path)
    options = {**EVERYTHING, "certfile": certfile, "keyfile": keyfile, "lab": True}
    async with live(script=Script(events=2000, interval_ms=20), **options) as stage:
        lower = await stage.open()
        tls = trio.SSLStream(lower, _trusting(), server_hostname="localhost")
        await tls.send_all(chat(KEY, "Origin: https://a.example", stream=stream))
        await stage.wait_until(lambda: scripted(stage).steps >= 5)
        steps = scripted(stage).steps
        lower.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await lower.aclose()
        assert await stage.wait_outcomes(1) == [Outcome.CLIENT_DISCONNECTED]
        assert scripted(stage).steps <= steps + 10
        assert stage.records[0].tokens_after_verdict <= 1
        await stage.wait_connections()
        stage.check_idle()


def _trusting() -> ssl.SSLContext:
    return certificates().client


@cases.settles("L15")
async def test_l15_cancelled_inside_a_step(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Fifty times: the engine knows at once, the step ends, no second one begins, and nothing is swallowed."""
    backend = EngineBackend(step=1.0)
    await nursery.start(backend.engine.run)
    stage = Stage(nursery, backend)
    with captured_log() as log:
        for number in range(50):
            peer = stage.connect()
            peer.send(post("/generate", {"prompt": "hi"}))
            await trio.sleep(0.1 + number % 3)
            steps = backend.engine.steps
            (seq,) = backend.engine._open
            leave(peer, ("close", "reset")[number % 2])
            await wait_all_tasks_blocked()
            assert seq.leaving
            assert backend.engine.steps == steps
            assert stage.server.routes.admission.running == 1  # the step has not ended yet
            await trio.sleep(1)
            await stage.settled()
            assert backend.engine.steps == steps
        check_quiet(log)
    assert stage.outcomes == [Outcome.CLIENT_DISCONNECTED] * 50


class _Fatal(BaseException):
    pass


@cases.settles("L16")
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize(
    ("step", "error"),
    [(5, RuntimeError("boom")), (1, RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")), (2, _Fatal("fatal"))],
    ids=["step-5", "out-of-memory", "base-exception"],
)
async def test_l16_the_model_raises(
    step: int, error: BaseException, path: str, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    backend = EngineBackend(step=0.02)
    await nursery.start(backend.engine.run)
    stage = Stage(nursery, backend)

    def on_step(number: int) -> None:
        if number == step:
            raise error

    backend.model.on_step = on_step
    peer = stage.connect()
    begin = trio.current_time()
    peer.send(post(path, {"prompt": "hi"}))
    with captured_log():
        answer = await peer_answer(peer)
    assert trio.current_time() - begin < 1
    assert b"internal_error" in answer.body
    assert b"[DONE]" not in answer.body
    assert answer.status == (200 if path == "/generate" else 500)
    assert str(error).encode() not in answer.body
    await stage.settled()
    assert stage.outcomes == [Outcome.BACKEND_ERROR]
    assert backend.model.used == 0
    await works(stage)


@cases.settles("L17")
async def test_l17_deadline_stops_the_work(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    backend = EngineBackend(step=0.02)
    await nursery.start(backend.engine.run)
    stage = Stage(nursery, backend, request_deadline=0.3)
    peer = stage.connect()
    peer.send(chat(tokens=500))
    answer = await peer_answer(peer)
    assert b"deadline_exceeded" in answer.body
    steps = backend.engine.steps
    await trio.sleep(1)
    assert backend.engine.steps <= steps + 1
    await stage.settled()
    assert stage.outcomes == [Outcome.DEADLINE_EXCEEDED]


@cases.settles("L17")
async def test_l17_encoder_that_raises_stops_the_work(
    nursery: trio.Nursery, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = AnswerContext(model="m", request_id="id", created=0)
    encoder = type(openai.parse_chat(chat().partition(b"\r\n\r\n")[2], context).answer)
    frames, calls = encoder.frames, count(1)

    def failing(self: Answerer, event: Event) -> bytes:
        if next(calls) == 3:
            raise ValueError("the third chunk")
        return frames(self, event)

    monkeypatch.setattr(encoder, "frames", failing)
    backend = EngineBackend(step=0.02)
    await nursery.start(backend.engine.run)
    stage = Stage(nursery, backend)
    peer = stage.connect()
    peer.send(chat(tokens=500))
    with captured_log():
        answer = await peer_answer(peer)
    assert b"internal_error" in answer.body
    steps = backend.engine.steps
    await trio.sleep(1)
    assert backend.engine.steps <= steps + 1
    await stage.settled()
    assert stage.outcomes == [Outcome.BACKEND_ERROR]


@cases.settles("L19")
@pytest.mark.slow
def test_l19_the_run_ends_while_the_thread_works() -> None:
    """A full channel, nobody who reads, and the end of everything at any moment: the thread is gone, nothing was raised in it."""
    rng = random.Random(19)
    problems: list[object] = []
    hook, threading.excepthook = threading.excepthook, problems.append
    try:
        for _ in range(20):
            trio.run(_stalled_until, rng.random() * 0.03)
    finally:
        threading.excepthook = hook
    assert not problems
    assert not [thread.name for thread in threading.enumerate() if "model" in thread.name]


async def _stalled_until(seconds: float) -> None:
    backend = TransformersBackend(load=Loader())
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(backend.run)
            prepared = await backend.prepare(GenerationRequest(prompt="hi", max_tokens=50))
            nursery.start_soon(backend.generate, prepared, EventChannel(1, Record("id", "/")))
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()


@cases.settles("L20")
async def test_l20_disconnect_at_every_event(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Whatever the garbage collector would complain of is an error in this suite."""
    stage = Stage(nursery, script=Script(events=12, interval_ms=20))
    for number in range(12):
        steps = scripted(stage).steps
        peer = stage.connect()
        peer.send(chat(tokens=12))
        while peer.received.count(b"data: ") < number:
            await peer.wait_news()
        peer.reset()
        await wait_all_tasks_blocked()
        await stage.settled()
        gc.collect()
        assert scripted(stage).steps - steps <= number + 1
    assert set(stage.outcomes) == {Outcome.CLIENT_DISCONNECTED}


@cases.settles("L20")
def test_l20_there_is_no_bare_async_generator() -> None:
    """Nothing to break out of: what yields in an async function is wrapped in a context manager."""
    package = Path(trio_sse.__file__).parent
    bare = []
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AsyncFunctionDef) and any(isinstance(each, ast.Yield) for each in ast.walk(node)):
                names = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
                if "asynccontextmanager" not in names:
                    bare.append(f"{file.name}:{node.lineno} {node.name}")
    assert not bare


class _FailsAsTheClientGoes(Backend):
    def __init__(self) -> None:
        self.peer: SimulatedPeer | None = None

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        await events.send(Started())
        await events.send(Token("one"))
        if self.peer is None:
            await events.send(Finish("stop"))
            return
        await trio.sleep(0.02)
        self.peer.reset()
        raise UpstreamFailed("in the same instant")


@cases.settles("L21")
async def test_l21_two_failures_in_one_instant(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Two hundred times: one line each, no traceback, and the server lives."""
    backend = _FailsAsTheClientGoes()
    stage = Stage(nursery, backend)
    with captured_log() as log:
        for _ in range(200):
            backend.peer = stage.connect()
            backend.peer.send(chat())
            await trio.sleep(0.1)
    await stage.settled()
    assert [entry.getMessage() for entry in log] == ["request"] * 200
    assert not any(entry.exc_info for entry in log)
    assert set(stage.outcomes) <= {Outcome.CLIENT_DISCONNECTED, Outcome.BACKEND_ERROR}
    backend.peer = None
    await works(stage)


@cases.settles("L27")
async def test_l27_nobody_gets_anothers_tokens(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Sixteen at once; each answer depends on its own prompt in every token, and half of the clients leave at random."""
    rng = random.Random(27)
    tokenizer = byte_level()
    backend = EngineBackend(step=0.01)
    backend.slots = 16
    backend.model.pool_bytes = 10**9
    backend.model.context = 10**6
    await nursery.start(backend.engine.run)
    stage = Stage(nursery, backend)
    answers: dict[str, Answer] = {}

    async def client(nonce: str, leaves: bool) -> None:
        peer = stage.connect()
        peer.send(post("/generate", {"prompt": nonce, "max_new_tokens": 200}))
        if leaves:
            await trio.sleep(rng.random() * 2)
            leave(peer, rng.choice(["close", "reset"]))
        else:
            answers[nonce] = await peer_answer(peer)

    async with trio.open_nursery() as clients:
        for number in range(16):
            clients.start_soon(client, f"nonce {number * 7919}", number % 2 == 1)
    assert len(answers) == 8
    for nonce, answer in answers.items():
        text = "".join(json.loads(event.data)["token"] for event in answer.events[:-1])
        assert text == tokenizer.decode(expected(list(tokenizer.encode(nonce).ids), 200))
    await stage.settled()
    assert stage.outcomes.count(Outcome.COMPLETED) == 8


@cases.settles("L29")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
@pytest.mark.parametrize("what", ["slow tokens", "slow prefill", "waiting", "long step"])
async def test_l29_deadline(what: str, stream: bool, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    scripts = {
        "slow tokens": Script(events=100, interval_ms=200),
        "slow prefill": Script(events=3, prefill_ms=5000),
        "waiting": Script(events=100, interval_ms=50, cancellation="must_drain"),
        "long step": Script(events=3, interval_ms=5000),
    }
    stage = Stage(nursery, script=scripts[what], queue=1, request_deadline=0.5)
    if what == "waiting":
        stage.connect().send(chat(tokens=100))  # must drain: holds the slot for 5 s, whatever its own deadline says
        await wait_all_tasks_blocked()
    peer = stage.connect()
    begin = trio.current_time()
    peer.send(chat(stream=stream, tokens=100))
    answer = await peer_answer(peer)
    assert trio.current_time() - begin == pytest.approx(0.5)
    assert b"deadline_exceeded" in answer.body
    assert b"[DONE]" not in answer.body
    assert answer.complete
    assert answer.status == (200 if stream and what != "waiting" else 504)
    await trio.sleep(10)
    await stage.settled()
    assert set(stage.outcomes) == {Outcome.DEADLINE_EXCEEDED}


@cases.settles("L29")
async def test_l29_a_step_that_outlasts_the_deadline(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """The client is told at the deadline; the slot is free when the step has ended."""
    backend = EngineBackend(step=2.0)
    await nursery.start(backend.engine.run)
    stage = Stage(nursery, backend, request_deadline=0.5)
    peer = stage.connect()
    peer.send(chat(tokens=100))
    answer = await peer_answer(peer)
    assert trio.current_time() == pytest.approx(0.5)
    assert b"deadline_exceeded" in answer.body
    assert stage.server.routes.admission.running == 1
    await trio.sleep(1.6)
    await stage.settled()
    assert backend.engine.steps == 1


@cases.settles("L30")
async def test_l30_cancel_by_id(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=1000, interval_ms=20), api_key=("mine", "theirs"))

    async def delete(name: str, key: str = "mine") -> int:
        peer = stage.connect()
        peer.send(get(f"/requests/{name}", f"Authorization: Bearer {key}", method="DELETE"))
        status = (await peer_answer(peer, "DELETE")).status
        peer.close()
        return status

    peer = stage.connect()
    peer.send(chat("Authorization: Bearer mine", "X-Request-Id: abc", tokens=1000))
    await peer.wait_received(b"w3 ")
    assert await delete("nobody") == 404
    assert await delete("abc", "theirs") == 404
    steps = scripted(stage).steps
    assert await delete("abc") == 202
    assert await delete("abc") in (202, 404)  # again: it may have ended meanwhile
    answer = await peer_answer(peer)
    assert b'"code":"request_cancelled"' in answer.body
    assert b"[DONE]" not in answer.body
    assert scripted(stage).steps <= steps + 1
    await wait_all_tasks_blocked()
    assert await delete("abc") == 404  # finished
    await stage.settled()
    assert stage.outcomes.count(Outcome.CANCELLED) == 1
