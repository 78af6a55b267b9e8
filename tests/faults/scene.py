"""The scene: the whole server over simulated transports, one connection that is watched, and what must hold after every run.

    outside          the driver: plays the scenario's client, waits for the end, then checks
     └── house       the server's nursery: connection tasks, exchanges, the engine. Its tasks' steps are the points

The invariants, after each run (:meth:`ServerScene._check`):

1. It ends within LIMIT virtual seconds.
2. One record for each request, closed once, with an outcome that the scenario or a fault explains.
3. No slot is taken, lost or waited for; no exchange, request id, connection, task or deadline is left; no channel is open.
4. Whoever has gone, or was cancelled, is let go at once: within PROMPT seconds, and what the work is known to need.
5. The backend was told at most once that its work is over, exactly once where it was still at work at the verdict, and has ended;
   at most one token was made after the verdict, and at most one step begun. Must-drain work is not told. No more of them at a time
   than there are slots.
6. The bytes are a prefix of well-formed responses, and what is in them is a prefix of what the run without faults sent. A response
   that claims to be whole belongs to a completed record, and a completed record has one.
7. Nothing follows a response that ends the connection.
8. Nothing unexpected is in the log.
9. The next request on the same server works, unless the server was told to end.
"""

from __future__ import annotations

import logging
import math
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
from tests.faults.wire import Reply, read_replies
from tests.support.stage import Stage, post
from trio_sse import routes
from trio_sse.errors import HttpError
from trio_sse.exchange import Exchange
from trio_sse.http11 import Http11Connection, Request
from trio_sse.script import Script
from trio_sse.simulated import SimulatedPeer, SimulatedTransport, simulated_pair
from trio_sse.trace import Outcome, Record

__all__ = ["LIMIT", "Scenario", "ServerScene"]

