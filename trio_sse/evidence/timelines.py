"""Timelines: the first run of a case as a picture, one lane for each part of the exchange. Drawn while recording.

One sees who waited for whom and when the work ended. Dots are moments, bars are spans of time, steps are sizes. Where the client
leaves, a second panel shows the time around it. The same traces give the same file, byte for byte, under the same matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trio_sse.evidence.matrix import Case
from trio_sse.evidence.traces import Exchange, Mark
from trio_sse.trace import LANES

__all__ = ["draw"]

# Marks that divide an exchange's life: a line through all lanes. kind → colour, words
_TURNS = {
    "leave": ("#b03060", "client leaves"),
    "eof": ("#c08000", "end of file seen"),
    "verdict": ("#d00000", "verdict"),
    "cache_released": ("#006080", "cache released"),
    "slot_released": ("#007030", "slot released"),
}
# (side, kind) → lane, offset from the middle of the lane, colour
_MOMENTS = {
    ("server", "request"): ("client", 0.25, "#333333"),
    ("client", "event"): ("client", -0.05, "#3060b0"),
    ("client", "end"): ("client", 0.25, "#333333"),
    ("client", "reset"): ("client", 0.25, "#d00000"),
    ("server", "eof"): ("monitor", 0.0, "#c08000"),
    ("server", "probe"): ("monitor", 0.0, "#8050a0"),
    ("server", "verdict"): ("monitor", 0.0, "#d00000"),
    ("server", "produced"): ("producer", 0.15, "#3060b0"),
    ("server", "cancel_delivered"): ("producer", 0.15, "#d00000"),
    ("server", "discarded"): ("channel", -0.3, "#a0a0a0"),
    ("server", "head"): ("writer", 0.2, "#333333"),
    ("server", "frames"): ("writer", 0.0, "#3060b0"),
    ("server", "heartbeat"): ("writer", -0.2, "#8050a0"),
    ("server", "write"): ("socket", 0.0, "#3060b0"),
    ("server", "cache_released"): ("model", 0.0, "#006080"),
}
_ROW = {lane: len(LANES) - 1 - index for index, lane in enumerate(LANES)}


def draw(path: Path, case: Case, exchanges: list[Exchange]) -> None:
    """Writes the timeline of the case's first measured exchange as SVG to ``path``."""
    exchange = next(item for item in exchanges if item.role == "subject")
    marks = exchange.in_order()
    zero = next(mark.at for mark in marks if mark.kind == "sent")
    turns = [mark for mark in marks if mark.kind in _TURNS]
    with mpl.rc_context({"svg.hashsalt": "trio_sse", "svg.fonttype": "none", "font.size": 9, "path.simplify": False}):
        windows = [(0.0, (marks[-1].at - zero) / 1e6, "the whole exchange")]
        if exchange.left is not None:
            leaving = (exchange.left - zero) / 1e6
            reach = (max(mark.at for mark in turns) - exchange.left) / 1e6
            if reach < 0.5 * windows[0][1]:
                windows.append((leaving - 0.3 * reach - 0.2, leaving + 1.3 * reach + 0.2, "around the leaving"))
        figure = Figure(figsize=(11, 4.2 * len(windows)), layout="constrained")
        for index, (begin, end, title) in enumerate(windows):
            axes = figure.add_subplot(len(windows), 1, index + 1)
            _lanes(axes, begin, end)
            _panel(axes, exchange, marks, zero)
            axes.set_title(f"{case.title} ({case.name}): {title}", loc="left")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _lanes(axes: Axes, begin: float, end: float) -> None:
    margin = 0.01 * (end - begin)
    axes.set_xlim(begin - margin, end + margin)
    axes.set_ylim(-0.6, len(LANES) - 0.4 + 0.3 * len(_TURNS))  # room above the lanes for the words of the turns
    axes.set_yticks(list(_ROW.values()), list(_ROW))
    axes.set_xlabel("ms since the request was sent")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for row in _ROW.values():
        axes.axhspan(row - 0.45, row + 0.45, color="#f3f4f6" if row % 2 else "#fafafa", zorder=0)


