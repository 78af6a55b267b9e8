"""The response of one exchange: events in, bytes out. The only part that writes; every write has a deadline.

    channel ──▶ Answer (frames) ──▶ one chunk ──▶ write without waiting ──▶ kernel
                                                   └── it refuses ──▶ flush: wait, under the write timeout

One event and whatever else is already waiting become one write; nothing is held back to fill one. While there is nothing to write, the
writer *dozes*: it waits for an event inside a cancel scope whose deadline is when the peer must hear something, a heartbeat or a probe.

Rules:

1. A write that has begun is never cut off by a heartbeat that falls due: waiting for the kernel happens outside the doze.
2. The dozing scope is made once per heartbeat, not once per event: a scope and its deadline cost as much as sending a small event.
3. What the account calls sent, the kernel has taken.
4. ``Finish`` is kept, not framed: the exchange has the last frames sent once the work has ended and the slot is free.
"""

from __future__ import annotations

import math

import trio

from trio_sse.channel import EventChannel
from trio_sse.config import Config
from trio_sse.dialects.base import Parsed
from trio_sse.errors import HttpError
from trio_sse.events import Event, Finish, Started, Token, ToolCall
from trio_sse.http11 import Headers, Http11Connection
from trio_sse.sse import MEDIA_TYPE
from trio_sse.trace import Record

__all__ = ["JSON_HEADERS", "STREAM_HEADERS", "ResponseWriter"]

STREAM_HEADERS: Headers = [
    (b"Content-Type", MEDIA_TYPE),
    (b"Cache-Control", b"no-cache, no-transform"),
    (b"X-Accel-Buffering", b"no"),
]
JSON_HEADERS: Headers = [(b"Content-Type", b"application/json")]

WRITE_LIMIT = 64_000  # bytes of frames in one write, unless a single one is longer: with head and chunk framing under 64 KiB
PROBE_INTERVAL = 1.0  # seconds between probes once the peer has sent end of file


