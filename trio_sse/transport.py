"""What a connection needs of a byte pipe to its peer, and nothing more.

trio's own streams hide three things that this server is about: how much the kernel took of a write, how much of it is still unsent,
and whether a peer that has finished sending is still there to read. So a :class:`Transport` sits directly on a non-blocking socket
of the standard library and waits with ``trio.lowlevel``; TLS is trio's ``SSLStream`` put on top of one.

Writing is two steps, so that state changes are synchronous and I/O follows:

    write(data)      gives the kernel what it takes at once; the rest becomes the backlog
    await flush()    waits until the backlog is gone, or until the kernel has taken nothing for a whole timeout

Rules:

1. One task writes, one task reads; they may be two. Close through the transport only.
2. A ``flush`` that is cancelled loses nothing on a plain socket: what was not taken is still the backlog. Over TLS an unknown part
   has gone: the transport is ``cut``, and every later write says that the connection is lost.
3. A peer that is gone is :exc:`~trio_sse.errors.ConnectionLost`, one that does not read is :exc:`~trio_sse.errors.PeerStalled`.
4. End of file is not yet a disconnect: ``receive`` returns ``b""``, and ``wait_gone`` then tells a closed peer from a half-closed one.

How a closed peer is told from a half-closed one: both have sent FIN. Once we have written a probe, a closed one answers with RST,
which an epoll that holds the socket with an **empty** mask reports as EPOLLERR|EPOLLHUP, and only then; ``recv`` and a wait for
writability would both return at once, for ever. Where there is no epoll, the next probe's failing write says the same a little later.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import sys
from abc import ABC, abstractmethod
from array import array

import trio

from trio_sse.errors import ConnectionLost, PeerStalled

if sys.platform == "linux":
    import fcntl
    import termios

    _answer = array("i", [0])  # of an ioctl

__all__ = ["SocketTransport", "TlsTransport", "Transport"]

_NOTSENT_LOWAT = 16384  # trio's value: what may lie unsent in the kernel before a socket stops being writable
_SIOCOUTQNSD = 0x894B  # linux/sockios.h: bytes not yet sent
_KEEPALIVE_IDLE, _KEEPALIVE_INTERVAL, _KEEPALIVE_PROBES = 20, 10, 3  # a silent peer is found within 50 s
_UNSENT_UNKNOWN = (None, None)


class Transport(ABC):
    """A connected peer.

    Attributes:
      secure: whether it is encrypted.
      cut: an unknown part of a write has gone, so that nothing may follow it.
    """

    secure: bool = False
    cut: bool = False

    @abstractmethod
    def write(self, data: bytes) -> int:
        """Hands ``data`` to the kernel without waiting; what it does not take now is the backlog, whose size is returned.

        Raises:
          ConnectionLost: the peer is gone.
        """

    @property
    @abstractmethod
    def backlog(self) -> int:
        """Bytes written that the kernel has not taken yet."""

    @abstractmethod
    async def flush(self, timeout: float) -> None:
        """Returns once the kernel has taken the backlog.

        Args:
          timeout: seconds the kernel may take nothing at all. Each byte taken starts it anew.

        Raises:
          PeerStalled: it has expired.
          ConnectionLost: the peer is gone.
        """

    @abstractmethod
    async def receive(self, max_bytes: int) -> bytes:
        """The next bytes from the peer; ``b""`` at the end of its sending side. Raises ConnectionLost on a reset."""

    def receive_nowait(self, max_bytes: int) -> bytes | None:  # noqa: ARG002
        """As :meth:`receive`, without waiting; None where nothing has come yet, or where that can't be known without a wait."""
        return None

    @abstractmethod
    async def wait_gone(self) -> None:
        """After end of file and a write: returns once the peer is known to have closed. May wait for ever."""

    @abstractmethod
    def shutdown_write(self) -> bool:
        """Says end of file to the peer while its bytes are still read (a lingering close); false where that is impossible."""

    @abstractmethod
    def abort(self) -> None:
        """Lets go of the peer at once: by a reset, so that no unsent byte stays in the kernel. Idempotent."""

    @abstractmethod
    async def close(self) -> None:
        """Closes in an orderly way, within a second. Idempotent."""

    @property
    def local(self) -> tuple[str, int] | None:
        """The address the peer has connected to, as ``(host, port)``; None for a Unix socket, or where the peer has gone."""
        return None

    def unsent(self) -> tuple[int | None, int | None]:
        """Bytes in the kernel: (not yet sent, not yet acknowledged), None where the platform does not tell."""
        return _UNSENT_UNKNOWN


