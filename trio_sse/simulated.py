"""A peer without a network: the transport's sibling for tests.

    server side: SimulatedTransport  ◀──────▶  SimulatedPeer: client side

It behaves as a TCP connection does where that matters here: the client's receive buffer is bounded, a write may be taken in part,
a client that has closed answers the next write with a reset, and a reset is seen by a blocked read at once. Everything happens in
virtual time: no thread, no descriptor, no clock of its own.

Rules:

1. What the server writes goes into ``peer.received`` while the client reads (the default), else into a buffer of ``window`` bytes.
2. ``close()`` is FIN, and RST for whatever the server writes afterwards; ``shutdown_write()`` is FIN alone; ``reset()`` is RST now.
"""

from __future__ import annotations

import trio

from trio_sse.errors import ConnectionLost, PeerStalled
from trio_sse.transport import Transport

__all__ = ["SimulatedPeer", "SimulatedTransport", "simulated_pair"]


def simulated_pair(*, window: int = 65536) -> tuple[SimulatedTransport, SimulatedPeer]:
    """A connected pair. ``window``: bytes the kernel takes for a client that does not read."""
    transport = SimulatedTransport(window)
    return transport, transport.client


class SimulatedPeer:
    """The client's hands. Everything is synchronous but the waits.

    Attributes:
      received: what the client has read.
      reading: whether it reads everything as it comes; set by :meth:`stall` and :meth:`resume`.
      ended: the server has said end of file.
      aborted: the server has reset the connection, be it after end of file.
    """

    def __init__(self, transport: SimulatedTransport, window: int) -> None:
        self._transport = transport
        self._window = window
        self._buffer = bytearray()
        self._news = trio.lowlevel.ParkingLot()
        self.received = bytearray()
        self.reading = True
        self.ended = False
        self.aborted = False
        self.closed = False  # fully: both directions
        self.broken = False  # a reset was sent
        self.max_write: int | None = None  # most bytes the kernel takes at a time

    def send(self, data: bytes) -> None:
        self._transport.arrive(data)

    def shutdown_write(self) -> None:
        """FIN: the client has nothing more to say, and goes on reading."""
        self._transport.end_of_file()

    def close(self) -> None:
        """FIN, and nobody reads any more."""
        self.closed = True
        self._transport.end_of_file()

    def reset(self) -> None:
        """RST: the server's blocked read fails at once."""
        self.closed = self.broken = True
        self._transport.wake()

    def stall(self) -> None:
        """Stops reading: the window fills."""
        self.reading = False

    def resume(self) -> None:
        """Reads what has gathered, and everything from now on."""
        self.reading = True
        self.read(len(self._buffer))

    def read(self, count: int) -> bytes:
        """Reads up to ``count`` gathered bytes, and so opens the window again."""
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        self.received += data
        self._news.unpark_all()
        self._transport.wake()
        return data

    async def wait_news(self) -> None:
        """Waits until something more has come, or the server has closed."""
        await self._news.park()

    async def wait_received(self, mark: bytes) -> None:
        """Waits until ``mark`` stands in ``received``; raises EOFError if the server closes before."""
        while mark not in self.received:
            if self.ended or self.aborted:
                raise EOFError(f"closed before {mark!r}: {bytes(self.received)!r}")
            await self.wait_news()

    async def wait_closed(self) -> None:
        """Waits until the server has closed or reset the connection."""
        while not (self.ended or self.aborted):
            await self.wait_news()

    # the transport's half

    def take(self, data: bytes) -> int:
        """The kernel takes as much of ``data`` as there is room for."""
        if self.closed:
            # Data for a closed socket: the peer's kernel answers with a reset. This first write still succeeds.
            self.broken = True
            self._transport.wake()
            return len(data)
        room = len(data) if self.reading else max(0, self._window - len(self._buffer))
        taken = data[: min(room, self.max_write or len(data))]
        (self.received if self.reading else self._buffer).extend(taken)
        self._news.unpark_all()
        return len(taken)

    def gone(self, *, aborted: bool) -> None:
        if not self.aborted and (aborted or not self.ended):
            self.aborted = aborted
            self.ended = self.ended or not aborted
            self._news.unpark_all()


class SimulatedTransport(Transport):
    """The server's end of a simulated connection."""

    def __init__(self, window: int) -> None:
        self.client = SimulatedPeer(self, window)
        self._incoming = bytearray()
        self._eof = False
        self._news = trio.lowlevel.ParkingLot()
        self._rest = b""
        self._closed = False

    # driven by the client

    def arrive(self, data: bytes) -> None:
        self._incoming += data
        self.wake()

    def end_of_file(self) -> None:
        self._eof = True
        self.wake()

    def wake(self) -> None:
        self._news.unpark_all()

    # Transport

    def write(self, data: bytes) -> int:
        if self._closed or self.client.broken:
            raise ConnectionLost("closed" if self._closed else "broken_write")
        if self._rest:
            self._rest += data
        else:
            self._rest = data[self.client.take(data) :]
        return len(self._rest)

    @property
    def backlog(self) -> int:
        return len(self._rest)

    async def flush(self, timeout: float) -> None:
        while self._rest:
            with trio.move_on_after(timeout) as scope:
                taken = 0
                while taken == 0:
                    await trio.lowlevel.checkpoint()
                    if self._closed or self.client.broken:
                        raise ConnectionLost("broken_write")
                    taken = self.client.take(self._rest)
                    if taken == 0:
                        await self._news.park()
            if scope.cancelled_caught:
                raise PeerStalled
            self._rest = self._rest[taken:]

    async def receive(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        while (data := self.receive_nowait(max_bytes)) is None:
            await self._news.park()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return data

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        if self._closed or self.client.broken:
            raise ConnectionLost("closed" if self._closed else "reset")
        if not self._incoming and not self._eof:
            return None
        data = bytes(self._incoming[:max_bytes])
        del self._incoming[: len(data)]
        return data

    async def wait_gone(self) -> None:
        await trio.lowlevel.checkpoint()
        while not self.client.broken:
            await self._news.park()

    def shutdown_write(self) -> bool:
        if self._closed:
            return False
        self.client.gone(aborted=False)
        return True

    def abort(self) -> None:
        self._close(aborted=True)

    async def close(self) -> None:
        self._close(aborted=False)
        await trio.lowlevel.checkpoint()

    def _close(self, *, aborted: bool) -> None:
        if not self._closed:
            self._closed = True
            self._rest = b""
            # As a kernel does: unread bytes turn a close into a reset.
            self.client.gone(aborted=aborted or bool(self._incoming))
            self.wake()
