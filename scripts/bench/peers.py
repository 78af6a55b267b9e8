"""The other servers of the benchmark: ``python peers.py SERVER PORT``. Each serves workload.py's modes as its own manual shows.

- uvicorn: Starlette's StreamingResponse on uvicorn with uvloop and httptools
- sse-starlette: the same with sse-starlette's EventSourceResponse
- uvicorn-h11: the first on uvicorn's h11
- hypercorn-trio: the first on hypercorn's trio worker
- aiohttp: aiohttp's StreamResponse on uvloop
- granian: the first on granian
- raw: a uvloop protocol that frames and writes each event, and does nothing else: the limit, not a server
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import sniffio
from workload import DONE, DRAIN_EVENTS, HEALTH, INTERVALS, Ticks, frame, json_text, text

SERVERS = ("uvicorn", "sse-starlette", "uvicorn-h11", "hypercorn-trio", "aiohttp", "granian", "raw")


class Engine:
    """As backend.py's, for asyncio: one timer feeds a queue per stream."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._phases: list[dict[Any, None]] = [{} for _ in range(INTERVALS[mode][1])]
        self._number = 0
        self._ticks: Ticks | None = None
        self.streams = 0

    def _tick(self) -> None:
        if self._ticks is not None:
            for phase, label in self._ticks.due():
                for queue in list(self._phases[phase]):
                    queue.put_nowait(label)

    def _begin(self, ticks: Ticks) -> None:
        import asyncio

        asyncio.get_running_loop().add_reader(ticks.fd, self._tick)

    def _end(self, ticks: Ticks) -> None:
        import asyncio

        asyncio.get_running_loop().remove_reader(ticks.fd)

    def _queue(self) -> Any:
        import asyncio

        return asyncio.Queue()

    @contextlib.contextmanager
    def entered(self) -> Iterator[Any]:
        """The queue of one more stream."""
        if self._ticks is None:
            self._ticks = Ticks(self._mode)
            self._begin(self._ticks)
        self._number += 1
        self.streams += 1
        phase, queue = self._phases[self._number % len(self._phases)], self._queue()
        phase[queue] = None
        try:
            yield queue
        finally:
            del phase[queue]
            self.streams -= 1
            if not self.streams:
                ticks, self._ticks = self._ticks, None
                self._end(ticks)
                ticks.close()


class TrioEngine(Engine):
    """The same under trio, whose channels stand in for the queues."""

    def _begin(self, ticks: Ticks) -> None:
        import trio

        trio.lowlevel.spawn_system_task(self._run, ticks)

    async def _run(self, ticks: Ticks) -> None:
        import trio

        while self._ticks is ticks:
            try:
                await trio.lowlevel.wait_readable(ticks.fd)
            except trio.ClosedResourceError:
                return
            self._tick()

    def _end(self, ticks: Ticks) -> None:
        import trio

        trio.lowlevel.notify_closing(ticks.fd)

    def _queue(self) -> Any:
        import trio

        return _TrioQueue(*trio.open_memory_channel[str](math.inf))


class _TrioQueue:
    def __init__(self, send: Any, receive: Any) -> None:
        self.put_nowait = send.send_nowait
        self.get = receive.receive


_engines: dict[str, Engine] = {}


async def texts(mode: str) -> AsyncIterator[str]:  # noqa: ASYNC900  (frameworks stream from generators)
    """The events' texts of one answer."""
    if mode in INTERVALS:
        if mode not in _engines:
            kind = TrioEngine if sniffio.current_async_library() == "trio" else Engine
            _engines[mode] = kind(mode)
        with _engines[mode].entered() as queue:
            while True:
                yield await queue.get()  # noqa: ASYNC119  (closed by its framework)
    if mode == "idle":
        yield text(0)
        await _pause(3600)
    for number in range(DRAIN_EVENTS):
        if mode == "yield":
            await _pause(0)
        yield text(number)


