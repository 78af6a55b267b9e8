"""trio_sse's own backend, driven in its process: TransformersBackend, its engine, and one event channel with its reader per request.

Every call runs one scenario and returns its figures. Readers here are tasks; ``engine_server.py`` measures through HTTP.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import trio
from engine_figures import STREAMS, decoding, gaps, moments, percentile, prompts, resident_mb, spread

from trio_sse.backends.transformers import TransformersBackend
from trio_sse.backends.transformers.backend import PreparedText
from trio_sse.channel import EventChannel
from trio_sse.events import GenerationRequest, Token
from trio_sse.trace import Record

__all__ = ["Ours"]

Call = dict[str, Any]
Found = dict[str, Any]


@dataclass
class Reader:
    """One request: its prompt, cut to ``prompt_tokens``, and when its tokens left the channel. ``stalled``: nobody takes them."""

    prompt: str
    tokens: int
    prompt_tokens: int | None = None
    stalled: bool = False
    times: list[float] = field(default_factory=list)
    record: Record = field(default_factory=lambda: Record("bench", "/", marks=True))

    @property
    def steps(self) -> int:
        """Model steps that it has been part of."""
        return sum(mark[0] in ("prefill_begin", "step_begin") for mark in self.record.marks)


class Ours:
    """The backend on a trio loop of its own."""

    def __init__(self, dtype: str, threads: int) -> None:
        self.backend = TransformersBackend(dtype=dtype, threads=threads, slots=max(STREAMS))

    def serve(self, answer_all: Callable[[Callable[[Call], Awaitable[Found]]], Awaitable[None]]) -> None:
        """Answers calls until there are no more."""
        trio.run(self._main, answer_all)

    async def _main(self, answer_all: Callable[[Callable[[Call], Awaitable[Found]]], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.backend.run)
            await answer_all(self._one)
            nursery.cancel_scope.cancel(reason="the benchmark is over")

    async def _one(self, call: Call) -> Found:
        scenario = getattr(self, "_" + call.pop("do"))
        found: Found = await scenario(**call)
        self._check_empty()
        return found

    def _check_empty(self) -> None:
        if self.backend.kv_cache_bytes or self.backend.paused_sequences:
            raise RuntimeError(f"the pool still holds {self.backend.kv_cache_bytes} bytes")

    async def _generate(self, reader: Reader) -> None:
        channel = EventChannel(16, reader.record)
        request = GenerationRequest(prompt=reader.prompt, max_tokens=reader.tokens)
        async with trio.open_nursery() as nursery:
            if not reader.stalled:
                nursery.start_soon(self._read, reader, channel)
            try:
                prepared = await self.backend.prepare(request)
                if reader.prompt_tokens is not None and isinstance(prepared, PreparedText):
                    prepared = replace(prepared, ids=prepared.ids[: reader.prompt_tokens], prompt_tokens=reader.prompt_tokens)
                await self.backend.generate(prepared, channel)
            finally:
                channel.close()

    async def _read(self, reader: Reader, channel: EventChannel) -> None:
        while True:
            try:
                event = await channel.receive()
            except trio.EndOfChannel:
                return
            if isinstance(event, Token):
                reader.times.extend([time.perf_counter()] * event.count)

    # ---- Scenarios ----

    async def _memory(self) -> Found:
        await trio.lowlevel.checkpoint()
        return {"resident_mb": resident_mb()}

    async def _decode(self, streams: int, tokens: int) -> Found:
        """``streams`` at once; meanwhile a task that sleeps for 1 ms notes how late it is woken."""
        readers = [Reader(prompt, tokens) for prompt in prompts(streams)]
        late: list[float] = []
        async with trio.open_nursery() as watching:
            watching.start_soon(_lateness, late)
            async with trio.open_nursery() as nursery:
                for reader in readers:
                    nursery.start_soon(self._generate, reader)
            watching.cancel_scope.cancel(reason="measured")
        found = decoding([reader.times for reader in readers])
        return found | {"loop_late_p99_ms": 1e3 * percentile(late, 0.99)}

    async def _first_token(self, long: int, tokens: int) -> Found:
        """Three streams decode; a short request comes, alone and then while a prompt of ``long`` tokens is being read."""
        texts = prompts(5)
        decoders = [Reader(text, tokens) for text in texts[:3]]
        quiet, beside = Reader(texts[3], 2), Reader(texts[4], 2)
        much = _long(long)
        async with trio.open_nursery() as nursery:
            for reader in decoders:
                nursery.start_soon(self._generate, reader)
            await _until(lambda: all(reader.times for reader in decoders))
            at_quiet = time.perf_counter()
            await self._generate(quiet)
            at_long = time.perf_counter()
            nursery.start_soon(self._generate, much)
            await trio.sleep(0.2)
            at_beside = time.perf_counter()
            await self._generate(beside)
            await _until(lambda: bool(much.times))
            at_end = time.perf_counter()
            nursery.cancel_scope.cancel(reason="seen enough")
        between = [gap for reader in decoders for gap in gaps(reader.times, at_long, at_end)]
        return {
            "ttft_short_ms": 1e3 * (quiet.times[0] - at_quiet),
            "ttft_short_beside_long_ms": 1e3 * (beside.times[0] - at_beside),
            "ttft_long_ms": 1e3 * (much.times[0] - at_long),
            **spread("itl_beside_long", between),
        }

    async def _stalled(self, rounds: int, tokens: int) -> Found:
        """One healthy stream, alone and beside three stalled ones, in turn; and how many steps the stalled ones took meanwhile."""
        alone: list[float] = []
        beside: list[float] = []
        moved = 0
        texts = prompts(4)
        for _ in range(rounds):
            healthy = Reader(texts[0], tokens)
            await self._generate(healthy)
            alone += gaps(healthy.times)
            stalled = [Reader(text, 400, stalled=True) for text in texts[1:]]
            async with trio.open_nursery() as nursery:
                for reader in stalled:
                    nursery.start_soon(self._generate, reader)
                await _until(lambda: self.backend.paused_sequences == 3)
                before = sum(reader.steps for reader in stalled)
                healthy = Reader(texts[0], tokens)
                await self._generate(healthy)
                beside += gaps(healthy.times)
                moved += sum(reader.steps for reader in stalled) - before
                nursery.cancel_scope.cancel(reason="measured")
        found = spread("alone", alone) | spread("beside_stalled", beside)
        ratios = {f"stalled_{p}_ratio": found[f"beside_stalled_{p}_ms"] / found[f"alone_{p}_ms"] for p in ("p50", "p99")}
        return found | ratios | {"stalled_steps": moved}

    async def _cancel(self, times: int, long: int) -> Found:
        """From the verdict to the return of ``generate``: of one of eight that decode, and of one within a prompt of ``long`` tokens."""
        found: Found = {}
        for kind in ("decode", "prefill"):
            latencies = []
            async with trio.open_nursery() as nursery:
                for text in prompts(7) if kind == "decode" else []:
                    nursery.start_soon(self._generate, Reader(text, 4000))
                for wait in moments(times, 0.3, 1.2):
                    victim = Reader(prompts(1)[0], 4000) if kind == "decode" else _long(long)
                    latencies.append(await self._abort(victim, wait))
                nursery.cancel_scope.cancel(reason="measured")
            found |= spread(f"cancel_{kind}", latencies)
        return found

    async def _abort(self, reader: Reader, wait: float) -> float:
        """Cancels a request after ``wait`` seconds; returns how long it took to end, in seconds."""
        begin = 0.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._generate, reader)
            await trio.sleep(wait)
            begin = time.perf_counter()
            nursery.cancel_scope.cancel(reason="that is what is measured")
        return time.perf_counter() - begin

    async def _aborts(self, times: int) -> Found:
        """``times`` aborts at random moments, sixteen at once; a third of the prompts are long. The pool must be empty afterwards."""
        waits = list(enumerate(moments(times, 0.0, 0.6)))
        latencies: list[float] = []

        async def abort_some() -> None:
            while waits:
                n, wait = waits.pop()
                latencies.append(await self._abort(_long(1000) if n % 3 == 0 else Reader(prompts(1)[0], 400), wait))

        async with trio.open_nursery() as nursery:
            for _ in range(max(STREAMS)):
                nursery.start_soon(abort_some)
        return {"aborts": len(latencies), "bytes_left": self.backend.kv_cache_bytes, "abort_p50_ms": 1e3 * statistics.median(latencies)}


def _long(tokens: int) -> Reader:
    return Reader(prompts(1, 6 * tokens)[0], 2, prompt_tokens=tokens)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (a benchmark may look a hundred times a second)
        await trio.sleep(0.01)


async def _lateness(late: list[float]) -> None:
    while True:
        begin = time.perf_counter()
        await trio.sleep(0.001)
        late.append(time.perf_counter() - begin - 0.001)