PROMPT = 1.5  # virtual seconds: a half-closed peer is probed once a second
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
        self._closed_at: dict[int, float] = {}  # by id(record)
        self._to_end: list[tuple[Record, float]] = []  # what must end soon, and since when

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

    def must_end(self) -> None:
        """From now on the watched connection's exchange has to end soon."""
        self._to_end += [(record, trio.current_time()) for record in self.mine_records if record.t_ended is None]

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
                self._check()
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

        async def counted_answer(connection: Http11Connection, request: Request) -> None:
            self._begin(connection)
            await answer(connection, request)

        async def counted_malformed(connection: Http11Connection, error: HttpError) -> None:
            self._begin(connection)
            await malformed(connection, error)

        def noted(record: Record) -> None:
            if _current.get() is self.peer:
                self.closed.append(record)
            self._closed_at[id(record)] = trio.current_time()
            finished(record)

        served.answer = counted_answer  # type: ignore[method-assign]
        served.malformed = counted_malformed  # type: ignore[method-assign]
        served.finished = noted  # type: ignore[method-assign]

    def _begin(self, connection: Http11Connection) -> None:
        self.begun += 1
        transport = connection.transport
        assert isinstance(transport, SimulatedTransport)
        _current.set(transport.client)

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

    # The invariants

    def _check(self) -> None:
        stage = self.stage
        for record in stage.records:
            self._check_record(record)
        assert len({id(record) for record in stage.records}) == len(stage.records), "a record was closed twice"
        assert len(stage.records) == self.begun, f"{self.begun} requests, {len(stage.records)} records"
        stage.check_idle()
        assert not stage.server._connections
        assert not stage.server.routes._names
        assert stage.server._refusing == 0
        self._check_backend()
        self._check_prompt()
        self._check_bytes()
        for line in self.log:
            patterns = [pattern for name in self._explained for pattern in faults.LOGS.get(name, ())]
            assert any(pattern in line for pattern in patterns), f"unexpected in the log: {line}"

    @property
    def _explained(self) -> list[str]:
        failing = Outcome.BACKEND_ERROR in self.scenario.outcomes
        return [*self.injected, *(["backend_refuses"] if failing else [])]

    def _check_record(self, record: Record) -> None:
        assert record.outcome is not None
        assert record.t_ended is not None
        assert record.channel_peak <= self.stage.config.channel_capacity
        assert record.events_sent + record.events_discarded <= record.events_produced
        if record.outcome is Outcome.COMPLETED:
            assert record.events_sent == record.events_produced, f"{record.events_sent} of {record.events_produced} events sent"
            assert record.tokens_after_verdict == 0
        allowed = {*self.scenario.outcomes, *(each for name in self._explained for each in faults.FAULTS[name].outcomes)}
        if record in self.closed:
            assert record.outcome in allowed, f"{record.outcome} ({record.witness}) is none of {sorted(allowed)}"
        if not record.tracing:
            return  # it was no request
        marks = [str(mark[0]) for mark in record.marks]
        assert marks.count("verdict") == marks.count("outcome") == 1, f"marks: {marks}"
        assert marks.count("admitted") == marks.count("slot_released")
        work = next((each for each in self.backend.works if each.record is record), None)
        if work is None or not work.must_drain:
            assert record.tokens_after_verdict <= 1, f"{record.tokens_after_verdict} tokens after the verdict"
            after = marks[marks.index("verdict") :]
            assert after.count("step_begin") + after.count("prefill_begin") <= 1, f"steps after the verdict: {after}"

    def _check_backend(self) -> None:
        for work in self.backend.works:
            assert work.ended
            record = work.record
            marks = [str(mark[0]) for mark in record.marks]
            assert not (work.must_drain and work.told) or self._cancelled_from_outside, "must-drain work was cancelled"
            assert work.told + work.finished == 1, f"told {work.told} times, finished: {work.finished}"
            assert marks.count("cancel_delivered") == work.told
            assert record.outcome is not Outcome.COMPLETED or work.finished
            if work.told and not self._cancelled_from_outside:
                assert marks.index("verdict") < marks.index("cancel_delivered"), "cancelled without a verdict"
        assert self.backend.peak <= self.stage.server.routes.admission.slots, f"{self.backend.peak} generations at a time"
        assert len({id(work.record) for work in self.backend.works}) == len(self.backend.works), "a request was generated twice"
        for exchange in self.exchanges:
            channel = exchange._channel
            assert channel.closed, "an open channel is left"
            assert len(channel) == 0 or exchange.record.outcome is None, "events are left in a channel"
        if isinstance(self.backend, EngineBackend) and not self.house.cancel_scope.cancel_called:
            assert self.backend.model.used == 0
            assert self.backend.engine.sequences == 0

    @property
    def _cancelled_from_outside(self) -> bool:
        return any(name.startswith("cancel_") for name in self.injected)

    def _check_prompt(self) -> None:
        script = self.scenario.script
        patience = PROMPT + (script.duration if script is not None and script.must_drain else 0.0)
        patience += 2.0 * self.injected.count("slow_step") + 20.0 * self.injected.count("stuck_step")
        if self.scenario.window < 65536 or any(name.startswith("stall") for name in self.injected):
            patience += self.stage.config.write_timeout  # the last words wait for a reader who does not read
        for record, since in self._to_end:
            took = self._closed_at[id(record)] - since
            assert took <= patience, f"{record.outcome} took {took:g} s"

    def _check_bytes(self) -> None:
        peer = self.peer
        if peer is None:
            return
        raw = bytes(peer.received + peer._buffer)
        methods = [*self.scenario.methods, *("GET" for _ in self.injected)]
        self.replies = read_replies(raw, methods, ended=peer.ended and not peer.aborted)
        assert len(self.replies) <= len(self.closed), f"{len(self.replies)} responses to {len(self.closed)} requests"
        for n, (reply, record) in enumerate(zip(self.replies, self.closed, strict=False)):
            name = f"response {n} ({record.outcome}, {record.witness})"
            assert n == len(self.replies) - 1 or reply.complete, f"{name} is incomplete, and another one follows"
            assert reply.whole == (record.outcome is Outcome.COMPLETED) or self._lost(record, reply), f"{name} is whole: {reply.whole}"
            if reply.stream and reply.error:
                assert n == len(self.replies) - 1, f"{name}: another one follows an error in band"
            good = self.whole[n] if self.whole is not None and n < len(self.whole) else None
            if good is not None and reply.status == good.status == 200:
                assert reply.data == good.data[: len(reply.data)], f"{name}: {reply.data} is no prefix of {good.data}"
                assert not reply.whole or reply.data == good.data, f"{name} says that it is whole: {reply.data}"

    def _lost(self, record: Record, reply: Reply) -> bool:
        """Completed, for the kernel took it all, and yet not with the client: it had gone, or does not read."""
        return record.outcome is Outcome.COMPLETED and self.peer is not None and self.peer.closed and not reply.whole

    async def _ask_again(self) -> None:
        if self.house.cancel_scope.cancel_called or self.shutting_down.is_set():
            return
        self.backend.disarm()
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
