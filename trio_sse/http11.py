"""One HTTP/1.1 connection: h11 over a transport, with the deadlines and the strictness that h11 leaves to its user.

The states, and what may happen in them::

    HANDSHAKE, over TLS
     │
     ▼       first byte         head complete        body taken
    IDLE ───────────────▶ HEAD ──────────────▶ BODY ───────────▶ RESPONDING
     │ ▲                    │                    │                 │  │
     │ └────────────────────┼────────────────────┼── reuse ────────┘  │
     │ end of file, idle    │ malformed, 408     │ refused early      │ told to close, or must
     ▼ too long             ▼                    ▼                    ▼
    CLOSED ◀──────────── LINGERING ◀─────────────┴────────────────────┘

``RESPONDING`` begins once the request is complete, or once it is refused: from then on bytes that arrive are read ahead. A connection
is reused only if the request was read to its end, the response was sent to its end, and neither side has asked for the end.

Rules:

1. Deadlines are absolute, on trio's clock: a byte now and then does not move them. ``header_timeout`` runs from the connection's
   begin, later from a request's first byte; ``keep_alive`` bounds the idle time; ``body_timeout`` runs from the head's end.
2. What h11 accepts and a careful server does not is refused here, in :func:`_check_head`, with 400 and the end of the connection.
   What is pipelined behind such a request never runs.
3. Producing bytes is synchronous (``head``, ``data``, ``end``: h11 owns framing and state); sending them is :meth:`send`.
4. A refusal while the client is still sending must reach it: we say end of file, and read on for a bounded while (LINGERING). A plain
   close would make the kernel answer the unread bytes with a reset, which can destroy the refusal on its way.
5. Before the head, the bytes with which any head begins may be sent one at a time as probes (see interface.md, "When the client
   goes"); the head then leaves without them.
"""

from __future__ import annotations

import math
import re
import ssl
import time
from email.utils import formatdate
from enum import Enum
from functools import lru_cache
from http import HTTPStatus

import h11
import trio

from trio_sse.config import Config
from trio_sse.errors import BadRequest, BodyTooLarge, ConnectionLost, HeadTooLarge, HttpError, NotImplementedHere, RequestTimeout
from trio_sse.transport import TlsTransport, Transport

__all__ = ["Headers", "Http11Connection", "Request", "State"]

Headers = list[tuple[bytes, bytes]]

LINGER_BYTES = 16 * 1024 * 1024
LINGER_SECONDS = 30.0
READ_AHEAD = 65536  # bytes kept of what a client pipelines during a response; past it they are dropped and the connection ends
_RECEIVE = 65536
_ANY_HEAD = b"HTTP/1.1 "
_END = h11.EndOfMessage()  # immutable, so one serves all

_CONTROLS = bytes({*range(0x20), 0x7F} - set(b"\t\r\n"))
_HEAD_END = re.compile(rb"\n\r?\n")
_AUTHORITY = re.compile(rb"\Ahttps?://[^/?]*(?=[/?]|\Z)", re.IGNORECASE)
# RFC 3986: a registered name or IPv4 address, or a bracketed IPv6 or future literal; then perhaps a port.
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.\-_~!$&'()*+,;=%]+\]|(?:[0-9A-Za-z\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?")
_REASONS = {status.value: status.phrase.encode("ascii") for status in HTTPStatus} | {499: b"Client Closed Request"}


class State(Enum):
    HANDSHAKE = "handshake"
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    RESPONDING = "responding"
    LINGERING = "lingering"
    CLOSED = "closed"


