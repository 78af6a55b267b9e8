"""The transport benchmark's results as JSON, as a table and as a picture."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["write", "write_profile"]

BASE = "uvicorn"  # + Starlette: what the ratios are to
NAMES = {
    "events_per_second": "events/s",
    "answers_per_second": "answers/s",
    "opened_per_second": "opened/s",
    "cpu_us_per_event": "CPU µs/event",
    "cpu_us_per_answer": "CPU µs/answer",
    "late_p50": "late p50, µs",
    "late_p99": "late p99, µs",
    "delivered": "delivered in time",
    "kib_per_stream": "KiB/stream",
}
_MORE = ("events_per_second", "answers_per_second", "opened_per_second", "delivered")  # of the others less is better


class Case(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def figures(self) -> tuple[str, ...]: ...


Runs = dict[str, dict[str, list[dict[str, float]]]]
Summary = dict[str, dict[str, dict[str, float]]]


def write(folder: Path, facts: dict[str, Any], cases: Sequence[Case], runs: Runs) -> str:
    """Writes the three files; returns the table."""
    summary = {case.name: _summary(case, runs[case.name]) for case in cases}
    text = _table(facts, cases, runs, summary)
    # One measurement per line: a run can be looked through, and compared with another one.
    measured = ",\n".join(
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(
            f"   {json.dumps(server)}: [\n" + ",\n".join(f"    {json.dumps(_rounded(each))}" for each in results) + "\n   ]"
            for server, results in rows.items()
        )
        + "\n  }"
        for name, rows in ((case.name, runs[case.name]) for case in cases)
    )
    medians = {name: {server: _rounded(row) for server, row in rows.items()} for name, rows in summary.items()}
    head = json.dumps({"facts": facts, "summary": medians}, indent=1)
    (folder / "transport.json").write_text(head[:-2] + f',\n "runs": {{\n{measured}\n }}\n}}\n')
    (folder / "transport.md").write_text(text)
    _plot(folder / "transport.svg", cases, summary, facts["servers"])
    return text


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {key: float(f"{value:.6g}") for key, value in row.items()}


def _summary(case: Case, rows: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Server → the median of every figure, and ``…_ratio``: the median over the rounds of the figure over uvicorn's."""
    summary: dict[str, dict[str, float]] = {}
    for name, runs in rows.items():
        if not all(runs):  # it failed
            summary[name] = {}
            continue
        summary[name] = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        for key in case.figures:
            pairs = list(zip(runs, rows.get(BASE, []), strict=False))
            if pairs and all(rows[BASE]):
                summary[name][f"{key}_ratio"] = statistics.median(mine[key] / (theirs[key] or 1) for mine, theirs in pairs)
    return summary


