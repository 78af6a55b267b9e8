"""Real servers: in a process of their own, or on real sockets inside the test."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import trio

from tests.support.stage import Stage
from trio_sse.evidence.process import Server
from trio_sse.trace import Outcome

__all__ = ["LiveStage", "ServerProcess", "has_ipv6", "live", "read_until", "tcp"]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds in which whatever must happen has happened, on a busy machine too


class ServerProcess(Server):
    """``python -m trio_sse serve`` with any options, seen from outside: its lines, its end, its descriptors.

    Args:
      options: of ``serve``; ``--backend scripted`` and a free port unless they say otherwise.
      environment: added to the process's.
      prefix: a command to run it under.
      ready: wait for this in what it prints; None does not wait.
    """

    def __init__(
        self,
        *options: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        ready: str | None = "trio_sse: ready",
    ) -> None:
        super().__init__(options)
        self._environment = dict(environment or {})
        self._prefix = list(prefix)
        self._pass_fds = pass_fds
        self._ready = ready

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "trio_sse", "serve", "--port", "0"]
        if "--backend" not in self._options:
            command += ["--backend", "scripted"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRIO_SSE_", "LISTEN_"))}
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "error", **self._environment}
        self._process = subprocess.Popen(
            [*self._prefix, *command, *self._options],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, text=True, env=environment, pass_fds=self._pass_fds,
        )  # fmt: skip
        if self._ready is not None:
            try:
                self.wait_printed(self._ready)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()  # a test that cares how it ends has ended it
            self.process.wait()
        super().__exit__(kind, error, trace)

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        """The server's own, also under a prefix that forks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split() if self._prefix else []
        return int(children[0]) if children else self.process.pid

    def wait_printed(self, mark: str) -> str:
        until = time.monotonic() + PATIENCE
        while mark not in self.printed():
            assert self.process.poll() is None, f"ended ({self.process.poll()}) before {mark!r}:\n{self.printed()}"
            assert time.monotonic() < until, f"no {mark!r} in:\n{self.printed()}"
            time.sleep(0.02)
        match = re.search(r"https?://(?:\[(?P<six>[0-9a-f:]+)\]|(?P<four>[0-9.]+)):(?P<port>\d+)", self.printed())
        if match:
            self.address = (match["six"] or match["four"], int(match["port"]))
        return self.printed()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def tcp(address: tuple[str, int], *, receive_buffer: int | None = None, timeout: float = PATIENCE) -> socket.socket:
    """A connected blocking socket."""
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(timeout)
    try:
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def read_until(sock: socket.socket, mark: bytes | None = None) -> bytes:
    """Everything up to ``mark``, or to the end."""
    data = b""
    while mark is None or mark not in data:
        part = sock.recv(65536)
        if not part:
            assert mark is None, f"ended before {mark!r}: {data!r}"
            return data
        data += part
    return data


class LiveStage(Stage):
    """:class:`Stage` with real listeners, on the real clock. ``address`` is where it listens."""

    address: tuple[str, int]
    streams: list[trio.SocketStream]

    async def listen(self) -> None:
        urls = await self.nursery.start(partial(self.server.run, signals=False))
        host, _, port = urls[0].partition("://")[2].rpartition(":")
        self.address = (host.strip("[]"), int(port))

    async def open(self, data: bytes = b"", *, receive_buffer: int | None = None) -> trio.SocketStream:
        sock = tcp(self.address, receive_buffer=receive_buffer)
        sock.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self.streams.append(stream)
        if data:
            await stream.send_all(data)
        return stream

    async def wait_until(self, true: Callable[[], bool]) -> None:
        with trio.fail_after(PATIENCE):
            while not true():  # noqa: ASYNC110  (the server has no event for the convenience of tests)
                await trio.sleep(0.005)

    async def wait_outcomes(self, count: int) -> list[Outcome | None]:
        """Waits until ``count`` requests have been closed."""
        await self.wait_until(lambda: len(self.records) >= count)
        return self.outcomes

    async def wait_connections(self, count: int = 0) -> None:
        await self.wait_until(lambda: len(self.server._connections) == count)


@asynccontextmanager
async def live(**options: object) -> AsyncIterator[LiveStage]:
    """A :class:`LiveStage` on a free loopback port for the length of the block."""
    async with trio.open_nursery() as nursery:
        stage = LiveStage(nursery, **{"port": 0, **options})  # type: ignore[arg-type]
        stage.streams = []
        await stage.listen()
        try:
            yield stage
        finally:
            for stream in stage.streams:
                stream.socket.close()
        nursery.cancel_scope.cancel(reason="the test is over")
