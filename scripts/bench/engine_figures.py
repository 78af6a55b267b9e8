"""What every contender is given and measured by. Standard library only: one contender runs under an interpreter of its own."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

__all__ = ["STREAMS", "TEXT", "decoding", "gaps", "moments", "percentile", "prompts", "resident_mb", "spread"]

TEXT = Path(__file__).resolve().parents[2] / "tests" / "texts" / "prose.txt"
STREAMS = (1, 2, 4, 8, 16)


def prompts(count: int, characters: int = 240) -> list[str]:
    """``count`` pieces of the text, repeated as need be, each beginning at a word."""
    text = TEXT.read_text(encoding="utf-8")
    starts = [text.index(" ", n * 700 % (len(text) - 300)) + 1 for n in range(count)]
    text *= 2 + characters // len(text)
    return [text[start : start + characters] for start in starts]


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lie, without interpolation; nan where there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def gaps(times: list[float], begin: float = float("-inf"), end: float = float("inf")) -> list[float]:
    """Seconds between neighbours, of those that lie within ``begin`` and ``end``."""
    return [b - a for a, b in itertools.pairwise(times) if begin <= a and b <= end]


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    return {
        f"{name}_p50_ms": 1e3 * percentile(seconds, 0.5),
        f"{name}_p99_ms": 1e3 * percentile(seconds, 0.99),
        f"{name}_max_ms": 1e3 * max(seconds, default=float("nan")),
    }


def decoding(times: list[list[float]]) -> dict[str, float]:
    """Tokens per second while all streams decode, and the gaps between one stream's tokens; from each stream's token times."""
    begin, end = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    inside = sum(sum(begin < at <= end for at in stream) for stream in times)
    between = [gap for stream in times for gap in gaps(stream, begin, end)]
    found = spread("itl", between)
    del found["itl_max_ms"]
    return {"tokens_per_s": inside / (end - begin), **found}


def resident_mb() -> float:
    """What this process holds in memory; nan where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return float("nan")


def moments(count: int, low: float, high: float) -> list[float]:
    """The same random waits, in seconds, in every run."""
    choice = random.Random(0)  # noqa: S311
    return [choice.uniform(low, high) for _ in range(count)]