def _table(facts: dict[str, Any], cases: Sequence[Case], runs: Runs, summary: Summary) -> str:
    names: list[str] = facts["servers"]
    rounds = {len(next(iter(runs[case.name].values()))) for case in cases}
    everything = [row for rows in summary.values() for row in rows.values()]
    machine = facts["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        "# Transport",
        "",
        (
            f"Medians of {' or '.join(map(str, sorted(rounds)))} interleaved rounds; in brackets the median ratio to uvicorn + Starlette "
            "(uvloop, httptools) within the same round. ↑: more is better, ↓: less is better. `raw` is no server but the limit: a uvloop "
            "protocol that frames and writes each event, and does nothing else. One server process on one core, the client on the other."
        ),
        "",
        f"{machine.get('cpu', machine.get('machine'))}, {machine['cores']} cores, {machine['kernel']}, {machine['recorded']}; {versions}.",
        "",
        (
            f"Load of the machine at the begin: {facts['load']}. Longest that other processes kept a server from its core: "
            f"{_most(everything, 'server_waited'):.0%} of its window. "
            f"The client was busy for at most {_most(everything, 'client_busy'):.0%}."
        ),
        "",
        "| case | figure | " + " | ".join(names) + " |",
        "| --- | --- |" + " ---: |" * len(names),
    ]
    for case in cases:
        for index, key in enumerate(case.figures):
            cells = [_cell(summary[case.name][name], key) for name in names]
            arrow = "↑" if key in _MORE else "↓"
            lines.append(f"| {case.name if index == 0 else ''} | {NAMES[key]} {arrow} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, float], key: str) -> str:
    if key not in row:
        return "failed"
    value = row[key]
    shown = f"{value:.0%}" if key == "delivered" else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    ratio = row.get(f"{key}_ratio")
    return shown if ratio is None or key == "delivered" else f"{shown} ({ratio:.2f})"


def _most(rows: Sequence[dict[str, float]], key: str) -> float:
    return max((row[key] for row in rows if key in row), default=0.0)


# Case → the figure that tells its cost, that figure, and function → samples.
Times = dict[str, tuple[str, float, dict[str, int]]]
# Case → its streams, and module → bytes that all of them hold.
Memory = dict[str, tuple[int, dict[str, int]]]
# The parts of a profile, by the beginning of a module's name; the first that fits.
_PARTS = {
    "making the events (the benchmark's own)": ("backend", "workload"),
    "encoding": ("trio_sse.dialects", "trio_sse.sse", "json"),
    "channel": ("trio_sse.channel", "trio_sse.pump"),
    "writer": ("trio_sse.writer",),
    "account and trace": ("trio_sse.trace",),
    "socket calls, the kernel's part included": ("trio_sse.transport", "socket"),
    "HTTP": ("trio_sse.http11", "h11"),
    "trio": ("trio.", "outcome"),
    "the rest, once per request": ("",),
}


def write_profile(folder: Path, versions: dict[str, str], machine: dict[str, Any], times: Times, memory: Memory) -> str:
    """Writes profile.md: the parts of each case's cost, the functions that take most of it, and whose memory a stream holds. Returns it."""
    lines = [
        "# Where the time and the memory go",
        "",
        f"{machine.get('cpu', machine.get('machine'))}, {machine['recorded']}; python {versions['python']}, trio {versions['trio']}.",
    ]
    if times:
        lines += _time_lines(times)
    for name, (streams, modules) in memory.items():
        lines += ["", f"## {name}", "", *_memory_lines(streams, modules)]
    text = "\n".join(lines) + "\n"
    (folder / "profile.md").write_text(text)
    return text


def _time_lines(times: Times) -> list[str]:
    lines = [
        "",
        (
            "trio_sse's processor time by the module that is running, and the functions of each case that take most of it: "
            "self time, from samples at each tick of processor time. Taking them is part of the cost; what is at a "
            "function's end may count for its caller."
        ),
        "",
        "| µs | " + " | ".join(times) + " |",
        "| --- |" + " ---: |" * len(times),
    ]
    columns = []
    for _, cost, samples in times.values():
        column = dict.fromkeys(_PARTS, 0.0)
        for function, count in samples.items():
            part = next(part for part, modules in _PARTS.items() if function.startswith(modules))
            column[part] += cost * count / max(1, sum(samples.values()))
        columns.append(column)
    lines += [f"| {part} | " + " | ".join(f"{column[part]:.2f}" for column in columns) + " |" for part in _PARTS]
    lines.append("| **all** | " + " | ".join(f"**{cost:.2f}**" for _, cost, _ in times.values()) + " |")
    for name, (figure, cost, samples) in times.items():
        total = sum(samples.values())
        lines += ["", f"## {name}", "", f"{NAMES[figure]}: {cost:.3g}; {total} samples.", ""]
        lines += ["| function | µs | share |", "| --- | ---: | ---: |"]
        lines += [f"| `{function}` | {cost * count / total:.2f} | {count / total:.0%} |" for function, count in _largest(samples)]
    return lines


def _memory_lines(streams: int, modules: dict[str, int]) -> list[str]:
    held: Counter[str] = Counter()
    for module, size in modules.items():
        held[module if module.startswith("trio_sse.") else module.partition(".")[0]] += size
    total = sum(held.values())
    return [
        (
            f"{total / 1024 / streams:.1f} KiB a stream, by the module that asked for it: a task with its frames and scopes is trio's. "
            "What Python and the kernel keep beside is not in it."
        ),
        "",
        "| module | KiB | share |",
        "| --- | ---: | ---: |",
        *(f"| `{module}` | {size / 1024 / streams:.2f} | {size / total:.0%} |" for module, size in _largest(held)),
    ]


def _largest(amounts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(amounts.items(), key=lambda pair: -pair[1])[:12]


def _plot(path: Path, cases: Sequence[Case], summary: Summary, names: Sequence[str]) -> None:
    """Each case's first figure as a ratio to uvicorn; turned over where less is better, so that to the right is always better."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "trio_sse"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 0.42 * len(cases) + 1.6))
    markers = "o^vs<>dx"
    for index, name in enumerate(names):
        points = [(row, _score(summary[case.name][name], case.figures[0])) for row, case in enumerate(cases)]
        axes.plot(
            [score for _, score in points if score],
            [row for row, score in points if score],
            markers[index % len(markers)],
            label=name,
            markersize=9 if index == 0 else 5,
            zorder=3 if index == 0 else 2,
        )
    axes.set_xscale("log")
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(cases)), [f"{case.name}: {NAMES[case.figures[0]]}" for case in cases])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.grid(alpha=0.3)
    axes.set_xlabel("times as good as uvicorn + Starlette in the same run")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.5 / figure.get_figheight() - 0.02), ncols=4)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _score(row: dict[str, float], key: str) -> float | None:
    ratio = row.get(f"{key}_ratio")
    if not ratio or math.isnan(ratio):
        return None
    return ratio if key in _MORE else 1 / ratio
