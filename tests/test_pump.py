"""The pump: writes that wait for nothing are made in their writers' stead, and only those."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.stage import Stage, peer_answer, post
from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.dialects.native import GenerateAnswer
from trio_sse.events import Event, Finish, Started, Token
from trio_sse.pump import Pump
from trio_sse.simulated import SimulatedTransport
from trio_sse.trace import Outcome, Record


class Reader:
    """A task that waits on a channel and leaves a turn."""

    def __init__(self, channel: EventChannel) -> None:
        self.channel = channel
        self.taken: list[Event] = []
        self.turns = 0
        self.woken = 0

    async def run(self) -> None:
        while not self.channel.closed:
            await self.channel.wait(self.turn)
            self.woken += 1
            self.taken += self.channel.take()

    def turn(self, _now: float) -> int:
        self.turns += 1
        if self.channel.reader is None:
            return 0
        events = self.channel.take()
        self.taken += events
        return len(events)


def channel(pump: Pump | None, capacity: int = 4) -> EventChannel:
    return EventChannel(capacity, Record("one", "/"), pump)


async def test_a_turn_takes_all_that_is_queued_and_wakes_nobody(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    pump = Pump()
    nursery.start_soon(pump.run)
    readers = [Reader(channel(pump)) for _ in range(3)]
    for reader in readers:
        nursery.start_soon(reader.run)
    await wait_all_tasks_blocked()
    for reader in readers:
        reader.channel.send_nowait(Token("a"))
        reader.channel.send_nowait(Token("b"))
    await wait_all_tasks_blocked()
    for reader in readers:
        assert reader.taken == [Token("a"), Token("b")]
        assert (reader.turns, reader.woken) == (1, 0)
        reader.channel.close()
    await wait_all_tasks_blocked()
    assert [reader.woken for reader in readers] == [1, 1, 1]


async def test_without_a_running_pump_the_task_is_woken(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    for pump in (None, Pump()):
        reader = Reader(channel(pump))
        nursery.start_soon(reader.run)
        await wait_all_tasks_blocked()
        reader.channel.send_nowait(Token("a"))
        await wait_all_tasks_blocked()
        assert (reader.taken, reader.turns, reader.woken) == ([Token("a")], 0, 1)
        reader.channel.close()


async def test_turns_that_took_several_events_are_followed_by_a_round_of_patience(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    pump = Pump()
    nursery.start_soon(pump.run)
    took: list[int] = []
    events = 0

    def turn(_now: float) -> int:
        took.append(events)
        return events

    for _ in range(20):  # the scheduler's order within a round is random
        for events, patient in ((1, False), (2, False), (1, True), (1, False)):
            await wait_all_tasks_blocked()
            took.clear()
            pump.call(turn)
            await trio.lowlevel.checkpoint()
            assert not (patient and took)
            await trio.lowlevel.checkpoint()
            assert patient or took == [events]
            await trio.lowlevel.checkpoint()
            assert took == [events]


async def test_a_turn_for_a_task_that_was_cancelled_meanwhile_does_nothing(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    pump = Pump()
    reader = Reader(channel(pump))
    nursery.start_soon(pump.run)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as inner:
            inner.start_soon(reader.run)
            await wait_all_tasks_blocked()
            reader.channel.send_nowait(Token("a"))  # the pump is called …
            scope.cancel()  # … and before it comes round, there is nobody to make a turn for
    await wait_all_tasks_blocked()
    assert reader.turns == 1
    assert reader.taken == []
    assert len(reader.channel) == 1


async def test_a_full_channel_makes_the_turn_itself(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """And the event that found it full comes after those, and waits for no second round."""
    reader = Reader(channel(None))
    nursery.start_soon(reader.run)
    await wait_all_tasks_blocked()
    reader.channel._turn = reader.turn
    reader.channel._queue.extend(Token(each) for each in "abcd")
    await reader.channel.send(Token("e"))
    assert reader.taken == [Token(each) for each in "abcd"]
    await wait_all_tasks_blocked()
    assert reader.taken == [Token(each) for each in "abcde"]
    reader.channel.close()


class Together(Backend):
    """Every tick hands one event to every stream."""

    name = "together"
    slots = 10

    def __init__(self, ticks: int) -> None:
        self._ticks = ticks

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        await events.send(Started())
        for number in range(self._ticks):
            await trio.sleep(1)
            events.send_nowait(Token(f"{number} "))
        await events.send(Finish("stop"))


class Yielding(Backend):
    """Hands over an event, lets the others have their turn, and goes on."""

    name = "yielding"

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        await events.send(Started())
        for _ in range(self._tokens):
            events.send_nowait(Token("x"))
            await trio.lowlevel.checkpoint()
        await events.send(Finish("stop"))


async def test_a_producer_that_only_yields_gets_two_events_into_a_write(
    nursery: trio.Nursery, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rule 4 the scheduler's random order makes it three events in two writes."""
    writes = 0
    write = SimulatedTransport.write

    def counting(transport: SimulatedTransport, data: bytes) -> int:
        nonlocal writes
        writes += 1
        return write(transport, data)

    monkeypatch.setattr(SimulatedTransport, "write", counting)
    stage = Stage(nursery, Yielding(1000))
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "hi"}))
    answer = await peer_answer(peer)
    assert answer.body.count(b"token") == 1000
    assert writes < 550
    await stage.settled()


async def test_one_streams_failing_encoder_is_its_own_affair(
    nursery: trio.Nursery, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same round of the pump: the others' events go out, and so does this one's error."""
    frames = GenerateAnswer.frames
    first: list[GenerateAnswer] = []

    def failing(answer: GenerateAnswer, event: Event) -> bytes:
        if type(event) is Token:
            first.append(answer)
            if answer is first[0] and event.text == "2 ":
                raise ValueError("planted")
        return frames(answer, event)

    monkeypatch.setattr(GenerateAnswer, "frames", failing)
    stage = Stage(nursery, Together(5))
    peers = [stage.connect() for _ in range(4)]
    for peer in peers:
        peer.send(post("/generate", {"prompt": "hi"}))
    answers = [await peer_answer(peer) for peer in peers]
    await stage.settled()
    whole = [b"[DONE]" in answer.body for answer in answers]
    assert sorted(whole) == [False, True, True, True]
    failed = answers[whole.index(False)]
    assert b'{"token":"1 "}' in failed.body
    assert b"event: error" in failed.body
    assert sorted(map(str, stage.outcomes)) == ["backend_error", "completed", "completed", "completed"]


@pytest.mark.parametrize("pumping", [True, False])
async def test_the_kernel_refuses_in_a_turn(pumping: bool, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """The writer's own task takes over, with its deadline; a reader who comes back gets everything, in order."""
    stage = Stage(nursery, Together(40), window=300, write_timeout=60.0, channel_capacity=64)
    stage._pumping = not pumping
    stalled, healthy = stage.connect(), stage.connect()
    stalled.stall()
    for peer in (stalled, healthy):
        peer.send(post("/generate", {"prompt": "hi"}))
    await trio.sleep(20.5)
    assert stage.server.routes.pump.running == pumping
    assert bytes(healthy.received).count(b"token") == 20
    stalled.resume()
    for peer in (stalled, healthy):
        answer = await peer_answer(peer)
        assert [f'{{"token":"{number} "}}'.encode() in answer.body for number in range(40)] == [True] * 40
    await stage.settled()
    assert stage.outcomes == [Outcome.COMPLETED] * 2
