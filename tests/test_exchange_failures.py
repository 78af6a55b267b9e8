"""Backends that fail, stall or lie: a clean error, the slot back, the next request works, and nothing of the cause gets out."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.stage import Answer, Stage, get, peer_answer, post
from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.errors import BadRequest, UpstreamFailed
from trio_sse.events import Event, Finish, GenerationRequest, Started, Token
from trio_sse.simulated import SimulatedPeer
from trio_sse.trace import Outcome

SECRET = "/etc/secret: the model's own words"


class Weird(BaseException):
    """What a library should not raise."""


class Scene(Backend):
    """Does what the test says, once; afterwards it works."""

    def __init__(self, play: Callable[[EventChannel], Awaitable[None]], *, prepare: BaseException | None = None) -> None:
        self.play = play
        self.failing: BaseException | None = prepare
        self.budget: float | None = None
        self.begun = self.ended = 0

    async def prepare(self, request: GenerationRequest) -> Prepared:
        await trio.lowlevel.checkpoint()
        error, self.failing = self.failing, None
        if error is not None:
            raise error
        return Prepared(request=request, drain_budget=self.budget)

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        self.begun += 1
        try:
            await self.play(events)
        finally:
            self.ended += 1


async def works(events: EventChannel) -> None:
    await say(events, Started(), Token("fine"), Finish("stop"))


async def say(events: EventChannel, *what: Event) -> None:
    for event in what:
        await events.send(event)


def raising(error: BaseException, *before: Event) -> Callable[[EventChannel], Awaitable[None]]:
    async def play(events: EventChannel) -> None:
        await say(events, *before)
        raise error

    return play


async def ask(stage: Stage, path: str = "/generate") -> Answer:
    peer = stage.connect()
    body = {"prompt": "hi"} if path == "/generate" else {"prompt": "hi", "stream": False}
    peer.send(post(path, body))
    answer = await peer_answer(peer)
    await stage.settled()
    return answer


async def ask_again(stage: Stage, backend: Scene) -> None:
    backend.play = works
    answer = await ask(stage)
    assert answer.body == b'data: {"token":"fine"}\n\ndata: [DONE]\n\n'
    assert backend.begun == backend.ended


FAULTS = [RuntimeError(SECRET), ValueError(SECRET), Weird(SECRET), BaseExceptionGroup(SECRET, [Weird(SECRET), OSError(SECRET)])]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("where", ["prepare", "before", "after"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_our_own_fault(
    fault: BaseException, where: str, path: str, nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    before: list[Event] = [Started(), Token("one"), Token("two")] if where == "after" else []
    backend = Scene(raising(fault, *before), prepare=fault if where == "prepare" else None)
    stage = Stage(nursery, backend)
    with caplog.at_level(logging.ERROR, "trio_sse"):
        answer = await ask(stage, path)
    assert SECRET not in answer.body.decode()
    assert SECRET in caplog.text
    if where == "after" and path == "/generate":
        assert answer.status == 200
        assert answer.complete
        assert [event.event for event in answer.events] == ["message", "message", "error"]
        assert json.loads(answer.events[-1].data)["error"]["code"] == "internal_error"
    else:
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert stage.outcomes == [Outcome.BACKEND_ERROR]
    await ask_again(stage, backend)


@pytest.mark.parametrize("grouped", [False, True])
async def test_a_refusal_by_the_backend_keeps_its_words(grouped: bool, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """A backend's own nursery wraps even a single exception: that must not turn a 400 into a 500."""
    error: Exception = BadRequest("prompt is too long.", param="prompt")
    backend = Scene(raising(ExceptionGroup("", [error]) if grouped else error))
    stage = Stage(nursery, backend)
    answer = await ask(stage)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert stage.outcomes == [Outcome.REJECTED]
    await ask_again(stage, backend)


