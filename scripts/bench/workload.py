"""What every server of the benchmark serves: the same events, the same JSON encoder, the same engine.

A request is ``POST /generate`` with ``{"prompt": MODE, …}``. The modes:

    drain     300 events as fast as they are taken
    yield     300 events, with the event loop given a turn before each
    aligned   50 events, one every 20 ms, from one engine that feeds all streams in the same tick
    staggered the same, streams spread over 20 ticks of 1 ms
    idle      one event, and then nothing

A paced event's text is the monotonic time in ns at which it was due, so that the client can tell how late it came.
"""

from __future__ import annotations

import json
import time

DRAIN_EVENTS = 300
PACED_EVENTS = 50
INTERVAL = 0.02  # seconds between a stream's events
PHASES = 20  # of a staggered interval

_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode
DONE = b"data: [DONE]\n\n"
HEALTH = b'{"status":"ok"}'


def frame(text: str) -> bytes:
    """One event, encoded the way trio_sse does it."""
    return b'data: {"token":%s}\n\n' % _encode(text).encode()


def text(number: int) -> str:
    return f" token{number}"


class Ticks:
    """When the engine's ticks are due: every interval, or every interval/PHASES with a part of the streams each."""

    def __init__(self, staggered: bool) -> None:
        self.phases = PHASES if staggered else 1
        self.step = INTERVAL / self.phases
        self.number = 0
        self.begin = time.monotonic()

    def next_due(self) -> float:
        """Monotonic seconds of the next tick; ticks that were missed are not made up for."""
        self.number = max(self.number + 1, int((time.monotonic() - self.begin) / self.step))
        return self.begin + self.number * self.step

    @property
    def phase(self) -> int:
        return self.number % self.phases
