"""The report of a recording, as Markdown. The same figures give the same bytes, everywhere; the standard library only.

What is written here is part of every recording made so far: a change would make their reports differ from what is regenerated.
Whoever changes it raises :data:`FORMAT` and keeps the old form for the recordings that have it:

1. Values beside a rule were ordered as text, so that ``1.5 … 2.025`` could hide an 8.68.
2. They are ordered as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trio_sse.evidence.figures import FIGURES, verdicts
from trio_sse.evidence.matrix import Matrix
from trio_sse.evidence.traces import Exchange

__all__ = ["FORMAT", "render", "told", "walk"]

FORMAT = 2

Summary = dict[str, dict[str, object]]  # figure → median, min, max, values
Summaries = dict[str, Summary]  # case → its summary

_REFERENCE = ("produced", "received", "channel_peak", "completed_after_verdict", "enqueue_wait_ms", "duration_ms", "largest_write_bytes")

_TABLES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Work",
        "How each exchange ended, and how much work was done, delivered and thrown away.",
        ("outcome", "status", "produced", "received", "completed_after_verdict", "discarded", "unaccounted", "model_steps"),
    ),
    (
        "Pace",
        "Who waited for whom.",
        ("duration_ms", "first_event_ms", "channel_peak", "enqueue_wait_ms", "write_wait_ms", "ahead_events", "production_share"),
    ),
    (
        "Backlog and memory",
        "What lay between the backend and the reader, and what the server's process took.",
        (
            "user_backlog_events", "user_backlog_bytes", "backlog_beyond_write_events", "largest_write_bytes", "kernel_unsent_bytes",
            "kernel_unacked_bytes", "bytes_taken", "memory_mib", "memory_growth_kib", "cpu_ms",
        ),
    ),
    (
        "From leaving to release",
        "Milliseconds from the client's own call to what followed from it. `–` where there was nothing to follow.",
        (
            "leaving_to_eof_ms", "leaving_to_verdict_ms", "verdict_to_cancel_ms", "verdict_to_cache_ms", "verdict_to_slot_ms",
            "leaving_to_slot_ms", "produced_after_leaving", "slot_after_last_event_ms", "cache_released_bytes",
        ),
    ),
)  # fmt: skip


def render(
    name: str,
    matrix: Matrix,
    runs: int,
    environment: dict[str, object],
    summaries: Summaries,
    traces: dict[str, list[Exchange]],
    form: int = FORMAT,
) -> str:
    """The whole report.

    Args:
      name: the recording's.
      matrix: the cases that were run.
      runs: how many runs of each.
      environment: what ``environment.json`` says.
      summaries: :func:`~trio_sse.evidence.figures.summarise` of each case.
      traces: the exchanges of each case, of which one is told mark by mark.
      form: the recording's format.
    """
    parts = [_opening(name, matrix, runs, environment), _beside_reference(matrix, summaries)]
    for title, text, columns in _TABLES:
        rows = [[f"`{case.name}`", *(_spread(summaries[case.name][column]) for column in columns)] for case in matrix.cases]
        parts.append(f"## {title}\n\n{text}\n\n{_table(['case', *columns], rows)}")
    parts.append(_must_hold(matrix, summaries, form))
    parts.append(_tracing_cost(summaries))
    parts.append(_timelines(matrix))
    walked = [exchange for exchange in traces.get(matrix.walkthrough, []) if exchange.role == "subject"]
    if walked:
        parts.append(_walkthrough(matrix.walkthrough, walked[0]))
    parts.append("## What each figure is\n\n" + "\n".join(f"- `{figure}`: {text}." for figure, text in FIGURES.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _opening(name: str, matrix: Matrix, runs: int, environment: dict[str, object]) -> str:
    rows = [[key, str(value)] for key, value in sorted(environment.items())]
    return (
        f"# Recording {name}\n\n"
        f"{len(matrix.cases)} cases, {runs} runs each, over real loopback sockets with the server in a process of its own. A cell is the "
        "median of all runs, with the smallest and the largest in brackets where they differ. Every figure below is recomputed from "
        "`traces/` by `python -m trio_sse replay`, which needs nothing but Python; what each one is stands at the end.\n\n"
        "Timings include the instrumentation, and scripted work is not inference.\n\n"
        f"{_table(['environment', ''], rows)}"
    )


def _beside_reference(matrix: Matrix, summaries: Summaries) -> str:
    rows = []
    for case in matrix.cases:
        known = [figure for figure in _REFERENCE if figure in case.reference]
        rows += [[f"`{case.name}`", figure, _cell(case.reference[figure]), _spread(summaries[case.name][figure])] for figure in known]
    if not rows:
        return ""
    return (
        "## Beside a published reference\n\n"
        "Figures that were published elsewhere for cases of the same kind, on another machine and another server, beside ours. They "
        "are no benchmark of each other: only the counts compare.\n\n"
        f"{_table(['case', 'figure', 'reference', 'ours'], rows)}"
    )


def _must_hold(matrix: Matrix, summaries: Summaries, form: int) -> str:
    rows = []
    for case in matrix.cases:
        for rule, held, values in verdicts(case, summaries[case.name]):
            rows.append([f"`{case.name}`", f"`{rule}`", "holds" if held else "**does not hold**", told(values, form)])
    notes = [f"- `{case.name}`: {case.title}. {case.notes}".rstrip() for case in matrix.cases]
    failed = sum("not" in row[2] for row in rows)
    return (
        "## What must hold\n\n"
        f"Of {len(rows)} rules {len(rows) - failed} hold in every run, {failed} do not.\n\n"
        f"{_table(['case', 'rule', '', 'measured'], rows)}\n\n" + "\n".join(notes)
    )


def told(values: list[int | float | str | None], form: int = FORMAT) -> str:
    """Up to three different values, or the smallest and the largest."""
    if form == 1:
        texts = sorted({str(value) for value in values}, key=lambda text: (len(text), text))
    else:
        numbers = sorted({value for value in values if isinstance(value, int | float)})
        texts = [*map(str, numbers), *sorted({str(value) for value in values if not isinstance(value, int | float)})]
    return ", ".join(texts) if len(texts) <= 3 else f"{texts[0]} … {texts[-1]}"


def _tracing_cost(summaries: Summaries) -> str:
    on, off = summaries.get("tracing_on"), summaries.get("tracing_off")
    if on is None or off is None:
        return ""
    rows = [[figure, _spread(off[figure]), _spread(on[figure])] for figure in ("duration_ms", "cpu_ms", "memory_growth_kib")]
    rows.append(["cpu per event, µs", _per_event(off), _per_event(on)])
    return (
        "## What tracing costs\n\n"
        "The same burst without marks and with them, six marks for each event. Both keep the counts; `cpu_ms` is processor time of the "
        "server's loop.\n\n"
        f"{_table(['figure', 'off', 'on'], rows)}"
    )


def _per_event(summary: Summary) -> str:
    cpu, events = summary["cpu_ms"]["median"], summary["received"]["median"]
    return _cell(cpu * 1000 / events) if isinstance(cpu, float) and isinstance(events, int) and events else _cell(None)


def _timelines(matrix: Matrix) -> str:
    pictures = [f"### {case.name}\n\n{case.title}.\n\n![{case.name}](timelines/{case.name}.svg)" for case in matrix.cases if case.timeline]
    return (
        "## Timelines\n\n"
        "The first run of each case. A dot is a moment (an event received, produced, framed, written or, in grey, discarded), a green bar "
        "the slot held, a red bar somebody who waits (the backend for room in the channel, a write for the kernel), a blue or brown bar "
        "the model at work, a stepped line a size.\n\n" + "\n\n".join(pictures)
    )


def _walkthrough(name: str, exchange: Exchange) -> str:
    return (
        "## One cancelled stream, mark by mark\n\n"
        f"The first run of `{name}`, both sides in one order; milliseconds from the moment at which the client leaves.\n\n"
        f"```\n{chr(10).join(walk(exchange))}\n```"
    )


def walk(exchange: Exchange) -> list[str]:
    """Every mark of both sides as a line of text; time 0 is when the client leaves, or its first mark if it never does."""
    marks = exchange.in_order()
    zero = exchange.left if exchange.left is not None else marks[0].at
    lines = []
    for mark in marks:
        values = " ".join(f"{key}={value}" for key, value in mark.values.items() if value is not None)
        lines.append(f"{(mark.at - zero) / 1e6:10.3f} ms  {mark.side}  {mark.kind:<16} {values}".rstrip())
    return lines


def _spread(summary: dict[str, object]) -> str:
    median, low, high = (summary.get(key) for key in ("median", "min", "max"))
    if low is None or low == high:
        return _cell(median)
    return f"{_cell(median)} [{_cell(low)} … {_cell(high)}]"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(columns: list[str], rows: Iterable[list[str]]) -> str:
    line: Callable[[list[str]], str] = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731  (three uses below)
    return "\n".join([line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)])