async def _pause(seconds: float) -> None:
    if sniffio.current_async_library() == "trio":
        import trio

        await trio.sleep(seconds)
    else:
        import asyncio

        await asyncio.sleep(seconds)


async def frames(mode: str) -> AsyncIterator[bytes]:  # noqa: ASYNC900
    async for each in texts(mode):
        yield frame(each)
    yield DONE


def asgi_app(server: str) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def generate(request: Request) -> Response:
        mode = json.loads(await request.body())["prompt"]
        if server == "sse-starlette":
            from sse_starlette import EventSourceResponse

            return EventSourceResponse(_events(mode), sep="\n")
        return StreamingResponse(frames(mode), media_type="text/event-stream")

    async def health(_: Request) -> Response:  # noqa: ASYNC124
        return Response(HEALTH, media_type="application/json")

    return Starlette(routes=[Route("/generate", generate, methods=["POST"]), Route("/healthz", health)])


async def _events(mode: str) -> AsyncIterator[dict[str, str]]:  # noqa: ASYNC900
    async for each in texts(mode):
        yield {"data": f'{{"token":{json_text(each)}}}'}
    yield {"data": "[DONE]"}


def serve_uvicorn(server: str, port: int) -> None:
    import uvicorn

    http = "h11" if server == "uvicorn-h11" else "httptools"
    uvicorn.run(asgi_app(server), port=port, http=http, loop="uvloop", log_level="error", access_log=False)


def serve_hypercorn(server: str, port: int) -> None:
    import trio
    from hypercorn.config import Config
    from hypercorn.trio import serve

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.loglevel = "ERROR"
    trio.run(serve, asgi_app(server), config)


def serve_granian(port: int) -> None:
    from granian import Granian
    from granian.constants import Interfaces, Loops

    Granian(
        "peers:granian_app", port=port, interface=Interfaces.ASGI, workers=1, loop=Loops.uvloop, log_enabled=False, factory=True
    ).serve()


def granian_app() -> Any:
    return asgi_app("granian")


def serve_aiohttp(port: int) -> None:
    import uvloop
    from aiohttp import web

    async def generate(request: web.Request) -> web.StreamResponse:
        mode = json.loads(await request.read())["prompt"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for each in frames(mode):
            await response.write(each)
        await response.write_eof()
        return response

    async def health(_: web.Request) -> web.Response:  # noqa: ASYNC124
        return web.Response(body=HEALTH, content_type="application/json")

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.get("/healthz", health)])
    uvloop.install()
    # Without handler_cancellation a handler that waits for an event would outlive its client.
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, handler_cancellation=True)


def serve_raw(port: int) -> None:
    import asyncio

    import uvloop

    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(data), data)

    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    health = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(HEALTH), HEALTH)

    class Protocol(asyncio.Protocol):
        task: asyncio.Task[None] | None = None

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def connection_lost(self, _: Exception | None) -> None:
            if self.task is not None:
                self.task.cancel()

        def data_received(self, data: bytes) -> None:
            if data.startswith(b"GET"):
                self.transport.write(health)
                return
            mode = json.loads(data.partition(b"\r\n\r\n")[2])["prompt"]
            self.transport.write(head)
            if mode == "drain":
                for number in range(DRAIN_EVENTS):
                    self.transport.write(chunk(frame(text(number))))
                self.transport.write(chunk(DONE) + b"0\r\n\r\n")
            else:
                self.task = asyncio.create_task(self.stream(mode))

        async def stream(self, mode: str) -> None:
            async for each in frames(mode):
                self.transport.write(chunk(each))
            self.transport.write(b"0\r\n\r\n")

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", port, backlog=2048)
        await server.serve_forever()

    uvloop.run(main())


def main(server: str, port: int) -> None:
    if server in ("uvicorn", "uvicorn-h11", "sse-starlette"):
        serve_uvicorn(server, port)
    elif server == "hypercorn-trio":
        serve_hypercorn(server, port)
    elif server == "aiohttp":
        serve_aiohttp(port)
    elif server == "granian":
        serve_granian(port)
    else:
        serve_raw(port)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
