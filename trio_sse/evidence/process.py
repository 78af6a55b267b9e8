"""The server under measurement: a process of its own on a free loopback port, and what the operating system says about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from trio_sse.evidence.client import ask

__all__ = ["Server", "ServerFailed"]

_URL = re.compile(r"http://([0-9.]+):([0-9]+)")
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
READY = 300.0  # seconds; loading a model on a busy machine is slow
STOP = 30.0


class ServerFailed(RuntimeError):
    """The server did not start, or did not stop. The message ends in what it printed last."""


class Server:
    """``python -m trio_sse serve`` with ``options``, for the length of a ``with`` block.

    Resource handling: the process is ended by SIGTERM at the end of the block, and killed if it does not obey within 30 s.
    """

    def __init__(self, options: tuple[str, ...]) -> None:
        self._options = options
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)
        self._process: subprocess.Popen[str] | None = None
        self.address = ("", 0)

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "trio_sse", "serve", "--host", "127.0.0.1", "--port", "0", *self._options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIO_SSE_")}
        environment |= {"PYTHONPATH": str(_PACKAGE_ROOT), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, text=True, env=environment
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + READY
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                raise ServerFailed(f"the server ended while it started:\n{self.printed()}")
            match = _URL.search(self.printed())
            if match:
                self.address = (match[1], int(match[2]))
                try:
                    if ask(self.address, "GET", "/readyz")[0] == 200:
                        return
                except OSError:
                    pass  # printed before it listens; asked again below
            time.sleep(0.05)
        raise ServerFailed(f"the server was not ready within {READY} s:\n{self.printed()}")

    def printed(self) -> str:
        """Everything the server has printed so far."""
        # Opened anew: the server writes at the offset that it shares with our own handle.
        return Path(self._log.name).read_text()

    # What the operating system says. None where it does not.

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self._process.pid if self._process else 0}/{name}")

    def memory(self) -> tuple[int | None, int | None]:
        """Resident memory now and at its highest since :meth:`forget_peak`, in bytes."""
        try:
            lines = self._proc("status").read_text().splitlines()
        except OSError:
            return None, None
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
        return values.get("VmRSS"), values.get("VmHWM")

    def forget_peak(self) -> None:
        """Lets the highest resident memory count from now on."""
        try:
            self._proc("clear_refs").write_text("5")
        except OSError:
            pass  # not Linux: memory() says None there

    def cpu_ns(self) -> int | None:
        """Processor time of the main thread so far, in nanoseconds."""
        try:
            return int(self._proc("schedstat").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return None
