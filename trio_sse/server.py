"""Listeners, connections, signals and the end.

    bind ──▶ accept ──▶ one task per connection: next_request → Routes.answer → again
      └────▶ load the backend; /readyz says when it is warm

Shutdown, by the first SIGTERM or SIGINT::

    closing      no more accepting; idle connections closed; /readyz 503; what comes on a live connection gets 503 and its end
      │ grace    open streams may finish
    stopping     every exchange still live gets the verdict ``shutdown``, and so an error in band
      │ 1 s      its work may end
    over         exit status 0; or 1 if some work had to be abandoned with the process

A second signal ends the process at once. While the backend loads, the first one ends it within a second.

Rules:

1. The address is bound before anything slow happens.
2. One connection's failure is that connection's: it is logged, and the server goes on.
3. At ``max_connections`` the connection that has been idle longest makes room; if none is idle, the new one is told 503.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import trio

from trio_sse.access import is_loopback
from trio_sse.backends.base import Backend
from trio_sse.config import Config
from trio_sse.errors import ConfigError, ConnectionLost, HttpError, NotReady, PeerStalled
from trio_sse.http11 import Http11Connection
from trio_sse.listeners import open_listeners, url
from trio_sse.routes import Routes
from trio_sse.trace import Outcome
from trio_sse.transport import SocketTransport, Transport

__all__ = ["Server"]

log = logging.getLogger("trio_sse")

END_SECONDS = 1.0  # what work gets to end once the grace is over
_ACCEPT_BATCH = 32  # connections accepted before the others get their turn
_REFUSALS = 64  # connections past the limit that are told so at the same time; more are just closed
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """The server.

    Args:
      config: all settings.
      backend: the model's; script_backend: the one behind ``/events``.
      announce: called with one line when the server listens, and when it is ready.
      abandon: ends the process at once with a status; called only where something can't be waited for.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        script_backend: Backend,
        *,
        announce: Callable[[str], None] = log.info,
        abandon: Callable[[int], None] = os._exit,
    ) -> None:
        self.config = config
        self.routes = Routes(config, backend, script_backend)
        self._backend = backend
        self._announce = announce
        self._abandon = abandon
        self._tls = _tls_context(config)
        self._listeners: list[socket.socket] = []
        self._connections: set[Http11Connection] = set()
        self._refusing = 0
        self._accepting = trio.CancelScope()
        self._empty = trio.Event()  # set when the last connection has gone

    def bind(self) -> list[str]:
        """Opens the listeners; returns their URLs. Raises OSError or ConfigError."""
        self._listeners = open_listeners(self.config)
        if self.config.lab is None:
            # Not by --host: systemd may have handed over something else.
            unix = any(each.family == socket.AF_UNIX for each in self._listeners)
            self.routes.lab = self.loopback and not unix
        return [url(listener, secure=self._tls is not None) for listener in self._listeners]

    @property
    def loopback(self) -> bool:
        """Whether nobody but this machine can reach it."""
        return all(each.family == socket.AF_UNIX or is_loopback(each.getsockname()[0]) for each in self._listeners)

    # ---- The server's life ----

    async def run(
        self, *, signals: bool = True, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> int:
        """Serves until a signal, or until cancelled. Returns the exit status.

        Resource handling: owns the listeners, every connection and the backend's ``run``; all are gone when it returns, unless work
        had to be abandoned.

        Error handling: an error of the backend's ``run`` ends the server and is raised.

        Cancellation: an abrupt shutdown. Exchanges get no goodbye; must-drain work gets ``cancel_grace``.
        """
        urls = self.bind() if not self._listeners else [url(each, secure=self._tls is not None) for each in self._listeners]
        status = 0
        numbers = (signal.SIGTERM, signal.SIGINT) if signals else ()
        try:
            # Signals are received from before the first line is printed: whoever waits for it may send one at once.
            with trio.open_signal_receiver(*numbers) if numbers else contextlib.nullcontext() as received:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.routes.pump.run)
                    for listener in self._listeners:
                        nursery.start_soon(self._accept, listener, nursery)
                    for each in urls:
                        self._announce(f"listening on {each}")
                    task_status.started(urls)
                    nursery.start_soon(self._load, nursery)
                    if received is None:
                        await trio.sleep_forever()
                    else:
                        status = await self._wait_for_signal(received)
                    nursery.cancel_scope.cancel(reason="shutdown is complete")
        finally:
            self._close_listeners()
        return status

    async def _load(self, nursery: trio.Nursery) -> None:
        # The script backend is not run: it has nothing to load and owns nothing.
        await nursery.start(self._backend.run)
        self.routes.loaded()
        # What has been loaded stays: the collector need not look through it again and again (8 % of a backlog's drain).
        gc.collect()
        gc.freeze()
        self._announce("ready")

    async def _wait_for_signal(self, received: AsyncIterator[int]) -> int:
        number = await anext(aiter(received))
        log.info("%s: shutting down", signal.Signals(number).name)
        # From here on a signal needs no event loop to be obeyed; a handler of our own, since PID 1 has no default ones.
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, _frame: self._abandon(128 + number))
        if not self.routes.ready:
            # Loading can't be cancelled: it is one long call in a thread.
            await self.shutdown(grace=0.0)
            self._abandon(0)
        return await self.shutdown()

    async def shutdown(self, grace: float | None = None) -> int:
        """The graceful shutdown drawn above. Returns 0, or 1 where work was abandoned."""
        self.routes.closing = True
        self._accepting.cancel(reason="shutdown")
        self._close_listeners()
        for connection in self._connections:
            # Nothing that has been promised is left to do in a wait for a head: what will have come by then is answered.
            connection.hurry(END_SECONDS)
            if connection.idle:
                connection.hang_up()
        with trio.move_on_after(self.config.grace if grace is None else grace):
            await self._until_empty()
        for exchange, _ in list(self.routes.live.values()):
            exchange.stop(Outcome.SHUTDOWN, "grace_over")
        with trio.move_on_after(END_SECONDS if grace is None else END_SECONDS / 2):
            await self._until_empty()
        abandoned = self.routes.admission.running + self.routes.events_admission.running
        if abandoned:
            log.error("%d requests' work did not end: abandoned with the process", abandoned)
            self._abandon(1)
            return 1
        for connection in self._connections:
            connection.abort()
        return 0

    async def _until_empty(self) -> None:
        while self._connections:
            self._empty = trio.Event()
            await self._empty.wait()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            if listener.fileno() == -1:
                continue
            name = listener.getsockname()
            trio.lowlevel.notify_closing(listener)
            listener.close()
            if self.config.uds is not None and name == self.config.uds:
                Path(self.config.uds).unlink(missing_ok=True)

    # ---- Connections ----

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        with self._accepting:
            while True:
                await trio.lowlevel.wait_readable(listener)
                for _ in range(_ACCEPT_BATCH):
                    try:
                        sock, _address = listener.accept()
                    except BlockingIOError:
                        break
                    except OSError as error:
                        if error.errno in _OUT_OF_FILES:
                            log.warning("cannot accept: %s", os.strerror(error.errno))
                            await trio.sleep(0.1)  # nothing to do but wait for somebody to leave
                        break
                    nursery.start_soon(self.serve, SocketTransport(sock, write_timeout=self.config.write_timeout))

    async def serve(self, transport: Transport) -> None:
        """One connection from accept to close.

        Resource handling: owns ``transport``.

        Error handling: nothing but Cancelled leaves it.

        Cancellation: closes the connection; see :meth:`Exchange.run` for what becomes of a request.
        """
        if not self._make_room():
            await self._refuse(transport)
            return
        connection = Http11Connection(transport, self.config)
        self._connections.add(connection)
        if self.routes.closing:
            connection.hurry(END_SECONDS)  # accepted just before the listeners were closed: it gets a moment to be told
        try:
            if self._tls is not None:
                await connection.secure(self._tls)
            await self._requests(connection)
        except (ConnectionLost, PeerStalled):
            connection.abort()
        except Exception:
            log.exception("a connection failed")
            connection.abort()
        finally:
            self._connections.discard(connection)
            with trio.move_on_after(END_SECONDS, shield=True):
                await connection.close()
            if not self._connections:
                self._empty.set()

    async def _requests(self, connection: Http11Connection) -> None:
        """The keep-alive loop."""
        while True:
            try:
                request = await connection.next_request()
            except HttpError as error:
                await self.routes.malformed(connection, error)
                return
            if request is None:
                return
            exchange = await self.routes.answer(connection, request)
            del request  # it may last for hours
            if exchange is not None:
                await exchange.run()
            if not connection.next_cycle():
                if connection.unread:
                    await connection.linger()
                return
            if self.routes.closing and not connection.pipelined:
                return

    def _make_room(self) -> bool:
        if len(self._connections) < self.config.max_connections:
            return True
        longest = min((each for each in self._connections if each.idle), key=lambda each: each.idle_since, default=None)
        if longest is None:
            return False
        longest.hang_up()
        return True

    async def _refuse(self, transport: Transport) -> None:
        connection = Http11Connection(transport, self.config)
        if self._refusing >= _REFUSALS:
            connection.abort()
            return
        self._refusing += 1
        try:
            with trio.move_on_after(END_SECONDS):
                if self._tls is not None:
                    await connection.secure(self._tls)
                await self.routes.malformed(connection, NotReady("Too many connections.", code="too_many_connections"))
        except (ConnectionLost, PeerStalled):
            pass
        finally:
            self._refusing -= 1
            connection.abort()


def _tls_context(config: Config) -> ssl.SSLContext | None:
    if config.certfile is None or config.keyfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.certfile, config.keyfile)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"--certfile: cannot use this certificate and key: {error.strerror}") from None
    return context
