"""Every figure of a report, recomputed from the raw traces alone. Pure; the standard library only.

Rules:

1. A figure that cannot be told from the trace is None, never 0.
2. Times come out as milliseconds with three places, rounded once, here.
3. Over several runs a figure is told as its median (the lower of two middle ones, so that it was really measured), smallest and
   largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from trio_sse.evidence.matrix import Case
from trio_sse.evidence.traces import Exchange, Mark, TraceError

__all__ = ["FIGURES", "figures_of", "summarise", "verdicts"]

Value = int | float | str | None

_TERMINAL = ("done", "error")

# name → what it is. The order is the report's.
FIGURES: dict[str, str] = {
    "outcome": "how the exchange ended, by the server's record",
    "status": "the response's status, as the client saw it; none where it left before the head",
    "content_type": "the response's Content-Type, as the client saw it",
    "produced": "events the backend offered to the channel (`produced` marks)",
    "received": "events that reached the client whole, terminal ones (error, done, `[DONE]`) included",
    "content_events": "events that reached the client, without the terminal ones",
    "last_event": "the kind of the last event that the client received",
    "seq_gaps": "places where an id that the client saw was not the one before plus one (for a terminal event: not the one before)",
    "channel_peak": "most events queued in the channel (`enqueued` marks)",
    "enqueue_wait_ms": "longest time the backend waited for room in the channel; a wait that the verdict cut short counts up to it",
    "completed_after_verdict": "events produced after a verdict other than `completed`, as when the client was found to be gone",
    "produced_after_leaving": "events produced after the client's own call that made it leave had begun",
    "discarded": "events thrown away, not sent (`discarded` marks)",
    "unaccounted": "events produced less those framed for a write and those discarded",
    "duration_ms": "from the client's request sent to the last byte, end or leave that it saw",
    "first_event_ms": "from the client's request sent to its first event",
    "ahead_events": "most events that had been produced and not yet read by the client",
    "production_share": "time from first to last event produced, as a share of the time from first to last event received",
    "user_backlog_events": "most events that were in the channel or in a write not yet finished",
    "user_backlog_bytes": "the same in bytes of their frames; events never framed count as the frame before them",
    "backlog_beyond_write_events": "most events in user space beyond one write (the one in progress, or the one event taken for the next)",
    "largest_write_bytes": "largest single write (`frames` marks)",
    "write_wait_ms": "longest time from a write's `frames` to the kernel having them all; cut short by the verdict, up to that",
    "kernel_unsent_bytes": "most bytes in the server's kernel not yet sent, seen after a write (`SIOCOUTQNSD`)",
    "kernel_unacked_bytes": "most bytes in the server's kernel not yet acknowledged, unsent ones included (`SIOCOUTQ`)",
    "bytes_taken": "bytes that the server's kernel took for this exchange, in all",
    "leaving_to_eof_ms": "from the client's leaving to the end of file seen by the server",
    "leaving_to_verdict_ms": "from the client's leaving to the verdict",
    "verdict_to_cancel_ms": "from the verdict (other than `completed`) to the cancellation delivered to the producer",
    "verdict_to_cache_ms": "from the verdict to the model's cache memory given back",
    "verdict_to_slot_ms": "from the verdict to the slot given back; negative where the work ended first",
    "leaving_to_slot_ms": "from the client's leaving to the slot given back",
    "slot_after_last_event_ms": "from the last event produced to the slot given back",
    "slot_taken": "1 if the exchange ever held a slot, else 0",
    "slot_released": "how often a slot was given back",
    "model_steps": "steps of the model (or of the small backend)",
    "steps_begun_after_verdict": "of them begun after the verdict",
    "cache_released_bytes": "cache memory given back, in bytes",
    "probes": "probes written after the end of file",
    "marks_dropped": "marks that the server made and did not keep; where there are any, counts of marks are too low",
    "memory_mib": "resident memory of the server before the run",
    "memory_growth_kib": "its highest resident memory until its clients were done, above that",
    "cpu_ms": "processor time of the server's main thread until its clients were done, all exchanges of the run together",
}


def figures_of(exchange: Exchange) -> dict[str, Value]:
    """Every figure of one exchange, in the order of :data:`FIGURES`."""
    found: dict[str, Value] = {}
    found.update(_client(exchange))
    found.update(_machine(exchange))
    if exchange.record is not None:
        found.update(_work(exchange))
        found.update(_backlog(exchange))
        found.update(_release(exchange))
    return {name: found.get(name) for name in FIGURES}


def _ms(begin: int | None, end: int | None) -> float | None:
    return None if begin is None or end is None else round((end - begin) / 1e6, 3)


def _longest(spans: list[tuple[int, int]]) -> float:
    return round(max((end - begin for begin, end in spans), default=0) / 1e6, 3)


def _at(mark: Mark | None) -> int | None:
    return None if mark is None else mark.at


def _number(mark: Mark, name: str) -> int:
    value = mark.values.get(name)
    return value if isinstance(value, int) else 0


def _largest(marks: Iterable[Mark], name: str) -> int | None:
    """The largest value of that name; None where no mark has it, because the platform does not tell."""
    return max((value for mark in marks if isinstance(value := mark.values.get(name), int)), default=None)


def _client(exchange: Exchange) -> dict[str, Value]:
    events = exchange.told("event")
    names = [str(mark.values["name"]) for mark in events]
    sent = next((mark.at for mark in exchange.client if mark.kind == "sent"), None)
    return {
        "status": _maybe(exchange.head.get("status")),
        "content_type": _maybe(exchange.head.get("content_type")),
        "received": len(events),
        "content_events": sum(name not in _TERMINAL for name in names),
        "last_event": names[-1] if names else None,
        "seq_gaps": _gaps(events),
        "first_event_ms": _ms(sent, events[0].at) if events else None,
        "duration_ms": _ms(sent, exchange.client[-1].at) if exchange.client else None,
    }


def _gaps(events: list[Mark]) -> int | None:
    """Ids go up by one; a terminal event repeats the last one."""
    gaps = last = seen = 0
    for mark in events:
        number = mark.values["id"]
        if isinstance(number, int):
            seen += 1
            gaps += number != last + (mark.values["name"] not in _TERMINAL)
            last = number
    return gaps if seen else None


def _maybe(value: object) -> Value:
    return value if isinstance(value, int | str) else None


def _machine(exchange: Exchange) -> dict[str, Value]:
    before, peak = exchange.head.get("memory_before"), exchange.head.get("memory_peak")
    cpu = exchange.head.get("cpu_ns")
    both = isinstance(before, int) and isinstance(peak, int)
    return {
        "marks_dropped": "marks that the server made and did not keep; where there are any, counts of marks are too low",
    "memory_mib": round(before / 2**20, 1) if isinstance(before, int) else None,
        "memory_growth_kib": (peak - before) // 1024 if both else None,  # type: ignore[operator]  # both are integers
        "cpu_ms": round(cpu / 1e6, 3) if isinstance(cpu, int) else None,
    }


def _work(exchange: Exchange) -> dict[str, Value]:
    record = exchange.record or {}
    produced = exchange.all("produced")
    enqueued = exchange.all("enqueued")
    verdict = exchange.first("verdict")
    early = verdict is None or verdict.values.get("outcome") == "completed"
    verdict_at = None if verdict is None or early else verdict.at
    left = exchange.left
    steps = exchange.all("step_begin")
    return {
        "outcome": _maybe(record.get("outcome")),
        "marks_dropped": _maybe(record.get("marks_dropped")),
        "produced": len(produced),
        "channel_peak": _largest(enqueued, "queued") or 0,
        "enqueue_wait_ms": _longest(exchange.waits("produced", "enqueued")),
        "completed_after_verdict": _after(produced, verdict_at),
        "produced_after_leaving": None if left is None else _after(produced, left),
        "discarded": len(exchange.all("discarded")),
        "unaccounted": _unaccounted(exchange),
        "model_steps": len(steps),
        "steps_begun_after_verdict": _after(steps, verdict_at),
        "production_share": _share(produced, exchange.told("event")),
        "ahead_events": _most_ahead(produced, exchange.told("event")),
    }


def _after(marks: list[Mark], moment: int | None) -> int:
    return 0 if moment is None else sum(mark.at > moment for mark in marks)


def _share(produced: list[Mark], received: list[Mark]) -> float | None:
    if not produced or not received or received[0].at == received[-1].at:
        return None
    return round((produced[-1].at - produced[0].at) / (received[-1].at - received[0].at), 3)


def _most_ahead(produced: list[Mark], received: list[Mark]) -> int:
    ahead = most = 0
    steps = [(mark.at, 1) for mark in produced] + [(mark.at, -1) for mark in received if mark.values["name"] not in _TERMINAL]
    for _, step in sorted(steps):
        ahead += step
        most = max(most, ahead)
    return most


def _unaccounted(exchange: Exchange) -> int:
    """What nobody can say the whereabouts of."""
    framed = sum(_number(mark, "events") for mark in exchange.all("frames"))
    return len(exchange.all("produced")) - framed - len(exchange.all("discarded"))


def _backlog(exchange: Exchange) -> dict[str, Value]:
    """Walks the marks once and keeps what is in user space: queued events, and the frames of a write that has not finished."""
    sizes: list[int] = []  # bytes per event, in the order in which they were framed
    for mark in exchange.all("frames"):
        if events := _number(mark, "events"):
            sizes += [_number(mark, "bytes") // events] * events
    entered = framed = written = writing = most = beyond = most_bytes = 0
    usual = sizes[-1] if sizes else 0
    for mark in exchange.server:
        if mark.kind == "enqueued":
            # Not one more per mark: the stream's start and end pass through the channel too, and have no number of their own.
            entered = max(entered, _number(mark, "seq"))
        elif mark.kind == "frames":
            writing = _number(mark, "events")
            framed += writing
        elif mark.kind == "write":
            written, writing = framed, 0
        elif mark.kind in ("verdict", "discarded"):
            break  # from here on, what is left is thrown away
        else:
            continue
        waiting = max(0, entered - written)
        most, beyond = max(most, waiting), max(beyond, waiting - max(1, writing))
        known = sizes[written:entered]
        most_bytes = max(most_bytes, sum(known) + usual * (waiting - len(known)))
    writes = exchange.all("write")
    return {
        "user_backlog_events": most,
        "user_backlog_bytes": most_bytes,
        "backlog_beyond_write_events": beyond,
        "largest_write_bytes": _largest(exchange.all("frames"), "bytes"),
        "write_wait_ms": _longest(exchange.waits("frames", "write")),
        "kernel_unsent_bytes": _largest(writes, "unsent"),
        "kernel_unacked_bytes": _largest(writes, "unacked"),
        "bytes_taken": _maybe((exchange.record or {}).get("bytes_sent")),
    }


def _release(exchange: Exchange) -> dict[str, Value]:
    verdict, slot, cache = (exchange.first(kind) for kind in ("verdict", "slot_released", "cache_released"))
    if verdict is not None and verdict.values.get("outcome") == "completed":
        verdict = None  # pronounced when all is done already: nothing follows from it
    produced = exchange.last("produced")
    freed = [_number(mark, "bytes") for mark in exchange.all("cache_released")]
    return {
        "leaving_to_eof_ms": _ms(exchange.left, _at(exchange.first("eof"))),
        "leaving_to_verdict_ms": _ms(exchange.left, _at(verdict)),
        "verdict_to_cancel_ms": _ms(_at(verdict), _at(exchange.first("cancel_delivered"))),
        "verdict_to_cache_ms": _ms(_at(verdict), _at(cache)),
        "verdict_to_slot_ms": _ms(_at(verdict), _at(slot)),
        "leaving_to_slot_ms": _ms(exchange.left, _at(slot)),
        "slot_after_last_event_ms": _ms(_at(produced), _at(slot)),
        "slot_taken": int(exchange.first("admitted") is not None),
        "slot_released": len(exchange.all("slot_released")),
        "cache_released_bytes": sum(freed) if freed else None,
        "probes": len(exchange.all("probe")),
    }


def summarise(exchanges: Iterable[Exchange]) -> dict[str, dict[str, object]]:
    """Figure → its median, smallest, largest and every value, over the exchanges that a case is about (not its companions)."""
    rows = [figures_of(exchange) for exchange in exchanges if exchange.role == "subject"]
    return {name: _spread([row[name] for row in rows]) for name in FIGURES}


def _spread(values: list[Value]) -> dict[str, object]:
    numbers = [value for value in values if isinstance(value, int | float)]
    if numbers:
        return {"median": statistics.median_low(numbers), "min": min(numbers), "max": max(numbers), "values": values}
    told = sorted({value for value in values if isinstance(value, str)})
    return {"median": ", ".join(told) if told else None, "min": None, "max": None, "values": values}


def verdicts(case: Case, summary: dict[str, dict[str, object]]) -> list[tuple[str, bool, list[Value]]]:
    """For each rule of ``case``: the rule, whether it held in every run, and the values that speak against it (else all values)."""
    results = []
    for rule in case.must:
        if rule.figure not in FIGURES:
            raise TraceError(f"{case.name}: {rule.figure} is no figure")
        values = summary[rule.figure]["values"]
        if not isinstance(values, list):
            raise TraceError(f"{case.name}: {rule.figure} has no values")
        against = [value for value in values if not rule.holds(value)]
        results.append((str(rule), bool(values) and not against, against or values))
    return results
