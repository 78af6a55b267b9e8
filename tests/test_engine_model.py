"""The engine with the packaged model: what the fake model cannot show."""

from __future__ import annotations

import codecs
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tokenizers import Tokenizer

from tests.test_text import TEXTS, byte_alphabet, pieces
from trio_sse.backends.transformers.backend import PreparedText, TransformersBackend, load_model
from trio_sse.backends.transformers.loading import converted, packaged_model
from trio_sse.backends.transformers.steps import Cache, Chosen, StepFailure, StepModel, Work
from trio_sse.channel import EventChannel
from trio_sse.events import Event, Finish, GenerationRequest, Message, Sampling, Started, Token
from trio_sse.trace import Record

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "Dear Sir or Madam,",
]


class Recording:
    """Passes everything on to a real model, and keeps the ids that were chosen for each cache."""

    def __init__(self, steps: StepModel) -> None:
        self.real = steps
        self.context, self.eos, self.chunk, self.pool_bytes = steps.context, steps.eos, steps.chunk, steps.pool_bytes
        self.chosen: dict[int, list[int]] = {}  # by the order in which the caches were opened
        self.open_caches: dict[int, int] = {}
        self.steps = 0

    def cache_bytes(self, capacity: int) -> int:
        return self.real.cache_bytes(capacity)

    def open(self, capacity: int, sampling: Sampling, prompt: list[int]) -> Cache:
        cache = self.real.open(capacity, sampling, prompt)
        self.open_caches[id(cache)] = len(self.chosen)
        self.chosen[len(self.chosen)] = []
        return cache

    def step(self, work: list[Work]) -> list[Chosen | StepFailure | None]:
        self.steps += 1
        results = self.real.step(work)
        for item, result in zip(work, results, strict=True):
            if isinstance(result, Chosen):
                self.chosen[self.open_caches[id(item.cache)]].append(result.id)
        return results

    def close(self, cache: Cache) -> int:
        del self.open_caches[id(cache)]
        return self.real.close(cache)


class Loader:
    steps: Recording
    tokenizer: Any

    def __call__(self, model: str, **options: Any) -> Any:
        loaded = load_model(model, **options)
        loaded.warm()
        self.steps = Recording(loaded.steps)
        self.tokenizer = loaded.tokenizer
        return _Loaded(loaded, self.steps)


class _Loaded:
    def __init__(self, real: Any, steps: Recording) -> None:
        self.name, self.slots, self.tokenizer, self.steps = real.name, real.slots, real.tokenizer, steps

    def warm(self) -> None:
        """Done, before the recording began."""


@asynccontextmanager
async def running(dtype: str = "auto") -> AsyncIterator[tuple[TransformersBackend, Loader]]:
    loader = Loader()
    backend = TransformersBackend(load=loader, dtype=dtype, threads=1, slots=8)  # two stall on a busy machine
    async with trio.open_nursery() as nursery:
        await nursery.start(backend.run)
        yield backend, loader
        assert backend.kv_cache_bytes == 0
        assert loader.steps.open_caches == {}
        nursery.cancel_scope.cancel()


async def answer(backend: TransformersBackend, request: GenerationRequest) -> list[Event]:
    channel = EventChannel(1000, Record("id", "/", marks=True))
    await backend.generate(await backend.prepare(request), channel)
    channel.close()
    events = []
    while True:
        try:
            events.append(await channel.receive())
        except trio.EndOfChannel:
            return events


def shown(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token))


async def test_text_is_the_one_shot_decode() -> None:
    """Prompt by prompt and chat by chat, whatever the model writes; N tokens, one prefill and N − 1 decode steps."""
    async with running() as (backend, loader):
        for prompt in PROMPTS:
            before = loader.steps.steps
            events = await answer(backend, GenerationRequest(prompt=prompt, max_tokens=12))
            ids = [token for token in loader.steps.chosen[len(loader.steps.chosen) - 1] if token not in loader.steps.eos]
            assert shown(events) == loader.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
            assert sum(event.count for event in events if isinstance(event, Token)) == len(ids)
            assert loader.steps.steps - before == len(ids)
            assert events[0] == Started()
            assert events[-1] == Finish("length")
        events = await answer(backend, GenerationRequest(messages=(Message("user", "Say hello."),), max_tokens=60))
        assert shown(events).strip()
        assert "<|im" not in shown(events)
        assert shown(events) == shown(
            await answer(backend, GenerationRequest(messages=(Message("user", "Say hello."),), max_tokens=60))
        )


