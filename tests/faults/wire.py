"""What a client may believe of the bytes it got: strict, where a test's usual reader is forgiving.

The bytes of a connection must be a prefix of well-formed responses, whatever happened to it. Whether the last of them is complete is
left to the caller; that nothing follows a response that ends the connection is not.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import h11

from trio_sse.sse import Parser

__all__ = ["Reply", "read_replies"]

_CREATED = re.compile(r'"created":\d+')  # seconds of the real clock


@dataclass
class Reply:
    """One response, or as much of it as came. ``data``: the events of a stream, comments left out; ``error``: its in-band error."""

    status: int
    stream: bool = False
    body: bytes = b""
    complete: bool = False
    data: list[str] = field(default_factory=list)
    error: bool = False
    terminal: bool = False  # [DONE], or the event done

    @property
    def whole(self) -> bool:
        """Whether it claims to be the whole answer, and a good one."""
        return self.complete and self.status < 300 and not self.error and (self.terminal or not self.stream)


def read_replies(raw: bytes, methods: list[str], *, ended: bool) -> list[Reply]:
    """The responses in ``raw``. ``ended``: the server said end of file after it. Raises AssertionError where they are malformed."""
    replies: list[Reply] = []
    if not raw:
        return replies  # h11 takes no bytes for end of file
    connection = h11.Connection(h11.CLIENT)
    connection.receive_data(raw)
    todo = iter(methods)
    while connection.trailing_data[0] or not replies:
        connection.send(h11.Request(method=next(todo, "GET"), target="/", headers=[("Host", "t")]))
        connection.send(h11.EndOfMessage())
        reply = _read(connection, ended)
        if reply is None:
            break
        replies.append(reply)
        if connection.their_state is not h11.DONE:
            rest = connection.trailing_data[0]
            assert not reply.complete or not rest, f"bytes after the end of the connection's last response: {rest!r}"
            break
        connection.start_next_cycle()
    return replies


def _read(connection: h11.Connection, ended: bool) -> Reply | None:
    reply: Reply | None = None
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            raise AssertionError(f"malformed response: {error}") from None
        if isinstance(event, h11.InformationalResponse):
            continue
        if isinstance(event, h11.Response):
            stream = any(name == b"content-type" and b"event-stream" in value for name, value in event.headers)
            framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in event.headers)
            reply = Reply(event.status_code, stream)
        elif isinstance(event, h11.Data):
            assert reply is not None
            reply.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert reply is not None
            reply.complete = True
            break
        else:
            if reply is not None and not framed and ended:
                reply.complete = True
            break
    if reply is not None:
        _look_inside(reply)
    return reply


def _look_inside(reply: Reply) -> None:
    if not reply.stream:
        if reply.complete and reply.body:
            json.loads(reply.body)
            reply.data = [_CREATED.sub('"created":0', reply.body.decode())]
        return
    for event in Parser().feed(reply.body):
        assert not reply.error or (event.event == "done" and not reply.terminal), f"an event after the error: {event}"
        assert not reply.terminal, f"an event after the end: {event}"
        if event.event == "error" or event.data.startswith('{"error":'):
            reply.error = True
        elif event.data == "[DONE]" or event.event == "done":
            reply.terminal = True
        else:
            data = _CREATED.sub('"created":0', event.data)
            reply.data.append(f"{event.id} {event.event} {data}")
