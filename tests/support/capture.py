"""What the server logs during a test, as records: independent of how logging is set up elsewhere in the process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["captured_log", "check_quiet"]

_log = logging.getLogger("trio_sse")


class _Keeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entries.append(record)


@contextmanager
def captured_log(level: int = logging.DEBUG) -> Iterator[list[logging.LogRecord]]:
    """A list that grows by whatever is logged inside the block."""
    keeper = _Keeper()
    before = _log.level, _log.propagate
    _log.addHandler(keeper)
    _log.setLevel(level)
    _log.propagate = False
    try:
        yield keeper.entries
    finally:
        _log.removeHandler(keeper)
        _log.level, _log.propagate = before


def check_quiet(entries: list[logging.LogRecord]) -> None:
    """Nothing was said that is not information: no warning, no error, no traceback."""
    loud = [entry.getMessage() for entry in entries if entry.levelno >= logging.WARNING or entry.exc_info]
    assert not loud, loud
