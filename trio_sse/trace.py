"""What happened to one exchange: its outcome, its counts, and (if tracing is on) every mark on the way.

One :class:`Record` is made per exchange, filled in by the tasks that serve it, and closed exactly once. Log line, metrics, ``/traces``
and the evidence are all read from closed records, so that no two of them can disagree.

Rules:

1. All times are ``time.monotonic_ns`` readings, one clock for every process of a machine; durations come out of differences.
2. The first verdict counts; whoever comes later is ignored. ``completed`` is a verdict like any other.
3. A mark is ``(kind, at, *values)``; :data:`MARKS` says what the values are. Times, sizes and counts only: never text.
4. At most :data:`MAX_MARKS` marks are kept per exchange; the number of those dropped is part of the trace.

The standard library alone is imported here: ``replay`` must be able to read a trace on a machine that has nothing installed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from enum import StrEnum

__all__ = ["GAP_BUCKETS", "LANES", "MARKS", "MAX_MARKS", "SCHEMA", "Mark", "Outcome", "Record"]

SCHEMA = 1
MAX_MARKS = 20_000

Mark = tuple[str | int | None, ...]


class Outcome(StrEnum):
    """How an exchange ended. Exactly one per exchange."""

    COMPLETED = "completed"
    CLIENT_DISCONNECTED = "client_disconnected"
    CLIENT_STALLED = "client_stalled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    BACKEND_ERROR = "backend_error"
    SHUTDOWN = "shutdown"
    REJECTED = "rejected"
    DRAIN_TIMED_OUT = "drain_timed_out"


# kind → (lane, names of the values). The lane is where a timeline draws it.
MARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "request": ("client", ("body_bytes",)),
    "prepared": ("producer", ("prompt_tokens",)),
    "waiting": ("producer", ("ahead",)),
    "admitted": ("producer", ("slots_in_use",)),
    "started": ("producer", ()),
    "prefill_begin": ("model", ("tokens",)),
    "prefill_end": ("model", ("tokens",)),
    "step_begin": ("model", ("step",)),
    "step_end": ("model", ("step",)),
    "first_token": ("producer", ()),
    "produced": ("producer", ("seq", "tokens")),
    "enqueued": ("channel", ("seq", "wait_ns", "queued")),
    "discarded": ("channel", ("seq", "tokens")),
    "head": ("writer", ("status",)),
    "frames": ("writer", ("events", "bytes")),
    "write": ("socket", ("bytes", "wait_ns", "unsent", "unacked")),
    "heartbeat": ("writer", ()),
    "eof": ("monitor", ()),
    "probe": ("monitor", ("bytes",)),
    "verdict": ("monitor", ("outcome", "witness")),
    "cancel_delivered": ("producer", ()),
    "cache_released": ("model", ("bytes",)),
    "backend_ended": ("producer", ()),
    "slot_released": ("producer", ()),
    "outcome": ("producer", ("outcome",)),
}
LANES = ("client", "monitor", "producer", "channel", "writer", "socket", "model")

# Upper bounds, in seconds, of the inter-token histogram that every record carries: vLLM's own.
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_GAP_BUCKETS_NS = tuple(int(bound * 1e9) for bound in GAP_BUCKETS)
_SHORTEST_NS = _GAP_BUCKETS_NS[0]
# A kept list's own abbreviations, of two marks each: what happens once per event and once per write, at a third of the price.
_QUEUED = "queued"  # at, seq, tokens, queued: produced, and enqueued without waiting
_WROTE = "wrote"  # begin, events, bytes, wait_ns, unsent, unacked: frames, and a write that did not have to wait
_VALUES: dict[str | int | None, int] = {_QUEUED: 3, _WROTE: 5, **{kind: len(names) for kind, (_, names) in MARKS.items()}}


class Record:
    """The account of one exchange.

    Args:
      request_id: the id in ``X-Request-Id``.
      route: the route's template, never the raw path.
      marks: whether to keep marks; the counts are kept in any case.
      clock: nanoseconds on the clock that everything here is measured with.

    Counts: ``tokens_generated`` (offered by the backend), ``tokens_sent`` (their frames were taken by the kernel),
    ``tokens_after_verdict`` (offered after the verdict) and the same for events: ``events_produced``, ``events_sent``,
    ``events_discarded``.
    """

    __slots__ = (
        "_flat", "bytes_sent", "channel_peak", "code", "enqueue_wait_ns", "events_after_verdict", "events_discarded",
        "events_produced", "events_sent", "gap_counts", "largest_write", "marks_dropped", "marks_kept", "method", "now", "outcome",
        "prompt_tokens", "request_id", "route", "status", "t_ended", "t_first_token", "t_last_token", "t_released", "t_request",
        "t_started", "t_verdict", "terminal_events", "tokens_after_verdict", "tokens_generated", "tokens_sent", "tracing", "witness",
        "write_stall_ns",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        route: str,
        method: str = "POST",
        *,
        marks: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.request_id = request_id
        self.route = route
        self.method = method
        self.now = clock
        self.tracing = marks
        self._flat: list[str | int | None] = []
        self.outcome: Outcome | None = None
        self.witness: str | None = None
        self.status: int | None = None
        self.code: str | None = None
        self.marks_kept = self.marks_dropped = 0
        self.prompt_tokens = self.tokens_generated = self.tokens_sent = self.tokens_after_verdict = 0
        self.events_produced = self.events_sent = self.events_discarded = self.events_after_verdict = self.terminal_events = 0
        self.bytes_sent = self.largest_write = self.channel_peak = 0
        self.enqueue_wait_ns = 0  # the longest
        self.write_stall_ns = 0  # in all
        self.gap_counts: list[int] | None = None  # one gap each between two tokens, by GAP_BUCKETS
        self.t_started: int | None = None
        self.t_first_token: int | None = None
        self.t_last_token: int | None = None
        self.t_verdict: int | None = None
        self.t_released: int | None = None
        self.t_ended: int | None = None
        self.t_request = clock()

    def mark(self, kind: str, *values: str | int | None, at: int | None = None) -> None:
        """Keeps one mark, if marks are kept. ``kind`` and ``values`` are those of :data:`MARKS`."""
        if not self.tracing:
            return
        if self.marks_kept < MAX_MARKS:
            self.marks_kept += 1
            # One flat list: a tuple per mark would be one more object for the garbage collector to look at, over and over.
            self._flat += (kind, self.now() if at is None else at, *values)
        else:
            self.marks_dropped += 1

    @property
    def gap_sum_ns(self) -> int:
        """The gaps between tokens, added up."""
        return 0 if self.t_first_token is None or self.t_last_token is None else self.t_last_token - self.t_first_token

    @property
    def marks(self) -> list[Mark]:
        """The marks kept, in order."""
        flat, found, at = self._flat, [], 0
        while at < len(flat):
            end = at + 2 + _VALUES[flat[at]]
            kind, when, *values = flat[at:end]
            if kind == _QUEUED:
                seq, tokens, queued = values
                found += [("produced", when, seq, tokens), ("enqueued", when, seq, 0, queued)]
            elif kind == _WROTE:
                events, size, wait, *kernel = values
                found += [("frames", when, events, size), ("write", when + wait, size, wait, *kernel)]  # type: ignore[operator]
            else:
                found.append((kind, when, *values))
            at = end
        return found

    def started(self) -> None:
        self.t_started = self.now()
        self.mark("started", at=self.t_started)

    def produced(self, tokens: int) -> None:
        """The backend has offered one event that stands for ``tokens`` tokens (0: a tool event)."""
        now = self._count(tokens)
        if self.tracing:
            self.mark("produced", self.events_produced, tokens, at=now)

    def _count(self, tokens: int) -> int:
        """Accounts for one event; returns when that was."""
        self.events_produced += 1
        self.tokens_generated += tokens
        if self.t_verdict is not None:
            self.events_after_verdict += 1
            self.tokens_after_verdict += tokens
        now = self.now()
        if tokens:
            last = self.t_last_token
            if last is None:
                self.t_first_token = now
                self.mark("first_token", at=now)
            else:
                gap = now - last
                if self.gap_counts is None:
                    self.gap_counts = [0] * (len(GAP_BUCKETS) + 1)
                self.gap_counts[0 if gap <= _SHORTEST_NS else bisect_left(_GAP_BUCKETS_NS, gap)] += 1
            self.t_last_token = now
        return now

    def queued(self, tokens: int, queued: int) -> None:
        """:meth:`produced`, for an event that was queued at once as number ``queued``. Once per event: two marks for the price of one."""
        now = self._count(tokens)
        if self.tracing:
            if self.marks_kept < MAX_MARKS - 1:
                self.marks_kept += 2
                self._flat += (_QUEUED, now, self.events_produced, tokens, queued)
            else:
                self.marks_dropped += 2

    def wrote(self, size: int, events: int, tokens: int, begin: int) -> int:
        """The kernel has taken a write that was begun at ``begin``. Returns how long that took, in ns."""
        wait = self.now() - begin
        self.bytes_sent += size
        self.events_sent += events
        self.tokens_sent += tokens
        self.write_stall_ns += wait
        if size > self.largest_write:
            self.largest_write = size
        return wait

    def wrote_at_once(self, size: int, events: int, tokens: int, begin: int, kernel: tuple[int | None, int | None]) -> None:
        """:meth:`wrote`, for a batch of events that the kernel took without a wait. Once per write: two marks for the price of one."""
        wait = self.wrote(size, events, tokens, begin)
        if self.tracing:
            if self.marks_kept < MAX_MARKS - 1:
                self.marks_kept += 2
                self._flat += (_WROTE, begin, events, size, wait, *kernel)
            else:
                self.marks_dropped += 2

    def reach(self, outcome: Outcome, witness: str) -> bool:
        """Records the verdict unless there is one already; says whether this one counts."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.witness = witness
        self.t_verdict = self.now()
        self.mark("verdict", outcome.value, witness, at=self.t_verdict)
        return True

    def outlived(self) -> None:
        """The work went on past its grace: that is the outcome now, and the verdict that began the wait becomes its witness."""
        self.witness = str(self.outcome)
        self.outcome = Outcome.DRAIN_TIMED_OUT

    def released(self) -> None:
        """The slot is free again: the work has really ended."""
        self.t_released = self.now()
        self.mark("slot_released", at=self.t_released)

    def close(self) -> None:
        """Nothing more will be told. The outcome is what it is now."""
        if self.outcome is None:
            raise RuntimeError("an exchange cannot end without an outcome")
        if self.t_ended is not None:
            raise RuntimeError("an exchange cannot end twice")
        self.t_ended = self.now()
        self.mark("outcome", self.outcome.value, at=self.t_ended)

    def summary(self) -> dict[str, object]:
        """Everything but the marks, JSON-ready; times in nanoseconds on the record's clock."""
        return {
            "schema": SCHEMA,
            "request_id": self.request_id,
            "route": self.route,
            "method": self.method,
            "outcome": str(self.outcome) if self.outcome else None,
            "witness": self.witness,
            "status": self.status,
            "code": self.code,
            **{name: getattr(self, name) for name in _COUNTS},
            **{name: getattr(self, name) for name in _TIMES},
        }

    def trace(self) -> dict[str, object]:
        """:meth:`summary` with the marks."""
        return {**self.summary(), "marks": self.marks, "marks_dropped": self.marks_dropped}


_COUNTS = (
    "prompt_tokens", "tokens_generated", "tokens_sent", "tokens_after_verdict", "events_produced", "events_sent",
    "events_discarded", "events_after_verdict", "terminal_events", "bytes_sent", "largest_write", "channel_peak",
    "enqueue_wait_ns", "write_stall_ns",
)  # fmt: skip
_TIMES = ("t_request", "t_started", "t_first_token", "t_last_token", "t_verdict", "t_released", "t_ended")
