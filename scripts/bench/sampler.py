"""Where a server's processor time goes: every so often the function that is running is counted, by the module it is in.

A signal of the kernel's comes after each millisecond of processor time, and Python handles it at its next call or turn of a loop: time
inside a call into C (the kernel's included) counts for the function that made it, and the end of a function's time may count for
its caller. SIGUSR1 writes what was counted since the last time.
"""

from __future__ import annotations

import collections
import json
import signal
from pathlib import Path
from types import FrameType

__all__ = ["start"]

PERIOD = 0.001  # seconds of processor time; the kernel's own tick may be longer

_counts: collections.Counter[str] = collections.Counter()


def start(path: Path) -> None:
    """Begins to count. ``path`` is replaced as a whole: ``{"module:function": samples}``."""

    def dump(_number: int, _frame: FrameType | None) -> None:
        made = path.with_suffix(".new")
        made.write_text(json.dumps(_counts))
        _counts.clear()
        made.rename(path)

    signal.signal(signal.SIGUSR1, dump)
    signal.signal(signal.SIGPROF, _count)
    signal.setitimer(signal.ITIMER_PROF, PERIOD, PERIOD)


def _count(_number: int, frame: FrameType | None) -> None:
    if frame is not None:
        _counts[f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"] += 1
