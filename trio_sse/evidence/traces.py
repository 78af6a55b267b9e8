"""A trace file: one case's exchanges, as both sides saw them. The standard library only.

JSON lines: for each exchange one *head* (what the server's record and the client say in sum) and then one line per mark, the server's
in the order in which it made them, then the client's. All times are ``time.monotonic_ns`` readings of one machine, so that marks of
both sides can be put in one order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Exchange", "Mark", "TraceError", "load"]


class TraceError(ValueError):
    """A trace file is not what it should be. The message names the line."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark: when, on which side, what, and its values by name."""

    at: int
    side: str
    kind: str
    values: dict[str, int | str | None]


@dataclass(slots=True)
class Exchange:
    """One exchange, as both sides saw it. ``record`` is the server's summary, None where it keeps no traces."""

    run: int
    number: int
    role: str
    record: dict[str, object] | None
    head: dict[str, object]
    server: list[Mark] = field(default_factory=list)
    client: list[Mark] = field(default_factory=list)

    def all(self, kind: str) -> list[Mark]:
        """The server's marks of ``kind``."""
        return [mark for mark in self.server if mark.kind == kind]

    def first(self, kind: str) -> Mark | None:
        """The server's first mark of ``kind``."""
        return next((mark for mark in self.server if mark.kind == kind), None)

    def last(self, kind: str) -> Mark | None:
        """The server's last mark of ``kind``."""
        return next((mark for mark in reversed(self.server) if mark.kind == kind), None)

    def told(self, kind: str) -> list[Mark]:
        """The client's marks of ``kind``."""
        return [mark for mark in self.client if mark.kind == kind]

    @property
    def left(self) -> int | None:
        """When the client went, stalled or asked for the cancellation: just before the system call."""
        return next((mark.at for mark in self.client if mark.kind == "leave"), None)

    def waits(self, begin: str, end: str) -> list[tuple[int, int]]:
        """Spans, from and to, in which ``end`` was waited for: each one's own ``wait_ns``, and the one that the verdict cut short.

        The latter began with a ``begin`` mark that no ``end`` followed.
        """
        spans = [(mark.at - wait, mark.at) for mark in self.all(end) if isinstance(wait := mark.values.get("wait_ns"), int) and wait]
        verdict, done = self.first("verdict"), self.last(end)
        if verdict is not None:
            begun = [mark.at for mark in self.all(begin) if mark.at < verdict.at]
            if begun and (done is None or done.at < begun[-1]):
                spans.append((begun[-1], verdict.at))
        return spans

    def in_order(self) -> list[Mark]:
        """The marks of both sides in the order of time; marks of the same nanosecond stay in the order in which they were made."""
        return sorted(self.server + self.client, key=lambda mark: mark.at)


def load(lines: Iterable[str]) -> list[Exchange]:
    """Reads a trace file. Raises :class:`TraceError`."""
    exchanges: dict[tuple[int, int], Exchange] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            key = (entry.pop("run"), entry.pop("exchange"))
            if "mark" not in entry:
                exchanges[key] = Exchange(*key, entry.pop("role"), entry.pop("record"), entry)
                continue
            side = entry.pop("side")
            marks = exchanges[key].server if side == "server" else exchanges[key].client
            marks.append(Mark(entry.pop("at"), side, entry.pop("mark"), entry))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise TraceError(f"line {number} is no mark of an exchange ({type(error).__name__}: {error})") from error
    return list(exchanges.values())