class Request:
    """A request's head. Names of ``headers`` are lower case; ``path`` is the target before ``?``, ``query`` what is behind it."""

    __slots__ = ("headers", "method", "path", "query", "version")

    def __init__(self, head: h11.Request) -> None:
        self.method = head.method.decode("ascii")
        # As to a proxy, ``GET http://host/path``: RFC 9112 has every server take it. Whom it names plays no part, as with Host.
        target = head.target if head.target[:1] == b"/" else _AUTHORITY.sub(b"", head.target) or b"/"
        path, _, query = target.partition(b"?")
        self.path = path.decode("ascii")
        self.query = query.decode("ascii")
        self.version = head.http_version
        self.headers: Headers = [(name.lower(), value) for name, value in head.headers.raw_items()]  # a list of h11's own takes 3 µs

    def get_all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    def get(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Http11Connection:
    """The server's side of one connection.

    Args:
      transport: the peer. Owned: :meth:`close` and :meth:`abort` close it.
      config: the limits and deadlines.

    Attributes:
      idle: nobody would miss the connection if it ended now. idle_since: from when, on trio's clock.
    """

    __slots__ = (
        "_ahead", "_bodyless", "_chunked", "_config", "_eof", "_first", "_h11", "_head_only", "_latest", "_length", "_must_close",
        "_patience", "_probed", "_request", "_version", "idle", "idle_since", "state", "transport",
    )  # fmt: skip

    def __init__(self, transport: Transport, config: Config) -> None:
        self.transport = transport
        self.state = State.IDLE
        self.idle = True
        self.idle_since = trio.current_time()
        self._config = config
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=config.max_header)
        self._request: Request | None = None
        self._first = True
        self._must_close = False
        self._eof = False
        self._probed = 0  # bytes of _ANY_HEAD that are already on their way
        self._head_only = False
        self._version = b"1.1"
        self._chunked = False
        self._ahead = 0  # bytes that have come before their time
        self._length = 0  # the body's declared length
        self._bodyless = True
        self._patience: trio.CancelScope | None = None  # the wait for the peer's next bytes
        self._latest = math.inf  # no such wait lasts longer

    # Reading a request

    async def next_request(self) -> Request | None:
        """The next request's head; None when there will be none (the peer has left, or stayed idle).

        Raises:
          HttpError: the head is malformed, too large or too slow. Answer it with :meth:`refuse`.
          ConnectionLost: the peer is gone.

        Cancellation: the request's bytes are lost. To end an idle connection and no other, call :meth:`hang_up`.
        """
        deadline = trio.current_time() + (self._config.header_timeout if self._first else self._config.keep_alive)
        if not self._first:
            # Small answers have no checkpoint: a client must let the others have their turn. Where there are others, its next request
            # is here by then as a rule, and a wait with its deadline is spared (16 connections: 103 → 79 µs a short answer).
            await trio.lowlevel.checkpoint()
        if not self._ahead:
            data = None if self._first else self.transport.receive_nowait(_RECEIVE)
            if data is None and self.idle:
                with self._waiting(deadline):
                    data = await self.transport.receive(_RECEIVE)
            if data is None:  # idle for too long, or hung up
                return None
            self._received(data)
            if not data:  # the peer has left
                return None
        self.state = State.HEAD
        self.idle = False
        if self._take_head():  # most heads come in one piece, and a deadline costs as much as parsing a header
            return self._taken()
        if not self._first:
            deadline = trio.current_time() + self._config.header_timeout
        with self._waiting(deadline):
            while True:
                await self._receive()
                if self._take_head():
                    return self._taken()
        raise RequestTimeout("The request's head did not arrive in time.")

    def _taken(self) -> Request | None:
        request, self._request = self._request, None  # a stream may last for hours, its head need not
        return request

    def _waiting(self, deadline: float) -> trio.CancelScope:
        self._patience = trio.CancelScope(deadline=min(deadline, self._latest))
        return self._patience

    def hang_up(self) -> None:
        """Ends the connection if it is waiting for a request's first byte. A request that has come is served."""
        if self.idle and self._patience is not None:
            self._patience.cancel(reason="hung up")
        self.idle = False

    def hurry(self, seconds: float) -> None:
        """From now on no wait for a handshake, a head or the end of a refused body lasts longer than this."""
        self._latest = trio.current_time() + seconds
        if self._patience is not None:
            self._patience.deadline = min(self._patience.deadline, self._latest)

    async def secure(self, context: ssl.SSLContext) -> None:
        """The TLS handshake. Raises ConnectionLost, also where it takes too long."""
        tls = TlsTransport(self.transport, context)
        self.state = State.HANDSHAKE
        with self._waiting(trio.current_time() + self._config.header_timeout) as patience:
            await tls.handshake()
        if patience.cancelled_caught:
            raise ConnectionLost("tls_handshake")
        self.transport = tls
        self.state = State.IDLE

    @property
    def pipelined(self) -> bool:
        """Whether bytes of another request are here already."""
        return bool(self._h11.trailing_data[0])

    def _take_head(self) -> bool:
        """Whether what is here is enough to know ``_request``: a request, or None for the connection's end."""
        head = _head_of(self._h11.trailing_data[0], self._config.max_header)
        try:
            event = self._h11.next_event()
        except h11.RemoteProtocolError as error:
            raise _refusal(error) from None
        if isinstance(event, h11.Request):
            self._first = False
            self._version = event.http_version
            self._head_only = event.method == b"HEAD"  # before the checks: their refusal is an answer to HEAD too
            self._request = request = Request(event)
            _check_head(request, head)
            self._length = int(request.get(b"content-length") or 0)
            self._bodyless = self._length == 0 and request.get(b"transfer-encoding") is None
            self.state = State.BODY
            return True
        self._request = None
        return isinstance(event, h11.ConnectionClosed)

    async def _receive(self) -> None:
        self._received(await self.transport.receive(_RECEIVE))

    def _received(self, data: bytes) -> None:
        self._eof = not data
        self._h11.receive_data(data)

    @property
    def waits_for_continue(self) -> bool:
        """Whether the client holds its body back until it is asked for."""
        return self._h11.they_are_waiting_for_100_continue

    async def read_body(self, limit: int) -> bytes:
        """The request's whole body, asked for by ``100 Continue`` if need be. Ends in RESPONDING.

        Args:
          limit: most bytes to accept, after any chunked coding.

        Raises:
          HttpError: too large (before reading it all), too slow, or malformed.
          ConnectionLost: the peer is gone, or has stopped sending in the middle.
        """
        self.check_length(limit)
        body = bytearray()
        if not self._take_body(body, limit):
            with trio.move_on_after(self._config.body_timeout) as patience:
                await self._receive_body(body, limit)
            if patience.cancelled_caught:
                raise RequestTimeout("The request's body did not arrive in time.")
        self.state = State.RESPONDING
        return bytes(body)

    async def _receive_body(self, body: bytearray, limit: int) -> None:
        if self.waits_for_continue:
            await self.send(self._h11.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))
        await self._receive()
        while not self._take_body(body, limit):
            await self._receive()

    def _take_body(self, body: bytearray, limit: int) -> bool:
        """Moves what is here of the body into ``body``; says whether that was its end."""
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                if self._eof:
                    raise ConnectionLost("eof_in_body") from None
                raise _refusal(error) from None
            if isinstance(event, h11.Data):
                body += event.data
                if len(body) > limit:
                    raise BodyTooLarge(f"The request's body is longer than {limit} bytes.")
            else:
                return isinstance(event, h11.EndOfMessage)

    def take_no_body(self) -> bool:
        """Whether the request is complete, or has no body and is complete with this call. Does not wait.

        A body that is still to be read ends the connection even where it is here already: whether the connection lives on must
        not depend on how the peer's bytes were cut.
        """
        if self._bodyless and self._h11.their_state is h11.SEND_BODY:
            self._h11.next_event()  # EndOfMessage
        return self._h11.their_state in (h11.DONE, h11.MUST_CLOSE)

    def check_length(self, limit: int) -> None:
        """Refuses a body by its declared length, before any of it is read."""
        if self._length > limit:
            raise BodyTooLarge(f"The request's body is longer than {limit} bytes.")

    async def read_ahead(self) -> None:
        """Takes in what the peer sends during the response, up to its end of file.

        Bytes are kept up to :data:`READ_AHEAD`. Past it they are thrown away and the connection is not reused, so that the end of
        file behind them is still seen.
        """
        while not self._eof:
            data = await self.transport.receive(_RECEIVE)
            self._ahead += len(data)
            self._eof = not data
            if self._ahead > READ_AHEAD:
                self._must_close = True
            elif data:
                self._h11.receive_data(data)

    # Responding: bytes first …

    def head(self, status: int, headers: Headers, *, length: int | None = None, close: bool = False) -> bytes:
        """The head's bytes (what probes have already sent of them left out).

        Args:
          headers: our own: names and values that cannot break a line.
          length: of the body; None where it is not known yet, or where there is none.
          close: the connection ends with this response.
        """
        self._must_close |= close
        # h11 frames the message and answers for its state; our own headers need not be validated over and over.
        framed = self._h11.send(_framing(status, length, self._must_close))
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        self._chunked = length is None and self._version == b"1.1" and not self._head_only and status != 204
        self.state = State.RESPONDING
        return b"%b%b%b\r\n" % (framed[self._probed : -2], _date_line(), lines)

    def data(self, body: bytes) -> bytes:
        """``body`` framed as the head announced it: one chunk, or plain."""
        if self._head_only or not body:
            return b""
        if self._chunked:
            # What h11 would make of it, at a tenth of the price. The state stays h11's: it begins and ends the body, and a chunk
            # changes nothing in between.
            return b"%x\r\n%b\r\n" % (len(body), body)
        return self._h11.send(h11.Data(data=body))

    def end(self) -> bytes:
        """The end of the response."""
        return self._h11.send(_END)

    def end_after_this(self) -> None:
        """The connection will not carry another request, though the head may have gone without saying so."""
        self._must_close = True

    def probe(self) -> bytes:
        """One more byte of what any head begins with; ``b""`` when they are used up."""
        byte = _ANY_HEAD[self._probed : self._probed + 1]
        self._probed += len(byte)
        return byte

    # … then I/O

    async def send(self, data: bytes) -> None:
        """Writes ``data`` and waits until the kernel has taken it. Raises ConnectionLost or PeerStalled."""
        if self.transport.write(data):
            await self.transport.flush(self._config.write_timeout)

    async def respond(self, status: int, headers: Headers, body: bytes, *, close: bool = False) -> None:
        """One whole response. Once the kernel has taken it there is no checkpoint: nothing can come between it and its account."""
        length = None if status == 204 else len(body)
        await self.send(self.head(status, headers, length=length, close=close) + self.data(body) + self.end())

    async def refuse(self, error: HttpError, headers: Headers) -> None:
        """Answers a request that was not read to its end, and closes so that the answer arrives."""
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body()
            await self.respond(error.status, [*headers, *error.headers, (b"Content-Type", b"application/json")], body, close=True)
        self._must_close = True
        await self.linger()

    async def linger(self) -> None:
        """Says end of file and throws away what the client still sends, for a bounded time and size."""
        self.state = State.LINGERING
        self.transport.shutdown_write()  # where it can't be said (TLS), Content-Length says it
        left = LINGER_BYTES
        with self._waiting(trio.current_time() + LINGER_SECONDS):
            while left > 0 and (data := await self.transport.receive(_RECEIVE)):
                left -= len(data)

    # The end of a response

    def can_go_on(self, head_sent: bool) -> bool:
        """Whether more can be said after a send was cut off: what was cut is known, and the response is where the caller thinks."""
        expected = h11.SEND_BODY if head_sent else h11.SEND_RESPONSE
        return self._h11.our_state is expected and not self.transport.cut

    @property
    def unread(self) -> bool:
        """Whether the client may still be sending, so that a plain close could destroy what it has not read yet."""
        if self.state is State.LINGERING:
            return False  # that has been seen to
        complete = self._h11.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
        return not self._eof and (self._ahead > 0 or self.pipelined or not complete)

    def next_cycle(self) -> bool:
        """Makes the connection ready for another request, if it may carry one."""
        if self._must_close or self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        self._probed = 0
        self._ahead = len(self._h11.trailing_data[0])  # what is here counts: else each response would let in READ_AHEAD more
        self._head_only = False
        self.state = State.IDLE
        self.idle = True
        self.idle_since = trio.current_time()
        return True

    def abort(self) -> None:
        """Lets go of the peer at once, by a reset."""
        self.state = State.CLOSED
        self.transport.abort()

    async def close(self) -> None:
        """Closes in an orderly way."""
        self.state = State.CLOSED
        await self.transport.close()


