"""Server-Sent Events: the encoder, and the incremental parser that mirrors it.

The format is the WHATWG's: lines end in LF, CR or CRLF; a line is ``field: value``, one space after the colon being decoration; an
empty line dispatches what has gathered; a line that begins with a colon is a comment; an event that the end of the stream cuts off is
not dispatched.

Rules:

1. :func:`frame` never lets data shape the frame: each line of the data gets its own ``data:`` field, whatever kind of line end it was.
2. JSON that goes into a frame is ASCII-escaped (:func:`json_text`), so that neither CR, LF nor the line ends that only some parsers
   know (U+2028, U+0085 …) can occur in it.
3. :class:`Parser` takes bytes cut at any place, and gives the same events for every cutting.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["MEDIA_TYPE", "Parser", "ServerSentEvent", "frame", "json_string", "json_text"]

MEDIA_TYPE = b"text/event-stream; charset=utf-8"

_LINE_END = re.compile(r"\r\n|\r|\n")
json_string = json.encoder.encode_basestring_ascii  # a string alone: a third of the price of json_text
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode


def json_text(value: object) -> str:
    """``value`` as compact, ASCII-only JSON."""
    return _encode(value)


def frame(data: str, *, event: str | None = None, id: str | None = None) -> bytes:
    """One event as bytes.

    Raises:
      ValueError: ``event`` or ``id`` has a character that would end its line, or ``id`` a NUL, which voids it.
    """
    head = ""
    for name, value in (("event", event), ("id", id)):
        if value is not None:
            if any(mark in value for mark in "\r\n\0"):
                raise ValueError(f"{name} must be one line without NUL")
            head += f"{name}: {value}\n"
    body = "".join(f"data: {line}\n" for line in _LINE_END.split(data))
    return f"{head}{body}\n".encode()


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One dispatched event. ``id`` is the last one seen in the stream, as EventSource has it; ``event`` is never empty."""

    data: str
    event: str = "message"
    id: str = ""


class Parser:
    """Turns the bytes of a stream into events. ``comments`` counts the comment lines seen.

    Args:
      limit: most bytes that one line may have, and one event's data; more raises :exc:`ValueError`.
    """

    def __init__(self, *, limit: int = 1 << 20) -> None:
        self.comments = 0
        self.retry: int | None = None
        self._limit = limit
        self._line = bytearray()
        self._skip_lf = False
        self._first = True
        self._data: list[str] = []
        self._size = 0
        self._event = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Takes the next bytes, and returns the events that they complete."""
        events: list[ServerSentEvent] = []
        if self._skip_lf and chunk:
            # The CR that ended the last line may have been the first half of a CRLF.
            self._skip_lf = False
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
        start = 0
        for match in re.finditer(rb"\r\n|\r|\n", chunk):
            self._line += chunk[start : match.start()]
            start = match.end()
            self._end_line(events)
        if chunk[-1:] == b"\r":
            self._skip_lf = True
        self._line += chunk[start:]
        if len(self._line) > self._limit:
            raise ValueError("a line of the event stream is too long")
        return events

    def _end_line(self, events: list[ServerSentEvent]) -> None:
        line = self._line.decode("utf-8", "replace")
        self._line.clear()
        if self._first:
            self._first = False
            line = line.removeprefix("\ufeff")
        if not line:
            self._dispatch(events)
        elif line[0] == ":":
            self.comments += 1
        else:
            name, _, value = line.partition(":")
            self._field(name, value.removeprefix(" "))

    def _field(self, name: str, value: str) -> None:
        if name == "data":
            self._size += len(value) + 1
            if self._size > self._limit:
                raise ValueError("an event of the stream is too long")
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry = int(value)

    def _dispatch(self, events: list[ServerSentEvent]) -> None:
        if self._data:
            events.append(ServerSentEvent("\n".join(self._data), self._event or "message", self._id))
        self._data.clear()
        self._size = 0
        self._event = ""
