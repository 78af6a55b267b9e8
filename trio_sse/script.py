"""The script of a scripted stream: what ``/events?…`` and ``--script`` may say, in one place.

A script is a handful of numbers. The same names serve the query string of ``/events`` and the command line's
``interval_ms=20,events=1000``, and the same checks apply to both. Parsing is strict: an unknown name, a number out of range or a
name given twice is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ["Script", "ScriptError", "parse_script"]


class ScriptError(ValueError):
    """``field`` is the name that is to blame."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Script(msgspec.Struct, frozen=True):
    """A deterministic stream.

    Fields:
      events: events in all, tokens and tools together.
      interval_ms: time between two events.
      size: characters in each event's text.
      tool_every: every n-th event is a tool event; 0 is never.
      fail_at: raise an upstream error after this many events.
      cancellation: ``cancellable`` or ``must_drain``.
      prefill_ms: time before the first event, after the work was accepted.
    """

    events: int = 300
    interval_ms: int = 0
    size: int = 8
    tool_every: int = 0
    fail_at: int | None = None
    cancellation: str = "cancellable"
    prefill_ms: int = 0

    @property
    def must_drain(self) -> bool:
        return self.cancellation == "must_drain"

    @property
    def duration(self) -> float:
        """Seconds from acceptance to the last event when nobody slows it down."""
        return (self.prefill_ms + self.events * self.interval_ms) / 1000


# name → (smallest, largest); the unit is in the name
_INTEGERS = {"events": (1, 100_000), "size": (0, 65_536), "tool_every": (0, 100_000), "fail_at": (0, 100_000)}
_MILLISECONDS = {"interval_ms": (0, 60_000), "prefill_ms": (0, 60_000)}
_CHOICES = {"cancellation": ("cancellable", "must_drain")}


def parse_script(pairs: Iterable[tuple[str, str]]) -> Script:
    """Builds a :class:`Script` from ``(name, value)`` pairs; raises :class:`ScriptError`."""
    values: dict[str, object] = {}
    for name, text in pairs:
        if name in values:
            raise ScriptError(name, f"{name} is given twice.")
        values[name] = _value(name, text)
    return msgspec.convert(values, Script)


def _value(name: str, text: str) -> object:
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            raise ScriptError(name, f"{name} must be one of: {', '.join(_CHOICES[name])}.")
        return text
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        return _number(name, text, low, high)
    if name in _MILLISECONDS:
        low, high = _MILLISECONDS[name]
        return _number(name, text, low, high)
    known = ", ".join(sorted(_INTEGERS | _MILLISECONDS | _CHOICES))
    raise ScriptError(name, f"{_shown(name)} is not a parameter; known are: {known}.")


def _number(name: str, text: str, low: int, high: int) -> int:
    # int() alone would take " 5 ", "1_000" and Arabic digits.
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or not low <= int(text) <= high:
        raise ScriptError(name, f"{name} must be a whole number from {low} to {high}.")
    return int(text)


def _shown(name: str) -> str:
    return name if name.isascii() and name.isprintable() and len(name) <= 40 else "That"