def _refusal(error: h11.RemoteProtocolError) -> HttpError:
    """h11's verdict in our words. Its text stays out of the answer."""
    if error.error_status_hint == 431:
        return HeadTooLarge("The request's head is too long.")
    if error.error_status_hint == 501:
        return NotImplementedHere("This transfer coding is not implemented; only chunked is.", param="Transfer-Encoding")
    return BadRequest("The request is not well-formed HTTP.", code="malformed_http")


def _head_of(raw: bytes, limit: int) -> bytes:
    """The head that ``raw`` begins with, as far as it has come. Raises HeadTooLarge.

    h11 looks at the length of an incomplete head only, and at that of a complete one never: which of its refusals a long and
    malformed head meets would depend on how its bytes were cut. So the length is looked at first, however much has come.
    """
    end = _HEAD_END.search(raw)
    head = raw[: end.end()] if end else raw
    if len(head) > limit and head[0] > 0x20:  # h11 refuses what begins with a control character or a space by its first byte
        raise HeadTooLarge(f"The request's head is longer than {limit} bytes.")
    return head


def _check_head(head: Request, raw: bytes) -> None:
    """What h11 0.16 lets through and we do not. ``raw`` is the head as it came."""
    if head.version not in (b"1.1", b"1.0"):
        raise BadRequest("Only HTTP/1.0 and HTTP/1.1 are spoken here.", code="malformed_http")
    # Searches for fixed bytes: an expression takes ten times as long (a browser's head has 800 bytes, and took 10 µs).
    if b"\n " in raw or b"\n\t" in raw:
        raise BadRequest("Folded header lines are not accepted.", code="malformed_http")
    if len(raw.translate(None, _CONTROLS)) < len(raw) or raw.count(b"\r") > raw.count(b"\r\n"):
        raise BadRequest("A header value contains control characters.", code="malformed_http")
    names = set()
    for name, value in head.headers:
        if name == b"host" and not _HOST.fullmatch(value):
            raise BadRequest("The Host header is malformed.", param="Host", code="malformed_http")
        names.add(name)
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            raise BadRequest("Transfer-Encoding and Content-Length must not come together.", code="malformed_http")
        if head.version == b"1.0":
            raise BadRequest("HTTP/1.0 has no Transfer-Encoding.", code="malformed_http")


@lru_cache(maxsize=512)
def _framing(status: int, length: int | None, close: bool) -> h11.Response:
    """What h11 has to know of a head: the status and how the body is framed. Responses are immutable, so one serves them all."""
    headers = [] if length is None else [(b"Content-Length", b"%d" % length)]
    if close:
        headers.append((b"Connection", b"close"))
    return h11.Response(status_code=status, headers=headers, reason=_REASONS.get(status, b""))


_date_cache = (0, b"")


def _date_line() -> bytes:
    """The Date header, made once a second."""
    global _date_cache
    now = int(time.time())
    if _date_cache[0] != now:
        _date_cache = (now, b"Date: %b\r\n" % formatdate(now, usegmt=True).encode("ascii"))
    return _date_cache[1]
