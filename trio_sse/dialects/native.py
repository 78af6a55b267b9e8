"""Our own two formats: ``/generate``, small enough to be typed by hand, and ``/events``, made to be observed.

``/generate`` answers ``data: {"token": "…"}`` per token and ``data: [DONE]``. Its clients are often a few lines of somebody's own that
split on blank lines, so its heartbeat is followed by one.

``/events`` numbers what it sends. The stream ends in ``event: done``, whose id is that of the last event; a browser's EventSource that
reconnects with that id is told to stop (204). Everything else about ``Last-Event-ID`` is ignored: a dropped stream is a cancelled one.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qsl

import msgspec

from trio_sse.dialects.base import Answer, AnswerContext, Parsed
from trio_sse.errors import BadRequest, HttpError
from trio_sse.events import Event, Finish, GenerationRequest, Token, ToolCall
from trio_sse.json_in import decode
from trio_sse.script import Script, ScriptError, parse_script
from trio_sse.sse import json_string, json_text

__all__ = ["EventsAnswer", "GenerateAnswer", "events_script", "last_event_id", "parse_events", "parse_generate"]


class _GenerateBody(msgspec.Struct):
    prompt: str
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=256)] = 24


def parse_generate(body: bytes, _context: AnswerContext) -> Parsed:
    """``{"prompt": str, "max_new_tokens": int = 24}``: plain completion, greedy, always a stream."""
    fields = decode(body, _GenerateBody)
    if not fields.prompt.strip():
        raise BadRequest("prompt must not be blank.", param="prompt")
    request = GenerationRequest(prompt=fields.prompt, max_tokens=fields.max_new_tokens)
    return Parsed(request, stream=True, answer=GenerateAnswer())


class GenerateAnswer(Answer):
    heartbeat = b": hb\n\n"

    def frames(self, event: Event) -> bytes:
        if type(event) is Token:
            return b'data: {"token":%b}\n\n' % json_string(event.text).encode() if event.text else b""
        if type(event) is ToolCall:
            return f"event: tool\ndata: {json_text(event.data)}\n\n".encode()
        return b"data: [DONE]\n\n" if type(event) is Finish else b""

    def error(self, error: HttpError) -> bytes:
        return b"event: error\ndata: %s\n\n" % error.body()


def events_script(query: str) -> Script:
    """The query of ``/events``. Raises BadRequest naming the parameter."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=50)
    except ValueError:
        raise BadRequest("The query string is not of the form name=value&…") from None
    try:
        return parse_script(pairs)
    except ScriptError as error:
        raise BadRequest(str(error), param=error.field) from None


def parse_events(script: Script) -> Parsed:
    return Parsed(GenerationRequest(script=script), stream=True, answer=EventsAnswer())


def last_event_id(script: Script) -> str:
    """The id of ``done``: that of the last event the script yields."""
    last = script.events if script.fail_at is None else min(script.events, script.fail_at)
    return str(last)


class EventsAnswer(Answer):
    """Counts what it has framed: ids from 1 without gaps."""

    def __init__(self) -> None:
        self._seq = 0

    def frames(self, event: Event) -> bytes:
        if type(event) is Token:
            self._seq += 1
            return self._frame("token", {"seq": self._seq, "text": event.text})
        if type(event) is ToolCall:
            self._seq += 1
            return self._frame("tool", {"seq": self._seq, **event.data})
        return self._done() if type(event) is Finish else b""

    def error(self, error: HttpError) -> bytes:
        return b"event: error\ndata: %s\n\n%s" % (error.body(), self._done())

    def _frame(self, event: str, data: dict[str, object]) -> bytes:
        return f"event: {event}\nid: {self._seq}\ndata: {json_text(data)}\n\n".encode()

    def _done(self) -> bytes:
        return self._frame("done", {"seq": self._seq})
