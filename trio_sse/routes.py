"""Which method and path speaks which dialect to which backend, and the small JSON routes.

    Http11Connection ──▶ Routes.answer ──┬── a refusal (404, 401, …)
                                         ├── a small document (/healthz, /v1/models, …)
                                         └── an Exchange (/generate, /events, /v1/…)

Rules:

1. Exactly one response per request, and exactly one closed record, whatever happens.
2. The order of the checks is: route, origin, key, method, readiness, body. Nothing is read of a body that would be refused anyway.
3. A route is one line in :meth:`Routes._table`. Its template, never the raw path, names it in log and metrics.
4. ``/healthz`` and ``/readyz`` never wait for a backend.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from trio_sse import logs
from trio_sse.access import Access, is_loopback, request_id
from trio_sse.admission import Admission
from trio_sse.backends.base import Backend
from trio_sse.config import Config
from trio_sse.dialects import native, openai
from trio_sse.dialects.base import AnswerContext, Parsed
from trio_sse.errors import (
    BadRequest,
    ConnectionLost,
    HttpError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    NotReady,
    PeerStalled,
    UnsupportedMedia,
)
from trio_sse.exchange import Exchange
from trio_sse.http11 import Headers, Http11Connection, Request
from trio_sse.metrics import CONTENT_TYPE, Metrics
from trio_sse.pump import Pump
from trio_sse.script import Script
from trio_sse.sse import json_text
from trio_sse.trace import Outcome, Record
from trio_sse.tracestore import TraceStore
from trio_sse.writer import JSON_HEADERS, STREAM_HEADERS

__all__ = ["Call", "Routes"]

log = logging.getLogger("trio_sse")

GENERATE_BODY = 16_384  # bytes: interface.md's limit for /generate
_PARSE_IN_THREAD = 65_536  # bytes of body from which on parsing would be felt by the other streams
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"via")


@dataclass(slots=True)
class Call:
    """One request on its way through here."""

    connection: Http11Connection
    request: Request
    record: Record
    headers: Headers  # for whatever is answered: request id, CORS
    owner: int | None = None  # which API key


# Answers by itself, or returns the exchange that will.
Handler = Callable[[Call], Awaitable[Exchange | None]]


@dataclass(frozen=True, slots=True)
class _Route:
    template: str
    methods: dict[str, Handler]
    open: bool = False  # needs no key
    lab: bool = False  # only where the lab is on, and never through a proxy

    def handler(self, method: str) -> Handler:
        """For ``method``; GET's serves HEAD. Raises MethodNotAllowed."""
        handler = self.methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            raise MethodNotAllowed(f"{self.template} does not take this method.", self.allow)
        return handler

    @property
    def allow(self) -> str:
        return ", ".join([*self.methods, *(["HEAD"] if "GET" in self.methods else []), "OPTIONS"])


