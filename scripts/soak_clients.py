"""The soak's clients: good, slow, stalled, aborting and hostile ones, over real sockets.

A *plan* says what one request will do; :func:`play` does it on a connection of its own (good clients reuse theirs). Each returns what
came of it, in one word. A good or slow client that does not get a whole answer, or a refusal it may expect, raises :exc:`Broken`.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass

import h11
import trio

__all__ = ["Broken", "Crowd"]

Address = tuple[str, int]
PATIENCE = 120.0  # seconds for one whole answer
EXPECTED = (200, 429, 503)


class Broken(RuntimeError):
    """A client that did everything right did not get what it is owed."""


@dataclass(frozen=True)
class Asked:
    """A request's bytes, and how its answer ends where it is a stream."""

    raw: bytes
    end: bytes = b""


def post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def get(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: soak\r\n\r\n".encode()


class Crowd:
    """Makes requests until told to stop.

    Args:
      address: the server.
      tokens: most tokens that a request asks for.
      lab: whether ``/events`` may be asked for.
      seed: of everything random.

    Attributes:
      results: how often each kind of client met each result.
      requests: how many were begun; aborted: how many of these the client gave up.
    """

    def __init__(self, address: Address, *, tokens: int, lab: bool, seed: int) -> None:
        self.results: Counter[str] = Counter()
        self.requests = 0
        self.aborted = 0
        self._address = address
        self._tokens = tokens
        self._lab = lab
        self._rng = random.Random(seed)  # noqa: S311  (no secret)

    async def work(self, limit: int) -> None:
        """One after the other, until ``limit`` requests have been begun by all together."""
        while self.requests < limit:
            rng = self._rng
            kind = rng.choices(["abort", "good", "slow", "stall", "hostile"], [62, 28, 4, 1 if self._lab else 0, 5])[0]
            self.requests += 1
            try:
                result = await getattr(self, f"_{kind}")()
            except (OSError, trio.BrokenResourceError) as error:
                if kind in ("good", "slow"):
                    raise Broken(f"{kind}: {error!r}") from error
                result = "reset by the server"
            self.results[f"{kind}: {result}"] += 1

    # What is asked

    def _ask(self) -> Asked:
        rng = self._rng
        tokens = rng.randint(1, self._tokens)
        prompt = " ".join(rng.choice(["once", "upon", "a", "time", "there", "was"]) for _ in range(rng.randint(1, 12)))
        kind = rng.choice(["generate", "generate", "chat", "chat", "document", "events" if self._lab else "generate", "health"])
        if kind == "generate":
            return Asked(post("/generate", {"prompt": prompt, "max_new_tokens": tokens}), b"data: [DONE]\n\n")
        if kind == "events":
            drain = rng.choice(["cancellable", "must_drain"])
            return Asked(get(f"/events?events={tokens}&interval_ms=3&tool_every=5&cancellation={drain}"), b"event: done")
        if kind == "health":
            return Asked(get(rng.choice(["/healthz", "/readyz", "/v1/models", "/metrics"])))
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": kind == "chat"}
        return Asked(post("/v1/chat/completions", body), b"data: [DONE]\n\n" if kind == "chat" else b"")

    async def _connect(self, receive_buffer: int | None = None) -> trio.SocketStream:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await sock.connect(self._address)
        except BaseException:
            sock.close()
            raise
        return trio.SocketStream(sock)

    # Who asks

    async def _good(self) -> str:
        """One or two requests on one connection, each answer read to its end."""
        statuses: set[int] = set()
        async with await self._connect() as stream:
            connection = h11.Connection(h11.CLIENT)
            for number in range(self._rng.randint(1, 2)):
                self.requests += number  # the first one is counted already
                asked = self._ask()
                await stream.send_all(asked.raw)
                statuses.add(await self._answer(stream, connection, asked))
                if connection.their_state is not h11.DONE:
                    break
                connection.start_next_cycle()
        return " ".join(map(str, sorted(statuses)))

    async def _slow(self) -> str:
        async with await self._connect(receive_buffer=2048) as stream:
            asked = self._ask()
            await stream.send_all(asked.raw)
            return str(await self._answer(stream, h11.Connection(h11.CLIENT), asked, step=200, pause=0.004))

    async def _answer(
        self, stream: trio.SocketStream, connection: h11.Connection, asked: Asked, *, step: int = 65536, pause: float = 0.0
    ) -> int:
        method = asked.raw.split(b" ", 1)[0]
        connection.send(h11.Request(method=method, target="/", headers=[("Host", "soak")]))
        connection.send(h11.EndOfMessage())
        status, body = 0, b""
        with trio.fail_after(PATIENCE):
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await stream.receive_some(step))
                    if pause:
                        await trio.sleep(pause)
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:
                    raise Broken(f"the connection ended in {body[-80:]!r}")
        if status not in EXPECTED:
            raise Broken(f"status {status}: {body[:200]!r}")
        if status == 200 and asked.end not in body[-120:]:
            raise Broken(f"an answer without its end: {body[-120:]!r}")
        return status

    async def _abort(self) -> str:
        """Leaves at a random moment: in the middle of its request, before the first byte, in mid-stream, at about the end."""
        rng = self._rng
        self.aborted += 1
        stream = await self._connect()
        asked = self._ask()
        when = rng.random()
        try:
            if when < 0.2:
                await stream.send_all(asked.raw[: rng.randrange(len(asked.raw))])
                result = "in the request"
            else:
                await stream.send_all(asked.raw)
                with trio.move_on_after(rng.choice([0, 0.002, 0.02, 0.1, 0.3]) * rng.random() * 2):
                    while await stream.receive_some(4096):
                        pass
                result = "in the answer"
            if rng.random() < 0.5:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                result += ", reset"
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await stream.aclose()
        return result

    async def _stall(self) -> str:
        """Asks for a lot and does not read; the server has to let go of it."""
        async with await self._connect(receive_buffer=2048) as stream:
            await stream.send_all(get("/events?events=3000&size=4096"))
            await trio.sleep(4)
            with trio.move_on_after(30):
                while await stream.receive_some(65536):
                    pass
                return "ended"
        raise Broken("a stalled client was kept")

    async def _hostile(self) -> str:
        rng = self._rng
        said = rng.choice(
            [
                rng.randbytes(rng.randint(1, 200)),
                b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 4000,
                b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n{",
                b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                post("/generate", {"prompt": "x", "max_new_tokens": "many"}) + get("/healthz"),
                get("/healthz") * 20,
                b"GET /healthz HTTP/1.1\r\nHost: a\r\n",
            ]
        )
        async with await self._connect() as stream:
            await stream.send_all(said)
            if rng.random() < 0.5:
                await stream.send_eof()
            with trio.move_on_after(rng.random()):
                while await stream.receive_some(4096):
                    pass
        return "done"
