"""Real clients against the real server: environments, servers, and one run of each client.

A client is a program of its own (``drivers/``, ``node/``) that plays every scenario against the servers here and prints what it saw.
It runs once per session; the tests then look at single scenarios, and at what the server has to say about the same requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trio_sse.evidence.client import ask
from trio_sse.evidence.process import Server

HERE = Path(__file__).parent
DRIVERS = HERE / "drivers"
Seen = dict[str, Any]

# A model of many words that nobody waits for. The second one leaves gaps for heartbeats every 50 ms, before the first token too.
SERVERS = {
    "plain": ("--script", "interval_ms=5,events=100000"),
    "heartbeat": ("--script", "interval_ms=120,prefill_ms=250,events=100000", "--heartbeat", "0.05"),
    "failing": ("--script", "interval_ms=5,events=1000,fail_at=3"),
    "silent": ("--script", "prefill_ms=60000", "--heartbeat", "0"),
}


@dataclass(frozen=True, eq=False)
class Servers:
    """Running servers by name."""

    addresses: dict[str, tuple[str, int]]

    @property
    def urls(self) -> dict[str, str]:
        return {name: f"http://{host}:{port}" for name, (host, port) in self.addresses.items()}

    def record(self, request_id: str) -> Seen:
        """What the server remembers of the request, once it has ended."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            for address in self.addresses.values():
                status, body = ask(address, "GET", f"/traces/{request_id}")
                if status == 200:
                    found: Seen = json.loads(body)
                    return found
            time.sleep(0.05)
        pytest.fail(f"no server has a record of {request_id}")


Play = Callable[[str, Servers, tuple[str, ...]], dict[str, Seen]]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The scripted servers, each a process on a port of its own."""
    common = ("--backend", "scripted", "--slots", "64")
    with contextlib.ExitStack() as stack:
        yield Servers({name: stack.enter_context(Server((*common, *options))).address for name, options in SERVERS.items()})


@pytest.fixture(scope="session")
def model_server() -> Iterator[Servers]:
    """The packaged model's server."""
    with Server(("--slots", "4")) as server:
        yield Servers({"model": server.address})


# --- environments ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def store(pytestconfig: pytest.Config) -> Path:
    """Where environments are kept from one run of the suite to the next."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("clients")


def keep(store: Path, name: str, sources: list[Path], build: Callable[[Path], None]) -> Path:
    """A directory made by ``build`` out of ``sources``; made anew only when these change."""
    digest = hashlib.sha256(b"\0".join([sys.version.encode(), *(source.read_bytes() for source in sources)])).hexdigest()
    home = store / f"{name}-{digest[:16]}"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        build(home)
        (home / "complete").touch()
    return home


def must_run(command: list[str | Path], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        # No network, as a rule. Under TRIO_SSE_TEST_ALL=1 this is a failure.
        pytest.skip(f"{' '.join(map(str, command[:4]))} failed: {(done.stderr or done.stdout)[-300:]}")


def python_environment(store: Path, name: str) -> Path:
    """A virtual environment with ``python/NAME.txt``; returns its interpreter."""
    requirements = HERE / "python" / f"{name}.txt"

    def build(home: Path) -> None:
        must_run([sys.executable, "-m", "venv", home / "venv"], HERE)
        must_run([home / "venv/bin/python", "-m", "pip", "install", "--no-deps", "-qr", requirements], HERE)

    return keep(store, name, [requirements], build) / "venv/bin/python"


def node_project(store: Path) -> Path:
    """A copy of ``node/`` with its packages installed."""
    sources = sorted((HERE / "node").glob("*.*"))

    def build(home: Path) -> None:
        for source in sources:
            shutil.copy(source, home)
        must_run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], home)

    return keep(store, "node", sources, build)


# --- clients --------------------------------------------------------------------------------------------------------------------------


def command(client: str, store: Path, need: Callable[[str], str]) -> tuple[list[str | Path], Path]:
    """The client's command line and the directory that it runs in."""
    match client:
        case "openai-python":
            return [sys.executable, DRIVERS / "openai_python.py"], HERE
        case "openai-early":
            return [python_environment(store, "openai-early"), DRIVERS / "openai_python.py"], HERE
        case "httpx-sse":
            return [sys.executable, DRIVERS / "httpx_sse_client.py"], HERE
        case "langchain":
            return [python_environment(store, "langchain"), DRIVERS / "langchain_client.py"], HERE
        case "openai-node" | "eventsource":
            home = node_project(store)
            return [need("node"), home / f"{client.removesuffix('-node')}.mjs"], home
    raise AssertionError(client)


@pytest.fixture(scope="session")
def play(store: Path, need: Callable[[str], str]) -> Play:
    """``play(client, servers, scenarios)``: one run of a client over the scenarios, remembered."""

    @cache
    def run(client: str, servers: Servers, scenarios: tuple[str, ...]) -> dict[str, Seen]:
        arguments, cwd = command(client, store, need)
        # Proxies and keys of whoever runs the tests are none of the client's business.
        unwanted = ("OPENAI_", "LANGCHAIN_", "LANGSMITH_", "PYTHON", "http_proxy", "https_proxy", "all_proxy")
        environment = {
            name: value for name, value in os.environ.items() if not name.lower().startswith(tuple(map(str.lower, unwanted)))
        }
        with tempfile.TemporaryDirectory() as scratch:
            environment |= {"HOME": scratch, "NO_PROXY": "127.0.0.1"}
            done = subprocess.run(
                [*arguments, json.dumps(servers.urls), client, ",".join(scenarios)],
                cwd=cwd,
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
                env=environment,
            )
        assert done.returncode == 0, done.stderr[-2000:]
        result: dict[str, Seen] = json.loads(done.stdout)
        return result

    return run