@pytest.fixture(scope="module")
def packaged_tokenizer() -> Tokenizer:
    tokenizer: Tokenizer = converted(packaged_model(), print).tokenizer.backend_tokenizer
    return tokenizer


def test_packaged_tokenizer_over_random_ids(packaged_tokenizer: Tokenizer) -> None:
    """As tests/test_text.py does it with small tokenizers: 10,000 sequences of the packaged one."""
    alphabet = {c: n for n, c in enumerate(byte_alphabet())}
    special = {n for n, token in packaged_tokenizer.get_added_tokens_decoder().items() if token.special}
    rng = random.Random(8)
    size = packaged_tokenizer.get_vocab_size()
    for n in range(10_000):
        if n % 3:
            ids = [rng.randrange(size) for _ in range(rng.randrange(12))]
        else:
            ids = packaged_tokenizer.encode("".join(rng.choices(TEXTS, k=2))).ids[rng.randrange(3) :]
        spelt = ["" if token in special else packaged_tokenizer.id_to_token(token) for token in ids]
        data = bytes(alphabet[c] for token in spelt for c in token or "")
        shown = "".join(pieces(packaged_tokenizer, ids))
        assert shown == codecs.getincrementaldecoder("utf-8")("replace").decode(data, True)
        if "\ufffd" not in shown:
            assert shown == packaged_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_split_characters_arrive_whole(packaged_tokenizer: Tokenizer, text: str) -> None:
    """D01, and that a generation which ends in the middle of a character shows what the one-shot decode shows."""
    ids = packaged_tokenizer.encode(text).ids
    assert "".join(pieces(packaged_tokenizer, ids)) == packaged_tokenizer.decode(ids) == text
    for end in range(len(ids)):
        assert "".join(pieces(packaged_tokenizer, ids[:end])) == packaged_tokenizer.decode(ids[:end])


@pytest.mark.parametrize("dtype", ["float32", "auto"])
async def test_same_tokens_alone_and_in_company(dtype: str) -> None:
    """Neighbours that are admitted, paused, cancelled and done change nothing."""
    async with running(dtype) as (backend, loader):
        alone = {}
        for prompt in PROMPTS:
            await answer(backend, GenerationRequest(prompt=prompt, max_tokens=24))
            alone[prompt] = loader.steps.chosen[len(loader.steps.chosen) - 1]
        texts = {}

        async def together(prompt: str, delay: float) -> None:
            await trio.sleep(delay)
            texts[prompt] = shown(await answer(backend, GenerationRequest(prompt=prompt, max_tokens=24)))

        async def visitor(delay: float) -> None:
            await trio.sleep(delay)
            with trio.move_on_after(0.3):
                await answer(backend, GenerationRequest(prompt="A visitor " * 40, max_tokens=200))

        async with trio.open_nursery() as nursery:
            for n, prompt in enumerate(PROMPTS):
                nursery.start_soon(together, prompt, 0.05 * n)
                nursery.start_soon(visitor, 0.13 * n)
        for prompt, ids in alone.items():
            expected = loader.tokenizer.backend_tokenizer.decode(
                [token for token in ids if token not in loader.steps.eos], skip_special_tokens=True
            )
            assert texts[prompt] == expected


async def test_aborts_at_random_moments_leave_the_pool_empty() -> None:
    rng = random.Random(4)
    async with running() as (backend, loader):

        async def abort(n: int) -> None:
            await trio.sleep(rng.uniform(0, 4))
            with trio.move_on_after(rng.uniform(0, 0.4)):
                await answer(backend, GenerationRequest(prompt="word " * rng.randrange(1, 300), max_tokens=100))

        async with trio.open_nursery() as nursery:
            for n in range(40):
                nursery.start_soon(abort, n)
        assert backend.kv_cache_bytes == 0
        assert loader.steps.open_caches == {}
        assert shown(await answer(backend, GenerationRequest(prompt=PROMPTS[0], max_tokens=5)))


async def test_cancelling_a_long_prefill_takes_at_most_the_chunk_that_runs() -> None:
    async with running() as (backend, loader):
        prepared = await backend.prepare(GenerationRequest(prompt="word " * 4000, max_tokens=10))
        assert isinstance(prepared, PreparedText)
        assert prepared.prompt_tokens >= 4000
        channel = EventChannel(16, Record("id", "/", marks=True))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(backend.generate, prepared, channel)
                while loader.steps.steps < 3:  # noqa: ASYNC110  (the model thread counts)
                    await trio.sleep(0.001)
                begun = loader.steps.steps
                scope.cancel()
        assert loader.steps.steps <= begun + 1
        assert loader.steps.steps * loader.steps.chunk < 4000
