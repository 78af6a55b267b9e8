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

import contextlib
import ctypes
import json
import os
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
    """When the engine's ticks are due: each feeds the streams of one phase. Keeps a timer of the kernel's for them.

    An event loop's own timers are rounded to milliseconds, in one loop up and in another one down; that would be measured as lateness.
    The timer is a descriptor that becomes readable, as the results of a model's thread do.
    """

    def __init__(self, mode: str) -> None:
        interval, self.phases = INTERVALS[mode]
        self._step = round(interval / self.phases * 1e9)
        self._begin = time.monotonic_ns()
        self._number = 0
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        every, first = divmod(self._step, 10**9), divmod(self._begin + self._step, 10**9)
        spec = (ctypes.c_long * 4)(*every, *first)
        if self.fd < 0 or libc.timerfd_settime(self.fd, 1, spec, None) < 0:  # 1: the first time is an absolute one
            raise OSError(ctypes.get_errno(), "timerfd")

    def due(self) -> list[tuple[int, str]]:
        """The ticks that are due now, as phase and time in ns; of those that were missed, the ones of the last interval."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)
        before, self._number = self._number, (time.monotonic_ns() - self._begin) // self._step
        numbers = range(max(before, self._number - self.phases) + 1, self._number + 1)
        return [(number % self.phases, str(self._begin + number * self._step)) for number in numbers]

    def close(self) -> None:
        os.close(self.fd)
