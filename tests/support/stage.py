"""The whole server on the fake clock: real connections, routes and exchanges over simulated transports.

    async def test_it(nursery, autojump_clock):
        stage = Stage(nursery)
        peer = stage.connect()
        peer.send(post("/generate", {"prompt": "hi"}))
        answer = await peer_answer(peer)
        await stage.settled()

No socket, no thread, no real time. ``stage.outcomes`` lists the closed records in the order in which they were closed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import h11
import trio
import trio.testing

from trio_sse.backends.base import Backend
from trio_sse.backends.scripted import ScriptedBackend
from trio_sse.config import Config
from trio_sse.script import Script
from trio_sse.server import Server
from trio_sse.simulated import SimulatedPeer, SimulatedTransport, simulated_pair
from trio_sse.sse import Parser, ServerSentEvent
from trio_sse.trace import Outcome, Record

__all__ = ["Answer", "Stage", "answers", "get", "peer_answer", "post"]


class Stage:
    """A server without listeners.

    Args:
      nursery: where connection tasks run; cancel it to cancel the server.
      backend: default is a ScriptedBackend playing ``script``.
      options: fields of Config.
    """

    def __init__(
        self, nursery: trio.Nursery, backend: Backend | None = None, *, script: Script | None = None, window: int = 65536, **options: object
    ) -> None:
        self.nursery = nursery
        self.backend = backend or ScriptedBackend(script or Script(events=5, interval_ms=20))
        self.config = replace(Config(lab=True), **options)  # type: ignore[arg-type]
        self.script_backend = ScriptedBackend(slots=self.config.events_slots)
        self.server = Server(self.config, self.backend, self.script_backend, abandon=self.abandoned)
        self.server.routes.loaded()
        self.records: list[Record] = []
        self.connections = 0
        self.scopes: dict[SimulatedPeer, trio.CancelScope] = {}  # each connection's task's
        self._pumping = False
        self.exit_statuses: list[int] = []
        self._window = window
        finished = self.server.routes.finished

        def note(record: Record) -> None:
            self.records.append(record)
            finished(record)

        self.server.routes.finished = note  # type: ignore[method-assign]

    def abandoned(self, status: int) -> None:
        self.exit_statuses.append(status)

    @property
    def outcomes(self) -> list[Outcome | None]:
        return [record.outcome for record in self.records]

    def connect(self) -> SimulatedPeer:
        """A new connection, served by a task of its own."""
        if not self._pumping:
            self._pumping = True
            self.nursery.start_soon(self.server.routes.pump.run)
        transport, peer = simulated_pair(window=self._window)
        self.nursery.start_soon(self._serve, transport)
        return peer

    async def _serve(self, transport: SimulatedTransport) -> None:
        self.connections += 1
        try:
            with trio.CancelScope() as self.scopes[transport.client]:
                await self.server.serve(transport)
        finally:
            self.connections -= 1
            del self.scopes[transport.client]

    async def settled(self) -> None:
        """Waits until every task is blocked, and checks that nothing is held: no slot, no waiter, no live request."""
        await trio.testing.wait_all_tasks_blocked()
        self.check_idle()

    def check_idle(self) -> None:
        for admission in (self.server.routes.admission, self.server.routes.events_admission):
            assert admission.running == 0
            assert admission.waiting == 0
            assert admission.lost == 0
        assert not self.server.routes.live
        for backend in (self.backend, self.script_backend):
            if isinstance(backend, ScriptedBackend):
                assert backend.active == 0


def post(path: str, body: object, *headers: str, raw: bytes | None = None) -> bytes:
    """A whole POST request; ``body`` becomes JSON unless ``raw`` is given."""
    content = json.dumps(body).encode() if raw is None else raw
    lines = [f"POST {path} HTTP/1.1", "Host: t", f"Content-Length: {len(content)}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n" + content


def get(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    """A whole request without a body."""
    lines = [f"{method} {path} HTTP/{version}", "Host: t", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


@dataclass
class Answer:
    """One response as a client sees it. ``complete``: its end was seen."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    complete: bool = False
    events: list[ServerSentEvent] = field(default_factory=list)

    @property
    def error(self) -> dict[str, str | None]:
        return json.loads(self.body)["error"]  # type: ignore[no-any-return]


def answers(received: bytes, *methods: str, closed: bool = True) -> list[Answer]:
    """The responses in ``received``, which answer requests with these ``methods`` (default: one POST), parsed by h11's client side."""
    connection = h11.Connection(h11.CLIENT)
    connection.receive_data(received)
    if closed and received:
        connection.receive_data(b"")
    found: list[Answer] = []
    for method in methods or ("POST",):
        if connection.our_state is not h11.IDLE:
            break
        connection.send(h11.Request(method=method, target="/", headers=[("Host", "t")]))
        connection.send(h11.EndOfMessage())
        answer = _one(connection)
        if answer is None:
            break
        found.append(answer)
        if not answer.complete or {connection.their_state, connection.our_state} != {h11.DONE}:
            break
        connection.start_next_cycle()
    return found


def _one(connection: h11.Connection) -> Answer | None:
    answer: Answer | None = None
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return answer
        if isinstance(event, h11.Response):
            answer = Answer(event.status_code, {name.decode(): value.decode() for name, value in event.headers})
        elif isinstance(event, h11.Data):
            assert answer is not None
            answer.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert answer is not None
            answer.complete = True
        elif event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
            break
        if answer is not None and answer.complete:
            break
    if answer is not None and "event-stream" in answer.headers.get("content-type", ""):
        answer.events = Parser().feed(answer.body)
    return answer


async def peer_answer(peer: SimulatedPeer, method: str = "POST") -> Answer:
    """Waits until one whole response has come, or the connection has ended."""
    while True:
        found = answers(bytes(peer.received), method, closed=peer.ended or peer.aborted)
        if found and found[0].complete:
            return found[0]
        if peer.ended or peer.aborted:
            assert found, f"closed without an answer: {bytes(peer.received)!r}"
            return found[0]
        await peer.wait_news()
