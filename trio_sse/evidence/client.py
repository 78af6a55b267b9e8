"""The client's side of a measured exchange: a plain blocking socket that writes down what it sees, and when.

It shares no code with the server but h11, which takes the chunked coding apart; events are counted by a few lines of its own, so
that it is a second witness and not an echo of the first. Everything it notes is a time, a size, a count or an event's name.
"""

from __future__ import annotations

import http.client
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

import h11

from trio_sse.evidence.matrix import Behaviour

__all__ = ["Client", "EventCounter", "ask"]

PATIENCE = 120.0  # seconds after which a server that neither answers nor closes has failed the run

Mark = dict[str, int | str | None]


class EventCounter:
    """Counts whole events in a stream of bytes, and reads their name and id. Our frames end their lines with LF alone."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[str, int | None]]:
        """``(name, id)`` of every event that ``data`` completes. Blocks without a ``data`` line (comments) are no events."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        return [event for block in blocks if (event := self._event(block)) is not None]

    @staticmethod
    def _event(block: bytes) -> tuple[str, int | None] | None:
        name, number, data = "message", None, None
        for line in block.split(b"\n"):
            key, _, value = line.partition(b": ")
            if key == b"event":
                name = value.decode("ascii")
            elif key == b"id":
                number = int(value)
            elif key == b"data":
                data = value
        if data is None:
            return None
        return ("done" if data == b"[DONE]" else name), number


def ask(address: tuple[str, int], method: str, target: str) -> tuple[int, bytes]:
    """One small request on a connection of its own; status and body."""
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
    try:
        connection.request(method, target)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@dataclass
class Client:
    """One client. :meth:`run` does the exchange; afterwards ``marks`` and ``head`` are what it saw.

    Attributes:
      address: host and port.
      request: method and target.
      request_id: what it asks the server to call this exchange, so that its trace can be found.
      later: seconds that it leaves later than its behaviour says.
      begun: set at the first event, or at the end if there was none.
    """

    address: tuple[str, int]
    request: str
    body: str
    request_id: str
    behaviour: Behaviour
    later: float = 0.0
    marks: list[Mark] = field(default_factory=list)
    head: dict[str, object] = field(default_factory=lambda: {"status": None, "content_type": None})
    begun: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def run(self) -> None:
        """Does the whole exchange in the calling thread. What goes wrong is kept in ``error``: a thread has nobody to raise to."""
        try:
            with self._connect() as sock:
                self._converse(sock)
        except Exception as error:  # noqa: BLE001  (the recorder looks at it after the join)
            self.error = error
        finally:
            self.begun.set()

    def _mark(self, kind: str, **values: int | str | None) -> None:
        self.marks.append({"at": time.monotonic_ns(), "mark": kind, **values})

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if self.behaviour.receive_buffer:
            # Before connect, or the window has been agreed on already.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.behaviour.receive_buffer)
        sock.settimeout(PATIENCE)
        sock.connect(self.address)
        self._mark("connected")
        return sock

    def _send(self, sock: socket.socket) -> h11.Connection:
        method, _, target = self.request.partition(" ")
        body = self.body.encode()
        headers = [("Host", "{}:{}".format(*self.address)), ("X-Request-Id", self.request_id)]
        if body:
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        http = h11.Connection(h11.CLIENT)
        wire = http.send(h11.Request(method=method, target=target, headers=headers)) or b""
        wire += (http.send(h11.Data(data=body)) or b"") if body else b""
        wire += http.send(h11.EndOfMessage()) or b""
        sock.sendall(wire)
        self._mark("sent", bytes=len(wire))
        return http

    def _converse(self, sock: socket.socket) -> None:
        http = self._send(sock)
        begin = time.monotonic()
        counter = EventCounter()
        behaviour = self.behaviour
        seen = 0
        to_leave = bool(behaviour.leave)
        while True:
            by_count = behaviour.after_events and seen >= behaviour.after_events
            left = begin + behaviour.after_ms / 1000 + self.later - time.monotonic()
            if to_leave and (by_count or (behaviour.after_ms and left <= 0)):
                to_leave = False
                if not self._leave(sock):
                    return
            wait = left if to_leave and behaviour.after_ms else PATIENCE
            if not select.select([sock], [], [], max(0.0, wait))[0]:
                if not to_leave:
                    raise TimeoutError(f"{self.request_id}: nothing for {PATIENCE} s")
                continue
            events = self._read(sock, http, counter)
            if events is None:
                return
            seen += events
            if behaviour.ms_per_event:
                time.sleep(events * behaviour.ms_per_event / 1000)

    def _read(self, sock: socket.socket, http: h11.Connection, counter: EventCounter) -> int | None:
        """Reads once; how many events that completed, or None at the end of the response or the connection."""
        try:
            data = sock.recv(4096 if self.behaviour.ms_per_event else 65536)
        except ConnectionResetError:
            self._mark("reset")
            return None
        self._mark("received", bytes=len(data))
        http.receive_data(data)
        count = 0
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return count
            if isinstance(event, h11.Response):
                self._note_head(event)
            elif isinstance(event, h11.Data):
                for name, number in counter.feed(bytes(event.data)):
                    self._mark("event", name=name, id=number)
                    self.begun.set()
                    count += 1
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                self._mark("end")
                return None

    def _note_head(self, response: h11.Response) -> None:
        kinds = [value.decode("latin-1") for name, value in response.headers if name == b"content-type"]
        self.head = {"status": response.status_code, "content_type": kinds[0] if kinds else None}
        self._mark("head", status=response.status_code)

    def _leave(self, sock: socket.socket) -> bool:
        """Leaves as its behaviour says, noting the time before the system call and after it. True if it still reads on."""
        how = self.behaviour.leave
        self._mark("leave", how=how)
        if how == "delete":
            status, _ = ask(self.address, "DELETE", f"/requests/{self.request_id}")
            self._mark("left", status=status)
            return True
        if how == "half_close":
            sock.shutdown(socket.SHUT_WR)
        elif how == "stall":
            self._stall(sock)
        else:
            if how == "rst":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        self._mark("left", status=None)
        return how == "half_close"

    def _stall(self, sock: socket.socket) -> None:
        """Reads no more, and waits for the server to let go. POLLHUP and POLLERR are told without being asked for."""
        poll = select.poll()
        poll.register(sock, 0)
        if not poll.poll(PATIENCE * 1000):
            raise TimeoutError(f"{self.request_id}: never let go of a client that does not read")
