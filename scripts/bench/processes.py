"""The processes of the transport benchmark: a server on one core, the compiled client on another, and what both have used."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

__all__ = ["OURS", "Client", "Failed", "Server"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
OURS = "trio_sse"
READY = 60.0  # seconds
SETTLE = 60.0


class Failed(RuntimeError):
    """A process did not do what it is there for. The message says which, and what it printed."""


class Server:
    """One server, pinned to a core, for the length of a ``with`` block.

    Args:
      profile: where trio_sse is to write its profile; see :meth:`profiled`.
      of: ``TIME`` or ``MEMORY``.

    Resource handling: the process and all that it has started end with the block.
    """

    def __init__(self, name: str, core: int, profile: Path | None = None, of: str = "TIME") -> None:
        self.name = name
        self.port = _free_port()
        self._profile = profile
        self._of = of
        self._core = core

    def __enter__(self) -> Self:
        if self.name == OURS:
            options = ["--backend", "backend:Bench", "--slots", "5000", "--max-connections", "5000", "--log-level", "warning"]
            command = [sys.executable, "-m", "trio_sse", "serve", "--port", str(self.port), *options]
        else:
            command = [str(PEERS_PYTHON), "peers.py", self.name, str(self.port)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIO_SSE_")}
        environment["PYTHONPATH"] = f"{HERE}{os.pathsep}{ROOT}"
        if self._profile is not None:
            environment[f"BENCH_{self._of}"] = str(self._profile)
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            ["taskset", "-c", str(self._core), *command],
            cwd=HERE, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + READY
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                probe.sendall(request("health"))
                if b" 200 " in probe.recv(4096):
                    return
            time.sleep(0.1)
        self._log.seek(0)
        raise Failed(f"{self.name} did not start:\n{self._log.read()[-3000:]}")

    def _tree(self) -> list[Path]:
        """The threads of the process and of its descendants: some servers put a worker below a watcher."""
        pids = [self._process.pid]
        threads: list[Path] = []
        for pid in pids:
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                threads.append(thread)
                with contextlib.suppress(OSError):
                    pids += map(int, (thread / "children").read_text().split())
        return threads

    def cpu(self) -> tuple[float, float]:
        """Seconds on the core so far; and seconds for which the busiest thread has waited for the core while others were on it."""
        threads: list[tuple[int, int]] = []
        for thread in self._tree():
            with contextlib.suppress(OSError):
                fields = (thread / "schedstat").read_text().split()
                threads.append((int(fields[0]), int(fields[1])))
        return sum(used for used, _ in threads) / 1e9, max(threads)[1] / 1e9

    def profiled(self) -> dict[str, int]:
        """What the server was doing since the last call: function → samples; or what it holds: module → bytes. See sampler.py."""
        if self._profile is None:
            raise Failed(f"{self.name} does not keep a profile")
        self._profile.unlink(missing_ok=True)
        os.kill(self._process.pid, signal.SIGUSR1)
        until = time.monotonic() + READY
        while time.monotonic() < until and not self._profile.exists():
            time.sleep(0.01)
        samples: dict[str, int] = json.loads(self._profile.read_text())
        return samples

    def settle(self) -> None:
        """Returns once the server has nothing to do: what it still owes to the clients of the last case must not count for the next."""
        until = time.monotonic() + SETTLE
        before = sum(self.cpu())
        while time.monotonic() < until:
            time.sleep(0.1)
            now = sum(self.cpu())
            if now - before < 0.005:
                return
            before = now
        raise Failed(f"{self.name} is still busy {SETTLE:g} s after its clients have gone")

    def memory(self) -> int:
        """Resident bytes."""
        total = 0
        for pid in {thread.parents[1] for thread in self._tree()}:
            with contextlib.suppress(OSError):
                total += int((pid / "statm").read_text().split()[1])
        return total * os.sysconf("SC_PAGE_SIZE")


class Client:
    """The compiled client; see load.c. It is built into ``folder``."""

    def __init__(self, folder: Path, core: int) -> None:
        self._folder = folder
        self._core = core
        self._program = folder / "load"
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", str(self._program), str(HERE / "load.c")], check=True)

    @contextlib.contextmanager
    def running(self, server: Server, mode: str, load: str, connections: int, seconds: float, events: int) -> Iterator[Measuring]:
        """The client at work: warm when the block begins, ended when it ends."""
        path = self._folder / mode
        path.write_bytes(request(mode))
        command = [
            "taskset", "-c", str(self._core), str(self._program), "127.0.0.1", str(server.port), load, str(connections),
            str(round(seconds * 1000)), str(path), str(events),
        ]  # fmt: skip
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
                try:
                    if process.stdout is None or process.stdout.readline() != "begin\n":
                        errors.seek(0)
                        raise Failed(f"{server.name}, {mode}, {connections} connections: {errors.read()}")
                    yield Measuring(process, errors, f"{server.name}, {mode}, {connections} connections")
                finally:
                    process.kill()


class Measuring:
    """A client that is in its window."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str], what: str) -> None:
        self._process = process
        self._errors = errors
        self._what = what

    def result(self) -> dict[str, float]:
        """What it has counted, when its window is over. Its streams are still there."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            self._errors.seek(0)
            raise Failed(f"{self._what}: the client ended in its window: {self._errors.read()}")
        counted: dict[str, float] = json.loads(line)
        return counted


def request(mode: str) -> bytes:
    """The bytes that make a server do ``mode``; the same for all of them."""
    if mode == "health":
        return b"GET /healthz HTTP/1.1\r\nHost: bench\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n"
    body = json.dumps({"prompt": mode, "max_new_tokens": 256}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
