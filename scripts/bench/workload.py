"""What every server of the benchmark serves: the same events, the same JSON encoder, the same engine.

A request is ``POST /generate`` with ``{"prompt": MODE, …}``. The modes:

    drain     300 events as fast as they are taken
    yield     300 events, with the event loop given a turn before each
    aligned   an event every 20 ms without end, from one engine that feeds all streams in the same tick
    staggered the same, streams spread over 20 ticks of 1 ms
    slow      the same, an event every 640 ms, streams spread over 640 ticks: 2,048 streams make as many events as 64 staggered ones
    idle      one event, and then nothing

A paced event's text is the monotonic time in ns at which it was due, so that the client can tell how late it came.
"""

from __future__ import annotations

import json
import time

__all__ = ["DONE", "DRAIN_EVENTS", "HEALTH", "INTERVALS", "Ticks", "frame", "json_text", "text"]

DRAIN_EVENTS = 300
INTERVALS = {"aligned": (0.02, 1), "staggered": (0.02, 20), "slow": (0.64, 640)}  # seconds between a stream's events, phases in it

json_text = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode
DONE = b"data: [DONE]\n\n"
HEALTH = b'{"status":"ok"}'


def frame(text: str) -> bytes:
    """One event, encoded the way trio_sse does it (backend.py makes sure of that)."""
    return b'data: {"token":%s}\n\n' % json_text(text).encode()


def text(number: int) -> str:
    return f" token{number}"


class Ticks:
    """When the engine's ticks are due: each feeds the streams of one phase."""

    def __init__(self, mode: str) -> None:
        interval, self.phases = INTERVALS[mode]
        self.step = interval / self.phases
        self.number = 0
        self.begin = time.monotonic()

    def next_due(self) -> float:
        """Monotonic seconds of the next tick. Ticks that were missed are made up for, up to one interval of them."""
        now = int((time.monotonic() - self.begin) / self.step)
        self.number = max(self.number + 1, now - self.phases)
        return self.begin + self.number * self.step

    @property
    def phase(self) -> int:
        return self.number % self.phases
