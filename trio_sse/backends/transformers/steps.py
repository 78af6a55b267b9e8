"""The seam between the engine (trio, no torch) and a model (torch, no trio).

The engine decides which sequences step; a :class:`StepModel` does the arithmetic of one step. Every method of a StepModel is called
from one thread, the model thread, and never from two at once. The engine's tests put a few lines of plain Python here.

One step is one forward over a batch of :class:`Work`. Each item feeds some tokens of one sequence: a chunk of its prompt (prefill)
or the one token chosen last (decode). Where ``choose`` is set, the token that follows is chosen by the sequence's own sampler.

The life of a sequence's cache::

    open(capacity, sampling) ─▶ step([Work…])* ─▶ close()      close is called exactly once, whatever happened in between
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trio_sse.events import Sampling, TokenLogprob

__all__ = ["Cache", "Chosen", "StepFailure", "StepModel", "Work"]


class Cache(Protocol):
    """One sequence's KV cache, sampler and generator. ``length`` tokens are in it, of at most ``capacity``."""

    @property
    def length(self) -> int: ...

    @property
    def capacity(self) -> int: ...


@dataclass(slots=True)
class Work:
    """Feed ``ids`` (one for decode, up to a chunk for prefill) to ``cache``; choose the next token if ``choose``."""

    cache: Cache
    ids: list[int]
    choose: bool


@dataclass(slots=True, frozen=True)
class Chosen:
    """The token that was chosen, with its log probabilities where the request asked for them."""

    id: int
    logprob: TokenLogprob | None = None


@dataclass(slots=True, frozen=True)
class StepFailure:
    """This item failed (its sampler raised, say); its neighbours in the batch did not."""

    error: Exception


class StepModel(Protocol):
    """A causal language model that steps.

    Attributes:
      context: the longest sequence, in tokens.
      eos: the ids that end a generation.
      chunk: how many prompt tokens one step may feed for one sequence.
      pool_bytes: all cache memory there is.
    """

    context: int
    eos: frozenset[int]
    chunk: int
    pool_bytes: int

    def cache_bytes(self, capacity: int) -> int:
        """What a cache for ``capacity`` tokens takes from the pool. May be called from any thread."""

    def open(self, capacity: int, sampling: Sampling, prompt: list[int]) -> Cache:
        """Takes cache memory for one sequence from the pool; the engine has made sure that it is there.

        ``prompt`` is for penalties that look at it, and for a prefix that is still cached: ``length`` of the new cache says how
        many of its tokens need not be fed again (always less than ``len(prompt)``).
        """

    def step(self, work: list[Work]) -> list[Chosen | StepFailure | None]:
        """One forward over ``work``, one result per item: None where nothing was to be chosen. Raises if the forward failed."""

    def close(self, cache: Cache) -> int:
        """Gives the cache's memory back once the device has finished with it; returns how many bytes that were."""
