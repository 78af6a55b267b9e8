"""The main job on the fake clock: frames, verdicts, slots."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.stage import Stage, get, peer_answer, post
from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.events import Finish, Started, Token
from trio_sse.script import Script
from trio_sse.trace import Outcome


class TwoLines(Backend):
    """Yields "line one\\nline two" up to twice, and counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        await events.send(Started())
        for _ in range(prepared.request.max_tokens or 2):
            self.steps += 1
            await events.send(Token("line one\nline two"))
        await events.send(Finish("length"))


async def test_generate_frames(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    backend = TwoLines()
    stage = Stage(nursery, backend)
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "hi", "max_new_tokens": 2}))
    answer = await peer_answer(peer)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in answer.headers
    assert answer.body.count(b"\n\n") == 3
    assert [json.loads(event.data) for event in answer.events[:2]] == [{"token": "line one\nline two"}] * 2
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert backend.steps == 2
    await stage.settled()
    assert stage.outcomes == [Outcome.COMPLETED]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n"}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        *[({"prompt": "hi", "max_new_tokens": bad}, "max_new_tokens") for bad in (0, 257, True, 1.0, "5", None, -1, 10**30)],
    ],
)
async def test_generate_refuses(body: object, param: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    backend = TwoLines()
    stage = Stage(nursery, backend)
    peer = stage.connect()
    peer.send(post("/generate", body))
    answer = await peer_answer(peer)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert backend.steps == 0
    await stage.settled()
    assert stage.outcomes == [Outcome.REJECTED]


@pytest.mark.parametrize(
    ("raw", "status"), [(b"", 400), (b"{", 400), (b"[]", 400), (b'{"prompt": "' + b"x" * 16384 + b'"}', 413)], ids=str
)
async def test_generate_refuses_bodies(raw: bytes, status: int, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    backend = TwoLines()
    stage = Stage(nursery, backend)
    peer = stage.connect()
    peer.send(post("/generate", None, raw=raw))
    answer = await peer_answer(peer)
    assert answer.status == status
    assert backend.steps == 0


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_client_leaves_mid_stream(leave: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=100, interval_ms=20))
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "hi", "max_new_tokens": 100}))
    await peer.wait_received(b"w3 ")
    getattr(peer, leave)()
    await trio.sleep(1)
    await stage.settled()
    (record,) = stage.records
    assert record.outcome is Outcome.CLIENT_DISCONNECTED
    assert record.tokens_generated <= 4
    assert record.tokens_after_verdict == 0
    assert peer.aborted


async def test_half_closed_client_is_served_to_the_end(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=5, interval_ms=2500))
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "hi"}))
    peer.shutdown_write()
    answer = await peer_answer(peer)
    assert answer.complete
    assert answer.body.count(b"token") == 5
    assert answer.body.count(b": hb\n\n") >= 10  # one a second: no event is nearer than 2.5 s
    await stage.settled()
    assert stage.outcomes == [Outcome.COMPLETED]


async def test_waiting_client_that_leaves_frees_its_place(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=50, interval_ms=100), queue=2)
    first, second, third = stage.connect(), stage.connect(), stage.connect()
    first.send(post("/generate", {"prompt": "hi", "max_new_tokens": 50}))
    await wait_all_tasks_blocked()
    second.send(post("/generate", {"prompt": "hi"}))
    await wait_all_tasks_blocked()
    third.send(post("/generate", {"prompt": "hi", "max_new_tokens": 1}))
    await wait_all_tasks_blocked()
    assert stage.server.routes.admission.waiting == 2
    second.close()  # a full close is known after the first probe
    await wait_all_tasks_blocked()
    assert stage.server.routes.admission.waiting == 1
    await third.wait_received(b"[DONE]")
    await wait_all_tasks_blocked()
    assert stage.outcomes == [Outcome.CLIENT_DISCONNECTED, Outcome.COMPLETED, Outcome.COMPLETED]
    assert b"HTTP/1.1 200 OK" in third.received
    await stage.settled()


async def test_busy_is_429_without_touching_the_backend(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=50, interval_ms=100))
    first, second = stage.connect(), stage.connect()
    first.send(post("/generate", {"prompt": "hi"}))
    await first.wait_received(b"w1 ")
    steps = stage.backend.steps  # type: ignore[attr-defined]
    second.send(post("/generate", {"prompt": "hi"}))
    answer = await peer_answer(second)
    assert answer.status == 429
    assert answer.headers["retry-after"] == "1"
    assert stage.backend.steps == steps  # type: ignore[attr-defined]


async def test_stalled_reader_goes_at_the_write_timeout(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=10000, size=1000), window=4096, write_timeout=5.0)
    peer = stage.connect()
    peer.stall()
    begin = trio.current_time()
    peer.send(get("/events?events=10000&size=1000"))
    await peer.wait_closed()
    assert trio.current_time() - begin == pytest.approx(5.0, abs=0.1)
    assert peer.aborted
    await stage.settled()
    (record,) = stage.records
    assert record.outcome is Outcome.CLIENT_STALLED
    assert record.events_produced < 100


async def test_must_drain_is_drained_and_counted(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    peer = stage.connect()
    peer.send(get("/events?events=100&interval_ms=10&cancellation=must_drain"))
    await peer.wait_received(b"id: 5\n")
    peer.reset()
    await trio.sleep(0.1)
    assert stage.server.routes.events_admission.running == 1
    await trio.sleep(2)
    await stage.settled()
    (record,) = stage.records
    assert (record.outcome, record.events_produced, record.events_sent, record.events_discarded) == (
        Outcome.CLIENT_DISCONNECTED, 100, 5, 95,
    )  # fmt: skip


async def test_deadline_after_the_head_is_told_in_band(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=100, interval_ms=100), request_deadline=1.05)
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "hi", "max_new_tokens": 100}))
    answer = await peer_answer(peer)
    assert answer.complete
    assert answer.events[-1].event == "error"
    assert json.loads(answer.events[-1].data)["error"]["code"] == "deadline_exceeded"
    assert b"[DONE]" not in answer.body
    await stage.settled()
    assert stage.outcomes == [Outcome.DEADLINE_EXCEEDED]


async def test_delete_cancels(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=100, interval_ms=100))
    peer, other = stage.connect(), stage.connect()
    peer.send(post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "X-Request-Id: mine"))
    await trio.sleep(0.3)
    other.send(get("/requests/mine", method="DELETE"))
    assert (await peer_answer(other, "DELETE")).status == 202
    answer = await peer_answer(peer)
    assert answer.status == 499
    assert answer.headers["x-should-retry"] == "false"
    await stage.settled()
