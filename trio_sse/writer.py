"""The response of one exchange: events in, bytes out. The only part that writes; every write has a deadline.

    channel ──▶ Answer (frames) ──▶ one chunk ──▶ write without waiting ──▶ kernel
                                                   └── it refuses ──▶ flush: wait, under the write timeout

One event and whatever else is already waiting become one write, a *turn*; nothing waits for what may come (but see pump.py, rule 4).
Turns do not wait, so that the server's pump can make those of all streams (pump.py). While there is nothing to write, the writer's task
*dozes*: it waits for what a turn can't do, inside a cancel scope whose deadline is when the peer must hear something, a heartbeat or a
probe.

Rules:

1. A write that has begun is never cut off by a heartbeat that falls due: waiting for the kernel happens outside the doze.
2. The dozing scope is made once per heartbeat, not once per event: a scope and its deadline cost as much as sending a small event.
   A turn may be made only while the task dozes, or by the task itself: a verdict ends the doze at once, and so the turns.
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
ASK_BYTES, ASK_NS = 16384, 100_000_000  # a trace says what the kernel holds after so many bytes, or so long, and after every wait


class ResponseWriter:
    """Writes one response. All its coroutines raise ConnectionLost and PeerStalled, and whatever the encoder raises.

    Args:
      headers: for any response: the request id, CORS.

    Attributes:
      finish: the backend's last word, once it has come.
      head_sent: whether a stream's head is on its way, so that a status can't be chosen any more.
    """

    __slots__ = (
        "_answer", "_ask_at", "_carried", "_channel", "_config", "_connection", "_doze", "_half_closed", "_headers", "_last_write", "_over",
        "_probe_now", "_record", "_stream", "_trouble", "_unaccounted", "_unasked", "finish", "head_sent",
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
        self._carried = b""  # the frame that did not fit into the last write; its event is the channel's first
        self._over = False  # the channel has ended
        self._trouble: Exception | None = None  # what a turn of the pump's has met
        self._half_closed = False
        self._probe_now = False
        self._last_write = trio.current_time()
        self._unasked = self._ask_at = 0  # bytes sent since the kernel was asked; when to ask again, in ns
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
        """Makes turns, or waits while the pump makes them. Returns when the kernel refuses, or at the end."""
        channel, transport = self._channel, self._connection.transport
        while True:
            await channel.wait(self._turn_by_pump)
            if self._trouble is not None:
                raise self._trouble
            if transport.backlog:
                return  # a turn of the pump's has met a kernel that refuses
            if len(channel):
                if self._turn(trio.current_time()):
                    return
            elif channel.closed:
                self._over = True
                return

    def _turn_by_pump(self, now: float) -> int:
        """A turn in this task's stead, while it waits. It is woken only for what is out of the ordinary. Returns the events found."""
        channel = self._channel
        waiting = len(channel)
        if channel.reader is None or not waiting:
            return 0  # the task has been cancelled, or has gone on by itself, since this turn was called for
        try:
            if not self._turn(now) and not len(channel):
                return waiting
        except Exception as error:  # noqa: BLE001  (the writer's task will raise it)
            self._trouble = error
        channel.wake()
        return waiting

    def _turn(self, now: float) -> bool:
        """THE HOT PATH: one event and all that waits behind it become one write. Says whether the kernel has refused a part of it."""
        record, transport = self._record, self._connection.transport
        data, events, tokens = self._batch(self._channel.take())
        if not data:
            return False
        size, begin = len(data), record.now()
        if transport.write(data):
            self._unaccounted = (size, events, tokens, begin)
            record.mark("frames", events, size, at=begin)
            return True
        self._last_write = now
        self._unasked += size
        kernel: tuple[int | None, int | None] = (None, None)
        if record.tracing and (self._unasked >= ASK_BYTES or begin >= self._ask_at):
            kernel = transport.unsent()
            self._unasked, self._ask_at = 0, begin + ASK_NS
        record.wrote_at_once(size, events, tokens, begin, kernel)
        return False

    def _batch(self, events: list[Event]) -> tuple[bytes, int, int]:
        """Frames ``events``, up to one write's size, as one chunk: bytes, events, tokens. What is left over goes back into the channel."""
        head = b""
        parts: list[bytes] = []
        size = count = tokens = 0
        try:
            for event in events:
                frame = self._carried or self._frame(event)
                self._carried = b""
                if size and size + len(frame) > WRITE_LIMIT:
                    self._carried = frame
                    break
                parts.append(frame)
                size += len(frame)
                if type(event) is Token:
                    count += 1
                    tokens += event.count
                elif type(event) is ToolCall:
                    count += 1
                elif type(event) is Started:
                    head = self._stream_head()
        except Exception:
            if not parts:
                raise
            # What was encoded before it still goes out; then this comes up again.
        if len(parts) < len(events):
            self._channel.put_back(events[len(parts) :])
        if not self._stream:
            return b"", 0, 0
        return head + self._connection.data(b"".join(parts)), count, tokens

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
            self._unaccounted = (len(data), 0, 0, self._record.now())
            self._connection.transport.write(data)
            await self._flush()

    async def _flush(self) -> None:
        if self._connection.transport.backlog:
            await self._connection.transport.flush(self._config.write_timeout)
        size, events, tokens, begin = self._unaccounted
        self._last_write = trio.current_time()
        wait = self._record.wrote(size, events, tokens, begin)
        if self._record.tracing:
            self._record.mark("write", size, wait, *self._connection.transport.unsent())

    async def _respond(self, status: int, headers: Headers, body: bytes) -> None:
        self._record.status = status
        self._record.mark("head", status)
        await self._connection.respond(status, [*self._headers, *headers], body)
        self._record.bytes_sent += len(body)
