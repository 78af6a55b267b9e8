"""The engine benchmark's medians as ratios, as a table and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_figures import STREAMS

__all__ = ["AIMS", "ratios", "write"]

Figures = dict[str, dict[str, Any]]

# name → (streams, the other engine, its streams, what is aimed at)
AIMS = {
    "1 stream / generate(), 1": (1, "generate", 1, 3.0),
    "1 stream / llama.cpp, 1": (1, "llama.cpp", 1, 0.9),
    "8 streams / continuous batching, 8": (8, "batching", 8, 2.0),
    "8 streams / llama.cpp, 1": (8, "llama.cpp", 1, 2.4),
    "16 streams / llama.cpp, 1": (16, "llama.cpp", 1, 3.2),
}
# Limits for our own figures, with the figure that they are for.
LIMITS = {
    "stalled_p50_ratio": 1.25, "stalled_p99_ratio": 1.25, "stalled_steps": 0, "cancel_prefill_max_ms": 150, "bytes_left": 0,
    "healthz_full_p99_ms": 20,
}  # fmt: skip
_BY_STREAMS = ("tokens_per_s", "itl_p50_ms", "itl_p99_ms", "loop_late_p99_ms")


def ratios(found: Figures) -> dict[str, float]:
    """The comparisons that are aimed at, where both sides were measured."""

    def rate(engine: str, streams: int) -> float | None:
        value = found.get(engine, {}).get(f"{streams}_tokens_per_s")
        return None if value is None else float(value)

    known = {name: (rate("trio_sse", ours), rate(peer, theirs)) for name, (ours, peer, theirs, _) in AIMS.items()}
    return {name: ours / theirs for name, (ours, theirs) in known.items() if ours and theirs}


def write(folder: Path, report: dict[str, Any]) -> str:
    """Writes the three files; returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _text(report)
    (folder / "engine.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "engine.md").write_text(text)
    _draw(report["engines"], folder / "engine.svg")
    return text


def _text(report: dict[str, Any]) -> str:
    engines: Figures = report["engines"]
    streams = [str(n) for n in STREAMS]
    idle = report["load"][0] <= 1
    parts = [
        "# The engine beside others",
        (
            f"{report['threads']} threads, medians of {_rounds(report['samples'])} interleaved rounds, "
            f"{report['tokens']} tokens a stream ({report['slow_tokens']} for transformers). "
            f"Load of the machine's {report['machine']['cores']} cores: {report['load'][0]} before the run, {report['load'][1]} after. "
            + ("" if idle else "The machine was not idle before the run, so nothing here is judged: other work fell on all, but unevenly.")
        ),
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "Tokens per second, decoding, all streams together, by number of streams; and resident memory in MB:",
        _grid(
            ["", *streams, "MB"],
            [
                [name, *_cells(e, "{:.0f}", "tokens_per_s"), f"{e['resident_mb']:.0f}" if "resident_mb" in e else ""]
                for name, e in engines.items()
            ],
        ),
        "Milliseconds between tokens, p50 / p99:",
        _grid(["", *streams], [[name, *_cells(e, "{:.0f} / {:.0f}", "itl_p50_ms", "itl_p99_ms")] for name, e in engines.items()]),
    ]
    if report["ratios"]:
        rows = [[name, f"{x:.2f}", f"{AIMS[name][3]}", _verdict(x >= AIMS[name][3], idle)] for name, x in report["ratios"].items()]
        parts += ["Ratios of tokens per second:", _grid(["trio_sse to", "found", "at least", ""], rows)]
    for name, found in engines.items():
        own = {key: x for key, x in found.items() if not key.endswith(_BY_STREAMS) and key != "resident_mb"}
        own |= {f"{n}_loop_late_p99_ms": found[key] for n in STREAMS if (key := f"{n}_loop_late_p99_ms") in found}
        if own:
            rows = [[key.replace("_", " "), f"{x:.4g}", *_limit(key, x, idle)] for key, x in own.items()]
            title = f"{name}: a long prompt beside others, stalled readers, cancelling, the loop:"
            parts += [title, _grid(["", "found", "at most", ""], rows)]
    if "quality" in report:
        parts += _quality(report["quality"])
    if not report["complete"]:
        parts.append("This run was ended early; what is empty above was not measured.")
    if report["missing"]:
        parts.append("Not there: " + ", ".join(report["missing"]))
    return "\n\n".join(parts) + "\n"


def _rounds(samples: Figures) -> str:
    """How many measurements stand behind a median of the decoding rates: an interrupted run has fewer for some numbers of streams."""
    counts = {len(values) for found in samples.values() for key, values in found.items() if key.endswith("_tokens_per_s")}
    return "no" if not counts else str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _cells(found: dict[str, Any], text: str, *figures: str) -> list[str]:
    """One cell for each number of streams; empty where the engine was not asked."""
    known = {n: [found.get(f"{n}_{figure}") for figure in figures] for n in STREAMS}
    return ["" if None in values else text.format(*values) for values in known.values()]


def _limit(key: str, value: float, idle: bool) -> tuple[str, str]:
    return (str(LIMITS[key]), _verdict(value <= LIMITS[key], idle)) if key in LIMITS else ("", "")


def _verdict(reached: bool, idle: bool) -> str:
    if not idle:
        return "not judged"
    return "reached" if reached else "missed"


def _quality(found: dict[str, Any]) -> list[str]:
    forms = [(name, q) for name, q in found.items() if name not in ("tokens", "float32")]
    return [
        f"Quality over {found['tokens']} tokens of a fixed text, on which float32 has perplexity {found['float32']['perplexity']:.3f}:",
        _grid(
            ["weights", "perplexity, ratio", "same likeliest token"],
            [[name, f"{q['ratio']:.5f}", f"{q['top1_agreement']:.2%}"] for name, q in forms],
        ),
    ]


def _grid(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def _draw(engines: Figures, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "trio_sse"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, found in engines.items():
        known = [n for n in STREAMS if f"{n}_tokens_per_s" in found]
        if known:
            axes.plot(known, [found[f"{n}_tokens_per_s"] for n in known], marker="o", label=name)
    axes.set(xlabel="streams", ylabel="tokens per second", xticks=STREAMS, ylim=(0, None), title="decoding, all streams together")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