class ResponseWriter:
    """Writes one response. All its coroutines raise ConnectionLost and PeerStalled, and whatever the encoder raises.

    Args:
      headers: for any response: the request id, CORS.

    Attributes:
      finish: the backend's last word, once it has come.
      head_sent: whether a stream's head is on its way, so that a status can't be chosen any more.
    """

    __slots__ = (
        "_answer", "_carried", "_carry", "_channel", "_config", "_connection", "_doze", "_half_closed", "_headers", "_last_write", "_over",
        "_probe_now", "_record", "_stream", "_unaccounted", "finish", "head_sent",
    )  # fmt: skip

    def __init__(
        self, connection: Http11Connection, parsed: Parsed, channel: EventChannel, record: Record, config: Config, headers: Headers
    ) -> None:
        self.finish: Finish | None = None
        self.head_sent = False
        self._connection = connection
        self._stream = parsed.stream
        self._answer = parsed.answer
        self._channel = channel
        self._record = record
        self._config = config
        self._headers = headers
        self._doze = trio.CancelScope()  # the wait for an event
        self._carry: Event | None = None  # did not fit into the last write, or could not be encoded
        self._carried = b""  # its frame, if it could be
        self._over = False  # the channel has ended
        self._half_closed = False
        self._probe_now = False
        self._last_write = trio.current_time()
        self._unaccounted = (0, 0, 0, 0)  # what the write under way carries: bytes, events, tokens; its begin in ns

    # ---- Events ----

    async def events(self) -> None:
        """Sends events until the channel has ended."""
        while True:
            with trio.CancelScope(deadline=self._comment_due()) as self._doze:
                await self._send_events()
            if self._connection.transport.backlog:
                await self._flush()
            if self._over:
                return
            if trio.current_time() >= self._comment_due():
                await self._send(self._comment())

    def peer_ended(self) -> None:
        """The peer has sent end of file: probe it now, and every second from now on."""
        self._half_closed = self._probe_now = True
        self._doze.cancel(reason="end of file: probe")

    async def _send_events(self) -> None:
        """The hot path: one event and all that waits behind it become one write. Returns when the kernel refuses, or at the end."""
        channel, transport = self._channel, self._connection.transport
        while True:
            event = self._carry
            if event is None:
                try:
                    event = await channel.receive()
                except trio.EndOfChannel:
                    self._over = True
                    return
            data = self._batch(event)
            if data:
                transport.write(data)
                if transport.backlog:
                    return
                self._sent()

    def _batch(self, event: Event | None) -> bytes:
        """The frames of ``event`` and of all that is queued behind it, up to one write's size, in one chunk."""
        take = self._channel.take
        head = b""
        parts: list[bytes] = []
        size = events = tokens = 0
        self._carry = None
        while event is not None:
            kind = type(event)
            if kind is Started:
                head = self._stream_head()
            try:
                frame = self._carried or self._frame(event)
            except Exception:
                if not parts:
                    raise
                self._carry = event  # what was encoded before it still goes out; then this comes up again
                break
            self._carried = b""
            if size and size + len(frame) > WRITE_LIMIT:
                self._carry, self._carried = event, frame
                break
            parts.append(frame)
            size += len(frame)
            if kind is Token:
                events += 1
                tokens += event.count  # type: ignore[union-attr]
            elif kind is ToolCall:
                events += 1
            event = take()
        data = head + self._connection.data(b"".join(parts)) if self._stream else b""
        self._unaccounted = (len(data), events, tokens, self._record.now())
        if data:
            self._record.mark("frames", events, len(data))
        return data

    def _frame(self, event: Event) -> bytes:
        if type(event) is Finish:
            self.finish = event  # rule 4
            return b""
        if not self._stream:
            self._answer.collect(event)
            return b""
        frame = self._answer.frames(event)
        if len(frame) > self._config.max_event:
            raise ValueError(f"a frame of {len(frame)} bytes is longer than --max-event")
        return frame

    def _stream_head(self) -> bytes:
        if not self._stream:
            return b""
        self.head_sent = True
        # The doze began when there was nothing yet to keep alive.
        self._doze.deadline = min(self._doze.deadline, self._comment_due())
        self._record.status = 200
        self._record.mark("head", 200)
        return self._connection.head(200, [*self._headers, *STREAM_HEADERS])

    # ---- The end ----

    async def last_frames(self, finish: Finish) -> None:
        """The end of an answer that is whole."""
        if self._stream:
            await self._send(self._connection.data(self._answer.frames(finish)) + self._connection.end())
        else:
            self._answer.collect(finish)
            await self._respond(200, JSON_HEADERS, self._answer.document())
            self._record.events_sent = self._record.events_produced
            self._record.tokens_sent = self._record.tokens_generated
        self._record.terminal_events += 1

    @property
    def can_go_on(self) -> bool:
        """Whether the peer can still be told something: see :meth:`Http11Connection.can_go_on`."""
        return self._connection.can_go_on(self.head_sent)

    async def last_words(self, error: HttpError) -> None:
        """The end of an answer that failed: a status if the head is not out yet, else an error in band, and the connection ends."""
        self._record.code = error.code
        if self.head_sent:
            self._record.terminal_events += 1
            self._connection.end_after_this()
            await self._connection.send(self._connection.data(self._answer.error(error)) + self._connection.end())
        else:
            await self._respond(error.status, [*error.headers, *JSON_HEADERS], error.body())

    # ---- Comments and probes ----

    def _comment_due(self) -> float:
        """When the peer must hear something if nothing else is sent. A half-closed peer is probed: any byte is a probe."""
        if self._probe_now:
            return -math.inf
        due = math.inf
        if self.head_sent and self._config.heartbeat:
            due = self._last_write + self._config.heartbeat
        if self._half_closed:
            due = min(due, self._last_write + PROBE_INTERVAL)
        return due

    def _comment(self) -> bytes:
        data = self._connection.data(self._answer.heartbeat) if self.head_sent else self._connection.probe()
        self._unaccounted = (len(data), 0, 0, self._record.now())
        self._last_write = trio.current_time()  # also when the probes are used up
        if self._half_closed:
            self._record.mark("probe", len(data))
        else:
            self._record.mark("heartbeat")
        self._probe_now = False
        return data

    # ---- Sending ----

    async def _send(self, data: bytes) -> None:
        if data:
            self._connection.transport.write(data)
            await self._flush()

    async def _flush(self) -> None:
        if self._connection.transport.backlog:
            await self._connection.transport.flush(self._config.write_timeout)
        self._sent()

    def _sent(self) -> None:
        """The kernel has taken it all: the account of the write."""
        size, events, tokens, begin = self._unaccounted
        self._unaccounted = (0, 0, 0, begin)
        self._last_write = trio.current_time()
        record = self._record
        record.bytes_sent += size
        record.events_sent += events
        record.tokens_sent += tokens
        wait = record.now() - begin
        record.write_stall_ns += wait
        if size > record.largest_write:
            record.largest_write = size
        if record.tracing:
            record.mark("write", size, wait, *self._connection.transport.unsent())

    async def _respond(self, status: int, headers: Headers, body: bytes) -> None:
        self._record.status = status
        self._record.mark("head", status)
        await self._connection.respond(status, [*self._headers, *headers], body)
        self._record.bytes_sent += len(body)
