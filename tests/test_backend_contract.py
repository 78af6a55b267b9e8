"""One contract, every backend: what backends/base.py promises, a clogged consumer included.

A new backend is one line in BACKENDS. The suite knows nothing but the contract: it runs a generation into a channel and looks at what
comes out, when it stops, and what is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.test_engine_backend import Loader
from trio_sse.backends.base import Backend, Prepared
from trio_sse.backends.scripted import ScriptedBackend
from trio_sse.backends.transformers import TransformersBackend
from trio_sse.channel import EventChannel
from trio_sse.errors import HttpError
from trio_sse.events import Event, Finish, GenerationRequest, Started, Token
from trio_sse.evidence.backends import two_steps
from trio_sse.script import Script
from trio_sse.trace import Outcome, Record

LONG = 40  # tokens that a clogged or cancelled generation would like to make
PATIENCE = 120.0  # seconds, for the real model on a busy machine


def fake_model() -> Backend:
    return TransformersBackend(load=Loader())


def real_model() -> Backend:
    return TransformersBackend()


@dataclass
class Case:
    make: Callable[[], Backend]


BACKENDS = [
    pytest.param(Case(lambda: ScriptedBackend(Script(events=LONG, interval_ms=1))), id="scripted"),
    pytest.param(Case(lambda: ScriptedBackend(Script(events=LONG))), id="scripted-burst"),
    pytest.param(Case(lambda: ScriptedBackend(Script(events=LONG, cancellation="must_drain"))), id="scripted-must-drain"),
    pytest.param(Case(two_steps), id="two-lines"),
    pytest.param(Case(fake_model), id="engine-fake-model"),
    pytest.param(Case(real_model), id="engine-real-model", marks=pytest.mark.model),
]
LONG_BACKENDS = [param for param in BACKENDS if param.id != "two-lines"]  # those that can be cancelled before they end of themselves


@asynccontextmanager
async def running(backend: Backend) -> AsyncIterator[Backend]:
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        yield backend
        nursery.cancel_scope.cancel(reason="the test is over")


class Generation:
    """One ``generate`` in a task of its own, and what it does to its channel."""

    def __init__(self, capacity: int = 4) -> None:
        self.record = Record("test", "/test")
        self.channel = EventChannel(capacity, self.record)
        self.scope = trio.CancelScope()
        self.returned = trio.Event()
        self.error: HttpError | None = None

    async def run(self, backend: Backend, prepared: Prepared) -> None:
        try:
            with self.scope:
                await backend.generate(prepared, self.channel)
        except HttpError as error:
            self.error = error
        finally:
            self.channel.close()
            self.returned.set()

    async def read_all(self) -> list[Event]:
        events = []
        while True:
            try:
                events.append(await self.channel.receive())
            except trio.EndOfChannel:
                return events


def request(tokens: int = LONG) -> GenerationRequest:
    return GenerationRequest(prompt="once upon a time", max_tokens=tokens)


def check_whole(events: list[Event], tokens: int) -> None:
    assert type(events[0]) is Started
    assert type(events[-1]) is Finish
    assert [type(event) for event in events].count(Started) == 1
    assert [type(event) for event in events].count(Finish) == 1
    assert sum(event.count for event in events if isinstance(event, Token)) <= tokens


@pytest.mark.parametrize("case", BACKENDS)
async def test_whole_generation(case: Case) -> None:
    with trio.fail_after(PATIENCE):
        async with running(case.make()) as backend, trio.open_nursery() as nursery:
            for _ in range(2):  # the second one is no different
                one = Generation()
                nursery.start_soon(one.run, backend, await backend.prepare(request(5)))
                check_whole(await one.read_all(), 5)
                await one.returned.wait()


@pytest.mark.parametrize("case", BACKENDS)
async def test_clogged_consumer_stops_the_work(case: Case) -> None:
    """What is offered and not taken is at most the channel's capacity and one more; reading on brings the rest, none lost."""
    with trio.fail_after(PATIENCE):
        async with running(case.make()) as backend, trio.open_nursery() as nursery:
            one = Generation(capacity=1)
            nursery.start_soon(one.run, backend, await backend.prepare(request()))
            assert type(await one.channel.receive()) is Started
            await stands_still(one)
            assert one.record.events_produced <= 2
            assert not one.returned.is_set()
            events = [Started(), *await one.read_all()]
            check_whole(events, LONG)
            assert sum(event.count for event in events if isinstance(event, Token)) == one.record.tokens_generated
            await one.returned.wait()


async def stands_still(one: Generation) -> None:
    """Waits until the backend has offered nothing for a while: longer than any of them takes for a step."""
    seen = -1
    while seen != one.record.events_produced:
        seen = one.record.events_produced
        await trio.sleep(0.5)
        await wait_all_tasks_blocked(0.05)


@pytest.mark.parametrize(
    ("case", "clogged"),
    [
        *(pytest.param(*param.values, False, id=f"{param.id}-flowing", marks=param.marks) for param in LONG_BACKENDS),
        *(pytest.param(*param.values, True, id=f"{param.id}-clogged", marks=param.marks) for param in BACKENDS),
    ],
)
async def test_cancelled_generation_ends_and_sends_no_more(case: Case, clogged: bool) -> None:
    with trio.fail_after(PATIENCE):
        async with running(case.make()) as backend, trio.open_nursery() as nursery:
            one = Generation(capacity=1)
            prepared = await backend.prepare(request())
            nursery.start_soon(one.run, backend, prepared)
            for _ in range(1 if clogged else 4):
                await one.channel.receive()
            produced = one.record.events_produced
            one.record.reach(Outcome.CANCELLED, "test")
            one.channel.discard()
            if prepared.drain_budget is None:
                one.scope.cancel(reason="test")
            await one.returned.wait()
            if prepared.drain_budget is None:
                assert one.record.events_produced <= produced + 1
                ended = one.record.events_produced
                await trio.sleep(0.2)
                assert one.record.events_produced == ended
            else:
                assert one.record.events_produced == LONG
            again = Generation()
            nursery.start_soon(again.run, backend, await backend.prepare(request(3)))
            check_whole(await again.read_all(), 3)






@pytest.mark.parametrize("case", BACKENDS)
async def test_cancelled_before_it_began(case: Case) -> None:
    with trio.fail_after(PATIENCE):
        async with running(case.make()) as backend:
            one = Generation()
            prepared = await backend.prepare(request())
            one.scope.cancel(reason="test")
            await one.run(backend, prepared)
            assert one.returned.is_set()
            assert one.record.events_produced <= 1
