"""Where a server's processor time goes, or its memory, by the module and the function.

Time: every so often the function that is running is counted. A signal of the kernel's comes after each millisecond of processor time, and
Python handles it at its next call or turn of a loop: time inside a call into C (the kernel's included) counts for the function that
made it, and the end of a function's time may count for its caller.

Memory: what is allocated counts for the module whose line asked for it, so that a task's frames and a scope count for trio, and what
Python keeps beside (the kernel's buffers, unused parts of its arenas) for nobody.

SIGUSR1 writes time counted since the last one, or memory held now. The file is replaced as a whole.
"""

from __future__ import annotations

import collections
import gc
import json
import signal
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType

__all__ = ["count_memory", "count_time"]

GENERATED = "<attrs generated methods "  # what attrs writes in front of a module's name, for a class whose __init__ it made
PERIOD = 0.001  # seconds of processor time; the kernel's own tick may be longer

_counts: collections.Counter[str] = collections.Counter()


def count_time(path: Path) -> None:
    """Begins to count; what is written is ``{"module:function": samples}``."""

    def counted() -> dict[str, int]:
        samples = dict(_counts)
        _counts.clear()
        return samples

    _write_when_asked(path, counted)
    signal.signal(signal.SIGPROF, _count)
    signal.setitimer(signal.ITIMER_PROF, PERIOD, PERIOD)


def count_memory(path: Path) -> None:
    """Begins to count; what is written is ``{"module": bytes}``."""

    def counted() -> dict[str, int]:
        gc.collect()
        names = {getattr(module, "__file__", None): name for name, module in sys.modules.items()}
        held: collections.Counter[str] = collections.Counter()
        for statistic in tracemalloc.take_snapshot().statistics("filename"):
            file = statistic.traceback[0].filename
            held[names.get(file) or file.removeprefix(GENERATED)] += statistic.size
        return held

    _write_when_asked(path, counted)
    tracemalloc.start()


def _write_when_asked(path: Path, counted: Callable[[], dict[str, int]]) -> None:
    def write(_number: int, _frame: FrameType | None) -> None:
        made = path.with_suffix(".new")
        made.write_text(json.dumps(counted()))
        made.rename(path)

    signal.signal(signal.SIGUSR1, write)


def _count(_number: int, frame: FrameType | None) -> None:
    if frame is not None:
        _counts[f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"] += 1
