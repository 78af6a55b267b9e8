"""trio_sse's side of the benchmark: ``--backend backend:Bench`` (with this folder on the path)."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import sampler
import trio
from workload import DRAIN_EVENTS, INTERVALS, Ticks, frame, text

from trio_sse import Backend, EventChannel, Finish, Prepared, Started, Token
from trio_sse.dialects.native import GenerateAnswer

BURST = 32  # events sent between two checkpoints

if GenerateAnswer().frames(Token(text(1))) != frame(text(1)):
    raise SystemExit("the peers' events are not what trio_sse sends")


class Stream:
    """One paced stream. What its channel does not take waits here for the next tick: no server of the benchmark drops an event."""

    def __init__(self, events: EventChannel) -> None:
        self._events = events
        self._waiting: deque[Token] = deque()

    def offer(self, token: Token) -> None:
        try:
            while self._waiting:
                self._events.send_nowait(self._waiting[0])
                self._waiting.popleft()
            self._events.send_nowait(token)
        except trio.WouldBlock:
            self._waiting.append(token)


class Engine:
    """One task that feeds every paced stream of its mode, as a model's engine does."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._phases: list[dict[Stream, None]] = [{} for _ in range(INTERVALS[mode][1])]
        self._entered = self._count = 0
        self._wake = trio.Event()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            ticks = Ticks(self._mode)
            while self._count:
                await trio.lowlevel.wait_readable(ticks.fd)
                for phase, label in ticks.due():
                    for stream in self._phases[phase]:
                        stream.offer(Token(label))
            ticks.close()
            self._wake = trio.Event()

    async def serve(self, events: EventChannel) -> None:
        """Feeds ``events`` until it is cancelled."""
        stream = Stream(events)
        self._entered += 1
        phase = self._phases[self._entered % len(self._phases)]
        phase[stream] = None
        self._count += 1
        self._wake.set()
        try:
            await trio.sleep_forever()
        finally:
            self._count -= 1
            del phase[stream]


class Bench(Backend):
    name = "bench"
    slots = 5000

    def __init__(self) -> None:
        self._engines = {mode: Engine(mode) for mode in INTERVALS}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        if profile := os.environ.get("BENCH_TIME"):
            sampler.count_time(Path(profile))
        if profile := os.environ.get("BENCH_MEMORY"):
            sampler.count_memory(Path(profile))
        async with trio.open_nursery() as nursery:
            for engine in self._engines.values():
                nursery.start_soon(engine.run)
            task_status.started()

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        mode = prepared.request.prompt or ""
        await events.send(Started())
        if mode in self._engines:
            await self._engines[mode].serve(events)
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
            if number % BURST == BURST - 1:
                await events.send(token)
                continue
            try:
                events.send_nowait(token)
            except trio.WouldBlock:
                await events.send(token)