def _panel(axes: Axes, exchange: Exchange, marks: list[Mark], zero: int) -> None:
    def ms(at: int) -> float:
        return (at - zero) / 1e6

    for key, (lane, offset, colour) in _MOMENTS.items():
        times = [ms(mark.at) for mark in marks if (mark.side, mark.kind) == key]
        axes.plot(times, [_ROW[lane] + offset] * len(times), ".", color=colour, markersize=3.5, zorder=3)
    _spans(axes, _between(marks, "admitted", "slot_released"), "producer", -0.2, "#80b080", "slot held", zero)
    _spans(axes, _between(marks, "prefill_begin", "prefill_end"), "model", 0.0, "#d0a060", "prefill", zero)
    _spans(axes, _between(marks, "step_begin", "step_end"), "model", 0.0, "#7090c0", "", zero)
    _spans(axes, exchange.waits("produced", "enqueued"), "channel", 0.3, "#d08080", "backend waits", zero)
    _spans(axes, exchange.waits("frames", "write"), "socket", -0.3, "#d08080", "write waits", zero)
    _steps(axes, [(ms(mark.at), mark.values["queued"]) for mark in exchange.all("enqueued")], "channel", "queued")
    _steps(axes, [(ms(mark.at), mark.values["unacked"]) for mark in exchange.all("write")], "socket", "unacked B")
    begin, end = axes.get_xlim()
    level = 0
    for mark in marks:
        if mark.kind in _TURNS and begin <= ms(mark.at) <= end:
            colour, words = _TURNS[mark.kind]
            axes.axvline(ms(mark.at), color=colour, linewidth=0.9, zorder=2)
            right = ms(mark.at) > (begin + end) / 2
            axes.annotate(
                f"{words} {ms(mark.at):.2f}", (ms(mark.at), len(LANES) - 0.5 + 0.3 * (len(_TURNS) - level)), xytext=(-3 if right else 3, 0),
                textcoords="offset points", ha="right" if right else "left", va="top", fontsize=7.5, color=colour, zorder=4,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
            )  # fmt: skip
            level += 1


def _between(marks: list[Mark], first: str, last: str) -> list[tuple[int, int]]:
    """Spans from each ``first`` to the ``last`` that follows it; one that never ended runs to the last mark."""
    spans: list[tuple[int, int]] = []
    begin: int | None = None
    for mark in marks:
        if mark.kind == first:
            begin = mark.at
        elif mark.kind == last and begin is not None:
            spans.append((begin, mark.at))
            begin = None
    return spans if begin is None else [*spans, (begin, marks[-1].at)]


def _spans(axes: Axes, spans: list[tuple[int, int]], lane: str, offset: float, colour: str, words: str, zero: int) -> None:
    bars = [((begin - zero) / 1e6, (end - begin) / 1e6) for begin, end in spans]
    if bars:
        axes.broken_barh(bars, (_ROW[lane] + offset - 0.06, 0.12), facecolors=colour, zorder=2)
        if words:
            _name(axes, lane, offset, words, colour)


def _steps(axes: Axes, points: Iterable[tuple[float, object]], lane: str, words: str) -> None:
    """A size over time as steps, scaled to the lane's height, with its largest value said beside it."""
    known = [(at, value) for at, value in points if isinstance(value, int)]
    top = max((value for _, value in known), default=0)
    if top:
        heights = [_ROW[lane] - 0.15 + 0.35 * value / top for _, value in known]
        axes.step([at for at, _ in known], heights, where="post", color="#606060", linewidth=0.8, zorder=2)
        _name(axes, lane, -0.05, f"{words} ≤ {top:,}", "#606060")


def _name(axes: Axes, lane: str, offset: float, words: str, colour: str) -> None:
    axes.annotate(
        words, (1.0, _ROW[lane] + offset), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points", va="center",
        fontsize=7, color=colour,
    )  # fmt: skip