class Routes:
    """The application.

    Args:
      backend: the model's; ``script_backend`` is the one behind ``/events``.

    Attributes:
      ready: whether the backend has loaded. closing: whether the server is shutting down (set by the server).
      lab: whether the lab's routes are there, and traces are kept.
      pump: to be run by the server, beside the connections.
      live: running and waiting exchanges by request id, with the API key they were made with.
    """

    def __init__(self, config: Config, backend: Backend, script_backend: Backend) -> None:
        self.config = config
        self.backend = backend
        self.ready = False
        self.closing = False
        self.live: dict[str, tuple[Exchange, int | None]] = {}
        self._names: set[str] = set()  # the ids of all requests from head to end, those that are still sending their body included
        self._script_backend = script_backend
        self._access = Access(config.api_key, config.cors_origin, secure=config.certfile is not None)
        self.admission = Admission(config.slots or backend.slots, config.queue, config.queue_timeout)
        self.events_admission = Admission(config.events_slots, config.queue, config.queue_timeout)
        self._metrics = Metrics((self.admission, self.events_admission), backend)
        self.lab = config.lab if config.lab is not None else config.uds is None and is_loopback(config.host)
        self.pump = Pump()
        self._traces = TraceStore()
        self._routes = self._table()

    def _table(self) -> dict[str, _Route]:
        table = [
            _Route("/healthz", {"GET": self._healthz}, open=True),
            _Route("/readyz", {"GET": self._readyz}, open=True),
            _Route("/metrics", {"GET": self._metrics_page}),
            _Route("/generate", {"POST": self._model(native.parse_generate, GENERATE_BODY)}),
            _Route("/v1/chat/completions", {"POST": self._model(openai.parse_chat, self.config.max_body)}),
            _Route("/v1/completions", {"POST": self._model(openai.parse_completion, self.config.max_body)}),
            _Route("/v1/models", {"GET": self._models}),
            _Route("/v1/models/{id}", {"GET": self._one_model}),
            _Route("/requests/{id}", {"DELETE": self._cancel}),
            _Route("/events", {"GET": self._events}, lab=True),
            _Route("/traces", {"GET": self._trace_list}, lab=True),
            _Route("/traces/{id}", {"GET": self._one_trace}, lab=True),
        ]
        return {route.template: route for route in table}

    def loaded(self) -> None:
        """The backend is warm. How many slots it can bear, it may only know now."""
        self.admission.slots = self.config.slots or self.backend.slots
        self.ready = True

    # ---- One request ----

    async def answer(self, connection: Http11Connection, request: Request) -> Exchange | None:
        """Answers ``request``, or returns the exchange that is to be run for its answer: one response, one record.

        Raises ConnectionLost and PeerStalled where the peer goes while a small answer is sent.
        """
        if self.closing:
            connection.end_after_this()
        name = request_id(request.get(b"x-request-id"), self._names)
        self._names.add(name)
        origin = request.get(b"origin")
        record = Record(name, "-", request.method, marks=self.lab)
        headers = [(b"X-Request-Id", name.encode("ascii")), *self._access.cors(origin)]
        call = Call(connection, request, record, headers)
        try:
            route = self._find(request, record)
            if origin is not None:
                self._access.check_origin(origin, connection.transport.local)
            if request.method == "OPTIONS":
                await self._options(call, route)
                return None
            if not route.open:
                call.owner = self._access.owner(request.get_all(b"authorization"))
            return await route.handler(request.method)(call)
        except HttpError as error:
            await self.refuse(call, error)
        except ConnectionLost as lost:
            record.reach(Outcome.CLIENT_DISCONNECTED, lost.witness)
            raise
        except PeerStalled:
            record.reach(Outcome.CLIENT_STALLED, "write_timeout")
            raise
        except Exception:
            log.exception("request %s failed", name)
            if record.t_ended is not None:
                raise
            await self.refuse(call, InternalError())
        finally:
            if record.t_ended is None and name not in self.live:
                record.reach(Outcome.SHUTDOWN, "cancelled_from_outside")
                self._close(record)
        return None

    async def refuse(self, call: Call, error: HttpError) -> None:
        """Answers with ``error``. The connection lives on if the request had been read to its end."""
        call.record.status = error.status
        call.record.code = error.code
        call.record.reach(Outcome.REJECTED if error.status < 500 or error.status == 503 else Outcome.BACKEND_ERROR, error.code)
        self._close(call.record)
        if call.connection.take_no_body():
            await call.connection.respond(error.status, [*call.headers, *error.headers, *JSON_HEADERS], error.body())
        else:
            await call.connection.refuse(error, call.headers)

    async def malformed(self, connection: Http11Connection, error: HttpError) -> None:
        """Answers what could not even be read as a request."""
        record = Record(request_id(None, self._names), "-", "-")
        headers = [(b"X-Request-Id", record.request_id.encode("ascii"))]
        record.status, record.code = error.status, error.code
        record.reach(Outcome.REJECTED, error.code)
        self._close(record)
        await connection.refuse(error, headers)

    def _close(self, record: Record) -> None:
        record.close()
        self.finished(record)

    def finished(self, record: Record) -> None:
        """Where every closed record goes."""
        self._names.discard(record.request_id)
        exchange = self.live.pop(record.request_id, None)
        self._metrics.finished(record)
        logs.log_request(record)
        if self.lab and exchange is not None:
            self._traces.add(record)  # also one that was refused a slot, or left while it waited for one

    def _find(self, request: Request, record: Record) -> _Route:
        route = self._routes.get(request.path)
        if route is None and request.path.count("/") >= 2:
            prefix, _, last = request.path.rpartition("/")
            route = self._routes.get(prefix + "/{id}") if last else None
        if route is None or "{" in request.path:
            raise NotFound("There is nothing at this path.")
        if route.lab and (not self.lab or any(request.get(name) is not None for name in _FORWARDED)):
            raise NotFound("There is nothing at this path.")
        record.route = route.template
        return route

    # ---- Small answers ----

    async def _document(self, call: Call, body: bytes, status: int = 200, headers: Headers = JSON_HEADERS) -> None:
        await call.connection.read_body(self.config.max_body)  # nothing, as a rule; ignored where there is one
        call.record.status = status
        await call.connection.respond(status, [*call.headers, *headers], body)
        call.record.reach(Outcome.COMPLETED, "last_byte")
        self._close(call.record)

    async def _options(self, call: Call, route: _Route) -> None:
        headers: Headers = [(b"Allow", route.allow.encode("ascii"))]
        asked = call.request.get(b"access-control-request-headers")
        if call.request.get(b"access-control-request-method") is not None:
            headers += [
                (b"Access-Control-Allow-Methods", route.allow.encode("ascii")),
                (b"Access-Control-Allow-Headers", asked or b"Authorization, Content-Type"),
                (b"Access-Control-Max-Age", b"600"),
            ]
        await self._document(call, b"", 204, headers)

    async def _healthz(self, call: Call) -> None:
        await self._document(call, b'{"status":"ok"}')

    async def _readyz(self, call: Call) -> None:
        self._check_ready()
        if self.backend.step_age() > self.config.step_timeout:
            raise NotReady("A model step has been running for too long.", code="step_stuck")
        if self.admission.stuck:
            raise NotReady("Every slot is held by work that has outlived its grace.", code="slots_lost")
        await self._document(call, b'{"status":"ready"}')

    def _check_ready(self) -> None:
        if self.closing:
            raise NotReady("The server is shutting down.", code="shutting_down")
        if not self.ready:
            raise NotReady("The model is still loading.", retry_after=5)

    async def _metrics_page(self, call: Call) -> None:
        await self._document(call, self._metrics.page(), headers=[(b"Content-Type", CONTENT_TYPE)])

    async def _models(self, call: Call) -> None:
        await self._document(call, openai.models_document(self.backend.name, 0))

    async def _one_model(self, call: Call) -> None:
        await self._document(call, openai.model_document(_last(call.request), self.backend.name, 0))

    async def _cancel(self, call: Call) -> None:
        exchange, owner = self.live.get(_last(call.request), (None, None))
        if exchange is None or owner != call.owner:
            raise NotFound("No request with this id is running or waiting.", code="request_not_found")
        exchange.stop(Outcome.CANCELLED, "delete")
        await self._document(call, b'{"status":"cancelled"}', 202)

    async def _trace_list(self, call: Call) -> None:
        await self._document(call, json_text({"traces": self._traces.summaries()}).encode())

    async def _one_trace(self, call: Call) -> None:
        trace = self._traces.get(_last(call.request))
        if trace is None:
            raise NotFound("No finished request with this id is remembered.", code="trace_not_found")
        await self._document(call, json_text(trace).encode())

    # ---- Exchanges ----

    def _model(self, parse: Callable[[bytes, AnswerContext], Parsed], limit: int) -> Handler:
        async def handle(call: Call) -> Exchange:
            self._check_ready()
            body = await self._body(call, limit)
            call.record.mark("request", len(body))
            context = AnswerContext(model=self.backend.name, request_id=call.record.request_id, created=int(time.time()))
            if len(body) < _PARSE_IN_THREAD:
                parsed = parse(body, context)
            else:
                parsed = await trio.to_thread.run_sync(parse, body, context)
            return self._exchange(call, parsed, self.backend, self.admission)

        return handle

    async def _body(self, call: Call, limit: int) -> bytes:
        connection, request = call.connection, call.request
        if (request.get(b"content-type") or b"").lower().startswith(b"multipart/"):
            raise UnsupportedMedia("A JSON body is expected, not multipart.", param="Content-Type")
        connection.check_length(limit)
        if connection.waits_for_continue:
            self.admission.check()  # a 429 that spares the client its upload
        return await connection.read_body(limit)

    async def _events(self, call: Call) -> Exchange | None:
        if self.closing:
            raise NotReady("The server is shutting down.", code="shutting_down")
        script = native.events_script(call.request.query)
        self._check_drain(script)
        if call.request.get(b"last-event-id") == native.last_event_id(script).encode():
            await self._document(call, b"", 204, [])
        elif call.request.method == "HEAD":
            await self._stream_head(call)
        else:
            body = await call.connection.read_body(self.config.max_body)
            call.record.mark("request", len(body))
            return self._exchange(call, native.parse_events(script), self._script_backend, self.events_admission)
        return None

    async def _stream_head(self, call: Call) -> None:
        """What GET would begin with. Starts no work."""
        await call.connection.read_body(self.config.max_body)
        call.record.status = 200
        await call.connection.send(call.connection.head(200, [*call.headers, *STREAM_HEADERS]) + call.connection.end())
        call.record.reach(Outcome.COMPLETED, "last_byte")
        self._close(call.record)

    def _check_drain(self, script: Script) -> None:
        if script.must_drain and script.duration > self.config.cancel_grace:
            seconds = f"{self.config.cancel_grace:g}"
            raise BadRequest(f"must_drain work may not last longer than --cancel-grace, {seconds} s.", param="cancellation")

    def _exchange(self, call: Call, parsed: Parsed, backend: Backend, admission: Admission) -> Exchange:
        record = call.record
        exchange = Exchange(call.connection, parsed, backend, admission, record, self.config, call.headers, self.finished, self.pump)
        self.live[record.request_id] = (exchange, call.owner)
        return exchange


def _last(request: Request) -> str:
    return request.path.rpartition("/")[2]
