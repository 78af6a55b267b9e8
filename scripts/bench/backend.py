"""trio_sse's side of the benchmark: ``--backend backend:Bench`` (with this folder on the path)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import trio
from workload import DRAIN_EVENTS, PACED_EVENTS, Ticks, text

from trio_sse import Backend, EventChannel, Finish, Prepared, Started, Token

BURST = 32  # events sent between two checkpoints


@dataclass(eq=False)
class Stream:
    events: EventChannel
    left: int = PACED_EVENTS
    done: trio.Event = field(default_factory=trio.Event)


class Engine:
    """One task that feeds every paced stream of its kind, as a model's engine does."""

    def __init__(self, staggered: bool) -> None:
        self._staggered = staggered
        self._phases: list[dict[Stream, None]] = [{} for _ in range(Ticks(staggered).phases)]
        self._count = 0
        self._wake = trio.Event()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            ticks = Ticks(self._staggered)
            while self._count:
                due = ticks.next_due()
                await trio.sleep(max(0, due - time.monotonic()))
                self._tick(self._phases[ticks.phase], str(int(due * 1e9)))
            self._wake = trio.Event()

    def _tick(self, streams: dict[Stream, None], label: str) -> None:
        for stream in list(streams):
            try:
                stream.events.send_nowait(Token(label))
            except trio.WouldBlock:
                continue  # a slow reader's own affair
            stream.left -= 1
            if not stream.left:
                stream.done.set()

    async def serve(self, stream: Stream, number: int) -> None:
        phase = self._phases[number % len(self._phases)]
        phase[stream] = None
        self._count += 1
        self._wake.set()
        try:
            await stream.done.wait()
        finally:
            self._count -= 1
            del phase[stream]


class Bench(Backend):
    name = "bench"
    slots = 5000

    def __init__(self) -> None:
        self._engines = {"aligned": Engine(False), "staggered": Engine(True)}
        self._number = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            for engine in self._engines.values():
                nursery.start_soon(engine.run)
            task_status.started()

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        mode = prepared.request.prompt or ""
        await events.send(Started())
        if mode in self._engines:
            self._number += 1
            await self._engines[mode].serve(Stream(events), self._number)
        elif mode == "idle":
            await events.send(Token(text(0)))
            await trio.sleep_forever()
        else:
            await self._burst(events, yields=mode == "yield")
        await events.send(Finish("length"))

    async def _burst(self, events: EventChannel, *, yields: bool) -> None:
        for number in range(DRAIN_EVENTS):
            if yields:
                await trio.lowlevel.checkpoint()
            token = Token(text(number))
            try:
                if number % BURST == BURST - 1:
                    raise trio.WouldBlock
                events.send_nowait(token)
            except trio.WouldBlock:
                await events.send(token)
