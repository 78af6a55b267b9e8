"""A language model of a few lines, and a model thread without a thread, for tests of the engine on the fake clock.

The next token depends on every token before it, so a token that is lost, doubled or mixed up changes all that follow. The fake also
checks how it is used: one job at a time, nothing fed beyond a cache's capacity or twice, each cache closed exactly once, never more
memory taken than there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

import trio

from trio_sse.backends.transformers.steps import Chosen, StepFailure, Work
from trio_sse.events import Sampling

T = TypeVar("T")
EOS = 200  # chosen by whom `eos_after` says
VOCABULARY = 95  # the model writes printable ASCII: token n is byte-level token n, "!" and so on


def next_token(tokens: list[int]) -> int:
    return crc32(repr(tokens).encode()) % VOCABULARY


def expected(prompt: list[int], count: int) -> list[int]:
    """The ``count`` tokens that follow ``prompt``, by themselves."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class FakeCache:
    capacity: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    closed: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens)


class FakeModel:
    """A :class:`~trio_sse.backends.transformers.steps.StepModel`.

    ``on_open`` and ``on_step`` are called first and may raise; ``fail_item`` returns an error for one item of a step;
    ``eos_after`` N makes the N-th token of every answer the end; ``cached`` prompt tokens need not be fed.
    """

    eos = frozenset({EOS})

    def __init__(self, *, pool: int = 1000, chunk: int = 8, context: int = 200) -> None:
        self.pool_bytes = pool * 10
        self.chunk = chunk
        self.context = context
        self.used = 0
        self.opened: list[FakeCache] = []
        self.steps: list[list[tuple[FakeCache, int]]] = []  # who, and how many tokens
        self.choose: Callable[[list[int]], int] = next_token
        self.on_open: Callable[[list[int]], None] = lambda prompt: None
        self.on_step: Callable[[int], None] = lambda number: None
        self.on_close: Callable[[FakeCache], None] = lambda cache: None
        self.fail_item: Callable[[FakeCache], Exception | None] = lambda cache: None
        self.eos_after: int | None = None
        self.cached = 0

    def cache_bytes(self, capacity: int) -> int:
        return capacity * 10

    def open(self, capacity: int, sampling: Sampling, prompt: list[int]) -> FakeCache:
        self.on_open(prompt)
        cache = FakeCache(capacity, list(prompt), tokens=prompt[: min(self.cached, len(prompt) - 1)])
        self.used += self.cache_bytes(capacity)
        assert self.used <= self.pool_bytes
        self.opened.append(cache)
        return cache

    def step(self, work: list[Work]) -> list[Chosen | StepFailure | None]:
        assert work
        assert len({id(item.cache) for item in work}) == len(work)
        self.steps.append([(self._mine(item), len(item.ids)) for item in work])
        self.on_step(len(self.steps))
        return [self._item(self._mine(item), item) for item in work]

    def close(self, cache: Any) -> int:
        mine = cache
        assert isinstance(mine, FakeCache)
        assert not mine.closed
        mine.closed = True
        self.used -= self.cache_bytes(mine.capacity)
        self.on_close(mine)
        return self.cache_bytes(mine.capacity)

    def _mine(self, item: Work) -> FakeCache:
        assert isinstance(item.cache, FakeCache)
        return item.cache

    def _item(self, cache: FakeCache, item: Work) -> Chosen | StepFailure | None:
        assert not cache.closed
        assert len(item.ids) <= (self.chunk if cache.length < len(cache.prompt) else 1)
        assert item.ids == (cache.prompt + cache.chosen)[cache.length : cache.length + len(item.ids)]
        cache.tokens += item.ids
        assert cache.length <= cache.capacity
        assert item.choose == (cache.length >= len(cache.prompt))
        if error := self.fail_item(cache):
            return StepFailure(error)
        if not item.choose:
            return None
        token = EOS if len(cache.chosen) + 1 == self.eos_after else self.choose(cache.tokens)
        cache.chosen.append(token)
        return Chosen(token)

    def steps_of(self, cache: FakeCache) -> int:
        return sum(cache is other for step in self.steps for other, _ in step)


class ScriptedRunner:
    """A Runner that takes scripted time: ``seconds(name)`` for each job, ``step`` for steps and nothing for the rest by default.

    As with the thread, a job that has begun runs to its end whoever is cancelled meanwhile.
    """

    def __init__(self, step: float = 1.0) -> None:
        self.step = step
        self.seconds: Callable[[str], float] = lambda name: self.step if name == "step" else 0.0
        self.running = False

    async def call(self, fn: Callable[..., T], *args: Any) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        assert not self.running
        self.running = True
        # The engine wraps its jobs: the model's method is the wrapper's first argument.
        name = getattr(args[0], "__name__", "")
        with trio.CancelScope(shield=True):
            await trio.sleep(self.seconds(name))
        self.running = False
        return fn(*args)