async def test_upstream_error_after_the_head(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    backend = Scene(raising(UpstreamFailed("gone"), Started(), Token("one")))
    stage = Stage(nursery, backend)
    answer = await ask(stage)
    assert answer.body.endswith(
        b'event: error\ndata: {"error":{"message":"gone","type":"upstream_error","code":"upstream_failed","param":null}}\n\n'
    )
    assert stage.outcomes == [Outcome.BACKEND_ERROR]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_no_finish_is_an_error(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def play(events: EventChannel) -> None:
        await say(events, Started(), Token("one"))

    backend = Scene(play)
    stage = Stage(nursery, backend)
    answer = await ask(stage, path)
    assert b"internal_error" in answer.body
    assert b"[DONE]" not in answer.body
    await ask_again(stage, backend)


async def test_a_frame_that_is_too_long(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """What was framed before it still arrives."""

    async def play(events: EventChannel) -> None:
        await say(events, Started(), Token("one"), Token("x" * 5000), Token("three"), Finish("stop"))

    backend = Scene(play)
    stage = Stage(nursery, backend, max_event=1000)
    answer = await ask(stage)
    assert [event.event for event in answer.events] == ["message", "error"]
    assert json.loads(answer.events[0].data) == {"token": "one"}
    assert stage.outcomes == [Outcome.BACKEND_ERROR]
    await ask_again(stage, backend)


async def test_failure_while_the_client_leaves(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Two tasks fail in the same instant: one outcome, no exception group, the server lives."""
    peers: list[SimulatedPeer] = []

    async def play(events: EventChannel) -> None:
        await say(events, Started(), Token("one"))
        await trio.sleep(1)
        peers[0].reset()
        raise RuntimeError(SECRET)

    backend = Scene(play)
    stage = Stage(nursery, backend)
    peers.append(stage.connect())
    peers[0].send(post("/generate", {"prompt": "hi"}))
    await trio.sleep(2)
    await stage.settled()
    assert len(stage.records) == 1
    await ask_again(stage, backend)


@pytest.mark.parametrize("drains", [False, True], ids=["cancellable", "must-drain"])
async def test_work_that_outlives_its_grace(drains: bool, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """The socket goes, the slot does not, until the work ends."""

    async def play(events: EventChannel) -> None:
        await say(events, Started())
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 60):
            await trio.sleep(50)  # a step that nothing can interrupt

    backend = Scene(play)
    backend.budget = 1.0 if drains else None
    stage = Stage(nursery, backend, cancel_grace=5.0)
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "hi"}))
    await trio.sleep(1)
    peer.reset()
    await trio.sleep(10)
    routes = stage.server.routes
    assert stage.outcomes == [Outcome.DRAIN_TIMED_OUT]
    assert peer.aborted
    assert (routes.admission.running, routes.admission.lost) == (1, 1)
    other = stage.connect()
    other.send(get("/readyz"))
    answer = await peer_answer(other, "GET")
    assert (answer.status, answer.error["code"]) == (503, "slots_lost")
    await trio.sleep(60)
    await stage.settled()
    assert stage.outcomes == [Outcome.DRAIN_TIMED_OUT, Outcome.REJECTED]
    await ask_again(stage, backend)


async def test_must_drain_work_that_may_outlast_the_grace_is_refused(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    backend = Scene(works)
    backend.budget = 5.1
    stage = Stage(nursery, backend, cancel_grace=5.0)
    answer = await ask(stage)
    assert (answer.status, answer.error["code"]) == (400, "drain_too_long")
    assert backend.begun == 0
    backend.budget = 5.0
    await ask_again(stage, backend)


async def test_slow_prefill_then_the_deadline_is_a_504(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def play(events: EventChannel) -> None:
        await trio.sleep(100)

    backend = Scene(play)
    stage = Stage(nursery, backend, request_deadline=2.0)
    answer = await ask(stage)
    assert answer.status == 504
    assert answer.headers["x-should-retry"] == "false"
    assert stage.outcomes == [Outcome.DEADLINE_EXCEEDED]
    await ask_again(stage, backend)


async def test_waiting_too_long_for_a_slot_is_a_429(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def play(events: EventChannel) -> None:
        await say(events, Started())
        await trio.sleep(100)
        await say(events, Finish("stop"))

    stage = Stage(nursery, Scene(play), queue=1, queue_timeout=5.0)
    first, second = stage.connect(), stage.connect()
    first.send(post("/generate", {"prompt": "hi"}))
    await wait_all_tasks_blocked()
    second.send(post("/generate", {"prompt": "hi"}))
    begin = trio.current_time()
    answer = await peer_answer(second)
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert trio.current_time() - begin == pytest.approx(5.0)
    assert stage.backend.begun == 1  # type: ignore[attr-defined]