class SocketTransport(Transport):
    """TCP or a Unix socket.

    Args:
      sock: connected; becomes non-blocking, and is owned by the transport from now on.
      write_timeout: seconds; bounds ``TCP_USER_TIMEOUT`` from below, since that also kills a live peer with a full window.
    """

    def __init__(self, sock: socket.socket, *, write_timeout: float = 30.0) -> None:
        self._sock = sock
        self._rest = b""
        self._closed = False
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            _tune_tcp(sock, write_timeout)

    @property
    def local(self) -> tuple[str, int] | None:
        if self._sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            host, port, *_ = self._sock.getsockname()
        except OSError:
            return None
        return host, port

    def write(self, data: bytes) -> int:
        if self._closed:
            raise ConnectionLost("closed")
        if self._rest:
            self._rest += data
            return len(self._rest)
        try:
            # The attempt without waiting first: 1.7 times the throughput of a wait before each write (a full socket is the exception).
            taken = self._sock.send(data)
        except BlockingIOError:
            taken = 0
        except OSError:
            raise ConnectionLost("broken_write") from None
        if taken < len(data):
            self._rest = data[taken:]
        return len(data) - taken

    @property
    def backlog(self) -> int:
        return len(self._rest)

    async def flush(self, timeout: float) -> None:
        while self._rest:
            with trio.move_on_after(timeout) as scope:
                taken = 0
                while taken == 0:  # "writable" may turn out to be no room for even one byte: the clock runs on
                    try:
                        await trio.lowlevel.wait_writable(self._sock)
                    except trio.ClosedResourceError:
                        raise ConnectionLost("closed") from None
                    await trio.lowlevel.checkpoint_if_cancelled()  # by what came in the same moment: no more is sent then
                    taken = self._send_rest()
            if scope.cancelled_caught:
                raise PeerStalled
            self._rest = self._rest[taken:]

    def _send_rest(self) -> int:
        try:
            return self._sock.send(self._rest)
        except BlockingIOError:
            return 0
        except OSError:
            raise ConnectionLost("broken_write") from None

    async def receive(self, max_bytes: int) -> bytes:
        while not self._closed:
            try:
                # Without an attempt first: a peer that has been answered, or that waits for its answer, has nothing to say as a rule.
                await trio.lowlevel.wait_readable(self._sock)
            except trio.ClosedResourceError:
                raise ConnectionLost("closed") from None
            data = self.receive_nowait(max_bytes)
            if data is not None:
                return data
        raise ConnectionLost("closed")

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        if self._closed:
            raise ConnectionLost("closed")
        try:
            return self._sock.recv(max_bytes)
        except BlockingIOError:
            return None
        except OSError:
            raise ConnectionLost("reset") from None

    async def wait_gone(self) -> None:
        if not hasattr(select, "epoll"):
            await trio.sleep_forever()
        try:
            watch = select.epoll()
        except OSError:  # out of descriptors: the next probe's failing write will tell
            await trio.sleep_forever()
        with watch:
            watch.register(self._sock.fileno(), 0)  # no event asked for: errors and hang-ups are reported all the same
            await trio.lowlevel.wait_readable(watch.fileno())

    def shutdown_write(self) -> bool:
        if self._closed:
            return False
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def abort(self) -> None:
        if not self._closed:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._close_now()

    async def close(self) -> None:
        self._close_now()
        await trio.lowlevel.checkpoint()

    def _close_now(self) -> None:
        if not self._closed:
            self._closed = True
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
            self._rest = b""

    def unsent(self) -> tuple[int | None, int | None]:
        if sys.platform != "linux" or self._closed or self._sock.family == socket.AF_UNIX:
            return _UNSENT_UNKNOWN
        try:
            # Asked for each write of a traced stream, so without making anything: the kernel writes into an array that is there.
            fcntl.ioctl(self._sock, _SIOCOUTQNSD, _answer)
            unsent = _answer[0]
            fcntl.ioctl(self._sock, termios.TIOCOUTQ, _answer)
        except OSError:
            return _UNSENT_UNKNOWN
        return unsent, _answer[0]


