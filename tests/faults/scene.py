"""The scene: the whole server over simulated transports, one connection that is watched, and what must hold after every run.

    outside          the driver: plays the scenario's client, waits for the end, then checks
     └── house       the server's nursery: connection tasks, exchanges, the engine. Its tasks' steps are the points

What must hold afterwards is in invariants.py.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import trio
import trio.testing

from tests.faults import faults
from tests.faults.backends import EngineBackend, Saboteur, ScriptedSaboteur
from tests.faults.harness import Scene, dismantle, tasks_below
from tests.faults.invariants import check
from tests.faults.wire import Reply
from tests.support.stage import Stage, post
from trio_sse import routes
from trio_sse.errors import HttpError
from trio_sse.exchange import Exchange
from trio_sse.http11 import Http11Connection, Request
from trio_sse.script import Script
from trio_sse.simulated import SimulatedPeer, SimulatedTransport, simulated_pair
from trio_sse.trace import Outcome, Record
from trio_sse.transport import TlsTransport

__all__ = ["LIMIT", "Scenario", "ServerScene", "client_of"]

LIMIT = 120.0  # virtual seconds: write timeout, cancel grace, queue timeout, keep-alive, 30 s of lingering, and the longest script
OPTIONS = {
    "write_timeout": 5.0, "cancel_grace": 5.0, "keep_alive": 5.0, "queue": 2, "queue_timeout": 10.0, "grace": 1.0, "channel_capacity": 2,
}  # fmt: skip
TOKENS = Script(events=3, interval_ms=20)
NEXT = post("/generate", {"prompt": "next", "max_new_tokens": 1})

# The client of the connection whose task this is, from its first request on.
_current: ContextVar[SimulatedPeer | None] = ContextVar("_current", default=None)

Client = Callable[["ServerScene"], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """One way to use the server.

    Attributes:
      client: connects and plays the client's part, to its end or the connection's.
      methods: of the requests it sends on the watched connection, in order.
      outcomes: that its requests may have without any fault.
      script: what the scripted backend plays; None is the engine.
      window: bytes that the kernel takes for a client that does not read.
    """

    name: str
    client: Client
    methods: tuple[str, ...] = ("POST",)
    outcomes: frozenset[Outcome] = frozenset({Outcome.COMPLETED})
    script: Script | None = TOKENS
    options: dict[str, Any] = field(default_factory=dict)
    window: int = 65536


def client_of(connection: Http11Connection) -> SimulatedPeer:
    """Who is at the other end, of TLS too."""
    transport = connection.transport
    lower = transport._lower if isinstance(transport, TlsTransport) else transport
    assert isinstance(lower, SimulatedTransport)
    return lower.client


class ServerScene(Scene):
    """One run of ``scenario``.

    Args:
      whole: the replies of the run without faults; None if this is it.
      variant: patches some of the server's classes for the length of the run.
    """

    def __init__(
        self, scenario: Scenario, whole: list[Reply] | None = None, variant: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.scenario = scenario
        self.whole = whole
        self.variant = variant
        self.replies: list[Reply] = []
        self.plaintext: Callable[[bytes], bytes] = bytes  # of what the client has received; TLS has another
        self.injected: list[str] = []
        self.peer: SimulatedPeer | None = None
        self.peers: list[SimulatedPeer] = []
        self.house: trio.Nursery
        self.stage: _Stage
        self.backend: Saboteur
        self.shutting_down = trio.Event()
        self.resuming = trio.Event()
        self.exchanges: list[Exchange] = []
        self.mine_records: list[Record] = []  # of the watched connection's exchanges
        self.scope: trio.CancelScope | None = None  # around the last of them
        self.begun = 0
        self.closed: list[Record] = []  # on the watched connection, in order
        self.log: list[str] = []
        self.closed_at: dict[int, float] = {}  # by id(record)
        self.to_end: list[tuple[Record, float, int]] = []  # what must end soon, since when, and the tokens it had then

    # For clients and faults

    def connect(self) -> SimulatedPeer:
        """The watched connection."""
        self.peer = self.dial()
        return self.peer

    def dial(self) -> SimulatedPeer:
        """A connection; one that is reset at once if the server is no more."""
        if self.house.cancel_scope.cancel_called:
            transport, peer = simulated_pair()
            transport.abort()
            return peer
        peer = self.stage.connect()
        self.peers.append(peer)
        return peer

    def say(self, data: bytes) -> None:
        """The client sends ``data`` on the watched connection, unless it has ended its side."""
        peer = self.peer
        if peer is not None and not peer.closed and not peer._transport._eof:
            peer.send(data)

    def mine(self, record: Record) -> bool:
        """Whether it belongs to the watched connection."""
        return any(each is record for each in self.mine_records)

    def cancel_connection(self) -> None:
        """Cancels the task of the watched connection."""
        for peer, scope in self.stage.scopes.items():
            if peer is self.peer:
                scope.cancel()
                self.must_end()

    def must_end(self) -> None:
        """From now on the watched connection's exchange has to end soon."""
        now = trio.current_time()
        self.to_end += [(record, now, record.tokens_generated) for record in self.mine_records if record.t_ended is None]

    async def until(self, count: int, mark: bytes = b"0\r\n\r\n") -> None:
        """Waits until the client has ``count`` times ``mark``, or the connection has ended."""
        peer = self.peer
        assert peer is not None
        while not (peer.ended or peer.aborted) and peer.received.count(mark) < count:
            await peer.wait_news()

    def inject(self, fault: str) -> None:
        self.injected.append(fault)
        faults.FAULTS[fault].strike(self)

    # The run

    async def run(self, watch: Callable[[trio.Nursery], None]) -> None:
        tasks = len(tasks_below())
        threads, descriptors = threading.active_count(), len(os.listdir("/dev/fd"))  # noqa: PTH208
        handler = _Handler(self.log)
        logger = logging.getLogger("trio_sse")
        before = (logger.level, logger.propagate)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        logger.addHandler(handler)
        try:
            with self.variant(), mock.patch.object(routes, "Exchange", self._exchange_class()):
                await self._play(watch)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before[0])
            logger.propagate = before[1]
        assert len(tasks_below()) == tasks, "a task is left"
        assert threading.active_count() == threads, "a thread is left"
        assert len(os.listdir("/dev/fd")) == descriptors, "a descriptor is left"  # noqa: PTH208
        deadline = trio.lowlevel.current_statistics().seconds_to_next_deadline
        assert deadline == math.inf, f"a deadline is left, {deadline:g} s ahead"

    async def _play(self, watch: Callable[[trio.Nursery], None]) -> None:
        async with trio.open_nursery() as outside:
            self.house = await outside.start(self._house, watch)
            outside.start_soon(self._shut_down_when_told)
            outside.start_soon(self._resume_when_told)
            try:
                with trio.move_on_after(LIMIT) as limit:
                    await self.scenario.client(self)
                    if self.peer is not None and not self.peer.closed:
                        self.peer.close()
                    await self.stage.until_empty()
                assert not limit.cancelled_caught, f"did not end within {LIMIT:g} s: {[each.name for each in tasks_below(self._root())]}"
                await trio.testing.wait_all_tasks_blocked()
                self.over = True
                check(self)
                await self._ask_again()
            except BaseException:
                for peer in self.peers:
                    peer.reset()
                await dismantle(self.house)  # noqa: ASYNC102  (it has a limit of its own)
                raise
            outside.cancel_scope.cancel(reason="the scene is over")

    def _root(self) -> trio.lowlevel.Task:
        return self.house.parent_task

    async def _house(  # noqa: ASYNC114
        self, watch: Callable[[trio.Nursery], None], task_status: trio.TaskStatus[trio.Nursery]
    ) -> None:
        async with trio.open_nursery() as nursery:
            scenario = self.scenario
            engine = EngineBackend() if scenario.script is None else None
            self.backend = engine or ScriptedSaboteur(scenario.script or Script())
            self.backend.mine = self.mine
            self.stage = _Stage(nursery, self.backend, window=scenario.window, **{**OPTIONS, **scenario.options})
            self._tap()
            watch(nursery)
            if engine is not None:
                await nursery.start(engine.run)
            task_status.started(nursery)
            await trio.sleep_forever()

    def _tap(self) -> None:
        """Puts the account of requests and records between server and routes."""
        served = self.stage.server.routes
        answer, malformed, finished = served.answer, served.malformed, served.finished

        async def counted_answer(connection: Http11Connection, request: Request) -> Exchange | None:
            self._begin(connection)
            return await answer(connection, request)

        async def counted_malformed(connection: Http11Connection, error: HttpError) -> None:
            self._begin(connection)
            await malformed(connection, error)

        def noted(record: Record) -> None:
            if _current.get() is self.peer:
                self.closed.append(record)
            self.closed_at[id(record)] = trio.current_time()
            finished(record)

        served.answer = counted_answer  # type: ignore[method-assign]
        served.malformed = counted_malformed  # type: ignore[method-assign]
        served.finished = noted  # type: ignore[method-assign]

    def _begin(self, connection: Http11Connection) -> None:
        self.begun += 1
        _current.set(client_of(connection))

    def _exchange_class(self) -> type[Exchange]:
        """The exchange there is (or its variant), in a scope of its own and known to the scene."""
        base: Any = vars(routes)["Exchange"]
        scene = self

        class Known(base):  # type: ignore[misc]
            __slots__ = ()

            async def run(self) -> None:
                scene.exchanges.append(self)
                if _current.get() is not scene.peer:
                    await super().run()
                    return
                scene.mine_records.append(self.record)
                with trio.CancelScope() as scene.scope:
                    await super().run()

        return Known

    async def _shut_down_when_told(self) -> None:
        await self.shutting_down.wait()
        await self.stage.server.shutdown()

    async def _resume_when_told(self) -> None:
        while True:
            await self.resuming.wait()
            self.resuming = trio.Event()
            await trio.sleep(1)
            if self.peer is not None:
                self.peer.resume()

    async def _ask_again(self) -> None:
        if self.house.cancel_scope.cancel_called or self.shutting_down.is_set():
            return
        self.backend.disarm()
        self.stage.server._tls = None
        vars(self.stage.server.routes.admission).pop("check", None)
        peer = self.stage.connect()
        peer.send(NEXT)
        with trio.move_on_after(LIMIT) as limit:
            while not (peer.ended or peer.aborted) and b"[DONE]" not in peer.received:
                await peer.wait_news()
        assert not limit.cancelled_caught, "the next request is not answered"
        assert peer.received.startswith(b"HTTP/1.1 200 "), f"the next request fails: {bytes(peer.received)!r}"
        assert b"[DONE]" in peer.received, f"the next request fails: {bytes(peer.received)!r}"
        peer.close()
        await self.stage.until_empty()
        self.stage.check_idle()


class _Stage(Stage):
    """Knows when its last connection has gone."""

    gone: trio.Event | None = None

    async def until_empty(self) -> None:
        while self.connections:
            self.gone = trio.Event()
            await self.gone.wait()

    async def _serve(self, transport: SimulatedTransport) -> None:
        try:
            await super()._serve(transport)
        finally:
            if self.gone is not None:
                self.gone.set()


class _Handler(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.getMessage()} {getattr(record, 'fields', {}).get('outcome', '')}"
        self._lines.append(f"{line} {record.exc_info[1]!r}" if record.exc_info else line)
