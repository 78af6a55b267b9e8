"""Peers that vanish without a word: the network between them and us swallows everything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.process import ROOT, ServerProcess, read_until, tcp
from tests.support.stage import get

pytestmark = [pytest.mark.net, pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(240)]

_OURS, _THEIRS = "10.213.77.1", "10.213.77.2"
_CLIENT = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60)
sock.sendall(bytes.fromhex(sys.argv[3]))
data = b""
while bytes.fromhex(sys.argv[4]) not in data:
    data += sock.recv(65536)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def namespace(ip: str) -> Iterator[str]:
    """A network namespace with one cable to us; yields its name."""
    name, inside, outside = f"trio-sse-{os.getpid()}", f"ts{os.getpid() % 10**8}i", f"ts{os.getpid() % 10**8}o"

    def run(*arguments: str) -> None:
        subprocess.run([ip, *arguments], check=True, capture_output=True)

    run("netns", "add", name)
    try:
        run("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        run("address", "add", f"{_OURS}/30", "dev", outside)
        run("link", "set", outside, "up")
        run("-n", name, "address", "add", f"{_THEIRS}/30", "dev", inside)
        run("-n", name, "link", "set", inside, "up")
        yield name
    finally:
        subprocess.run([ip, "link", "delete", outside], check=False, capture_output=True)
        run("netns", "delete", name)


def test_vanished_peers_are_found_within_a_minute(need: Callable[[str], str]) -> None:
    """A stream with heartbeats only, one that is written to all the time, half a request; slots and sockets are free afterwards."""
    ip = need("netns")
    requests = {
        "heartbeats": (get("/events?events=2&interval_ms=60000"), b": hb"),
        "busy": (get("/events?events=100000&interval_ms=100"), b"id: 3\n"),
        "half-sent": (get("/healthz") + b"GET /hea", b"ok"),
    }
    options = ("--host", "0.0.0.0", "--heartbeat", "2", "--header-timeout", "300", "--lab")
    with namespace(ip) as name, ServerProcess(*options) as server:
        clients = []
        for raw, mark in requests.values():
            command = [ip, "netns", "exec", name, sys.executable, "-c", _CLIENT, _OURS, str(server.address[1]), raw.hex(), mark.hex()]
            clients.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT))
        try:
            for each in clients:
                assert each.stdout is not None
                assert each.stdout.readline() == b"ready\n"
            # From now on nothing they send arrives, acknowledgements included; what we send does, and they cannot say so.
            subprocess.run([ip, "-n", name, "route", "add", "blackhole", f"{_OURS}/32"], check=True, capture_output=True)
            begin = time.monotonic()
            found = ""
            while time.monotonic() - begin < 90 and len(re.findall("outcome=client_disconnected", found)) < 2:
                time.sleep(0.5)
                found = server.printed()
            took = time.monotonic() - begin
            assert len(re.findall("route=/events .*outcome=client_disconnected", found)) == 2, found
            assert 10 < took < 75  # 60 s, and what a busy machine adds
            with tcp(("127.0.0.1", server.address[1])) as client:
                client.sendall(get("/metrics", "Connection: close"))
                page = read_until(client)
            assert b"trio_sse_requests_running 0.0" in page
            until = time.monotonic() + 30
            while f"{_THEIRS}:" in subprocess.run(["ss", "-tn"], capture_output=True, text=True, check=True).stdout:
                assert time.monotonic() < until  # the half-sent one too
                time.sleep(0.5)
        finally:
            for each in clients:
                each.kill()
                each.communicate()
