"""One measurement at a time on a machine: ``record``, the benchmarks and the soak share this lock."""

from __future__ import annotations

import fcntl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LOCK", "alone"]

LOCK = Path(tempfile.gettempdir()) / "trio_sse-bench.lock"


@contextmanager
def alone() -> Iterator[None]:
    """Holds the lock. Waits for it, saying so on stderr; the kernel gives it up when a process that holds it ends."""
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another measurement to end ({LOCK})", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
