"""``/healthz`` of a real server in a process of its own, while every slot of its model generates."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from engine_figures import STREAMS, prompts, spread

__all__ = ["healthz"]

ROOT = Path(__file__).resolve().parents[2]
START = 240.0  # seconds that the model may take to load


def healthz(threads: int, seconds: float) -> dict[str, float]:
    """Asks for ``/healthz`` a hundred times a second, on one connection, for ``seconds`` during which 16 streams run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        options = ["--port", "0", "--slots", str(max(STREAMS)), "--threads", str(threads)]
        with path.open("w") as log:
            server = subprocess.Popen(
                [sys.executable, "-m", "trio_sse", "serve", *options],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        try:
            return _asked(_port(server, path), seconds)
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def _port(server: subprocess.Popen[bytes], log: Path) -> int:
    """The port of a server that is ready."""
    until = time.monotonic() + START
    while time.monotonic() < until and server.poll() is None:
        _, found, rest = log.read_text().partition("http://127.0.0.1:")
        if found and _status(int("".join(c for c in rest[:6] if c.isdigit())), "/readyz") == 200:
            return int("".join(c for c in rest[:6] if c.isdigit()))
        time.sleep(0.2)
    raise SystemExit("the server did not become ready:\n" + log.read_text()[-2000:])


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _asked(port: int, seconds: float) -> dict[str, float]:
    stop = threading.Event()
    streams = [threading.Thread(target=_stream, args=(port, prompt, stop), daemon=True) for prompt in prompts(max(STREAMS))]
    for stream in streams:
        stream.start()
    time.sleep(2)  # until all of them decode
    taken = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begin = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        taken.append(time.perf_counter() - begin)
        time.sleep(0.01)
    stop.set()
    for stream in streams:
        stream.join(30)
    return spread("healthz_full", taken) | {"healthz_asked": float(len(taken))}


def _stream(port: int, prompt: str, stop: threading.Event) -> None:
    """One answer after the other until told to stop; then its connection is closed in the midst of one."""
    while not stop.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps({"prompt": prompt, "max_new_tokens": 256})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status not in (200, 429):
            raise RuntimeError(f"a stream was answered {response.status}")
        while not stop.is_set() and response.read1(4096):
            pass
        connection.close()