def _tune_tcp(sock: socket.socket, write_timeout: float) -> None:
    with contextlib.suppress(OSError):  # a peer that has gone already makes some systems refuse
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT)
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Never below the write timeout: it would end a live peer whose window is full before our own verdict does.
            patience = max(_KEEPALIVE_IDLE + _KEEPALIVE_INTERVAL * _KEEPALIVE_PROBES, write_timeout + 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(patience * 1000), 2**31 - 1))


class TlsTransport(Transport):
    """TLS over another transport, by trio's ``SSLStream``. Call :meth:`handshake` first.

    ``close_notify`` is a half-close like FIN; an end without it means that the peer has gone (it was killed, or cut off).
    """

    secure = True

    def __init__(self, lower: Transport, context: ssl.SSLContext) -> None:
        self._lower = lower
        self._pipe = _Pipe(lower)
        # https_compatible: closing sends our close_notify and does not wait for the peer's.
        self._stream: trio.SSLStream[_Pipe] = trio.SSLStream(self._pipe, context, server_side=True, https_compatible=True)
        self._rest = b""

    @property
    def local(self) -> tuple[str, int] | None:
        return self._lower.local

    async def handshake(self) -> None:
        """Raises ConnectionLost for anything that is not a TLS handshake. Bound it by a deadline."""
        try:
            await self._stream.do_handshake()
        except trio.BrokenResourceError:
            raise ConnectionLost("tls_handshake") from None

    def write(self, data: bytes) -> int:
        if self.cut:
            raise ConnectionLost("broken_write")
        self._rest += data
        return len(self._rest)

    @property
    def backlog(self) -> int:
        return len(self._rest)

    async def flush(self, timeout: float) -> None:
        data, self._rest = self._rest, b""
        if not data:
            return
        self._pipe.timeout = timeout
        # Until it has returned, nobody knows how much has gone.
        self.cut = True
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionLost("broken_write") from None
        self.cut = False

    async def receive(self, max_bytes: int) -> bytes:
        try:
            data = await self._stream.receive_some(max_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionLost("reset") from None
        if not data and self._pipe.ended:
            raise ConnectionLost("tls_cut")
        return bytes(data)

    async def wait_gone(self) -> None:
        await self._lower.wait_gone()

    def shutdown_write(self) -> bool:
        return False  # TLS 1.2 has no half-close of our own side that every client would survive

    def abort(self) -> None:
        self.cut = True
        self._lower.abort()

    async def close(self) -> None:
        # The goodbye is worth a moment, not more: the peer may have stopped reading.
        with trio.move_on_after(1, shield=True):
            try:
                await self._stream.aclose()
            except (trio.BrokenResourceError, ConnectionLost, PeerStalled):
                self._lower.abort()
        self.cut = True
        await self._lower.close()

    def unsent(self) -> tuple[int | None, int | None]:
        return self._lower.unsent()


class _Pipe(trio.abc.Stream):
    """What ``SSLStream`` sees of a transport: ciphertext, with the same deadline on progress as everything else."""

    def __init__(self, lower: Transport) -> None:
        self._lower = lower
        self.timeout = 30.0
        self.ended = False  # the lower side said end of file

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()  # before, not after: once the kernel has taken it nothing may come between it and its account
        self._lower.write(bytes(data))
        await self._lower.flush(self.timeout)

    async def wait_send_all_might_not_block(self) -> None:
        await self._lower.flush(self.timeout)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = await self._lower.receive(max_bytes or 65536)
        self.ended = not data
        return data

    async def aclose(self) -> None:
        await self._lower.close()
