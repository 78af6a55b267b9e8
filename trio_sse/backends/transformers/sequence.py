"""One generation as the engine sees it: where it stands, what it holds, and where its events go. Pure.

    WAITING ──admit──▶ OPEN ──finished, failed or cancelled──▶ CLOSING ──the memory is back──▶ RELEASED
       └──────────────────────────────cancelled────────────────────────────────────────────────▶┘

The engine alone changes these fields, apart from ``outbox`` and ``wake``, which it shares with the task that waits in ``serve``:
the engine appends to the outbox, that task takes from it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

import trio

from trio_sse.backends.transformers.steps import Cache, Work
from trio_sse.backends.transformers.text import TokenStream
from trio_sse.channel import EventChannel
from trio_sse.events import Event, Sampling

__all__ = ["Sequence", "State"]


class State(Enum):
    WAITING = "waiting"
    OPEN = "open"
    CLOSING = "closing"
    RELEASED = "released"


class Sequence:
    """One generation: a prompt, what has come of it, and where that goes.

    Args:
      ids: the prompt, at least one token.
      max_tokens: how many tokens to generate at most, at least 1.
      sampling: how they are chosen.
      text: makes events of them.
      events: takes the events.
    """

    __slots__ = (
        "busy", "cache", "done", "error", "events", "fed", "generated", "ids", "last", "leaving", "max_tokens", "outbox",
        "reserved", "sampling", "state", "steps", "text", "wake",
    )  # fmt: skip

    def __init__(self, ids: list[int], max_tokens: int, sampling: Sampling, text: TokenStream, events: EventChannel) -> None:
        self.ids = ids
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.text = text
        self.events = events
        self.state = State.WAITING
        self.reserved = 0  # bytes of the pool
        self.cache: Cache | None = None
        self.busy = False  # the model thread has its cache in hand
        self.leaving = False  # cancelled
        self.fed = 0  # prompt tokens that are in the cache
        self.last = 0  # the token chosen last, not yet fed
        self.generated = 0
        self.steps = 0  # model steps that it was part of
        self.error: Exception | None = None
        self.outbox: deque[Event] = deque()  # what the channel had no room for
        self.wake = trio.Event()  # its task has something to do
        self.done = trio.Event()  # RELEASED

    @property
    def capacity(self) -> int:
        """How many tokens will be in the cache at most."""
        return len(self.ids) + self.max_tokens - 1

    @property
    def prefilling(self) -> bool:
        """Some of the prompt has not been fed yet."""
        return self.fed < len(self.ids)

    def next_work(self, chunk: int) -> Work:
        """What its next step does: a prompt chunk of at most ``chunk`` tokens, or one token. The prompt's end chooses a token too."""
        assert self.cache is not None
        if not self.prefilling:
            return Work(self.cache, [self.last], choose=True)
        ids = self.ids[self.fed : self.fed + chunk]
        return Work(self.cache, ids, choose=self.fed + len(ids) == len(self.ids))
