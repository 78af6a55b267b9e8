"""Where the server listens: addresses, ports in use, Unix sockets, systemd's."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.support.process import ROOT, ServerProcess, has_ipv6, read_until, tcp
from tests.support.stage import get, post
from trio_sse.config import Config
from trio_sse.errors import ConfigError
from trio_sse.listeners import open_listeners, url

pytestmark = pytest.mark.net


@contextmanager
def listening(**options: object) -> Iterator[list[socket.socket]]:
    listeners = open_listeners(Config(**{"port": 0, **options}))  # type: ignore[arg-type]
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("localhost", ["127.0.0.1"]),
        ("::1", ["::1"]),
        ("[::1]", ["::1"]),
        ("::", ["::1", "127.0.0.1"]),
        ("", ["::1", "127.0.0.1"]),
    ],
)
def test_addresses(host: str, reached: list[str]) -> None:
    if not has_ipv6() and "::1" in reached:
        if host == "::":
            return  # whether it can be bound at all is the kernel's affair
        if host:
            with pytest.raises(OSError) as failed, listening(host=host):
                pass
            assert failed.value.filename.startswith("[::")
            return
        reached = ["127.0.0.1"]
    with listening(host=host) as listeners:
        ports = {listener.getsockname()[1] for listener in listeners}
        assert len(ports) == 1
        (port,) = ports
        assert port != 0
        for address in reached:
            with tcp((address, port)):
                pass
        for listener in listeners:
            named = listener.getsockname()[0]
            assert url(listener, secure=False) == (f"http://[{named}]:{port}" if ":" in named else f"http://{named}:{port}")
            assert url(listener, secure=True).startswith("https://")
            assert not listener.getblocking()
            assert not listener.get_inheritable()


def test_an_ipv6_address_is_only_itself() -> None:
    if not has_ipv6():
        return  # there is none that could be more
    with listening(host="::1") as [listener], pytest.raises(ConnectionRefusedError):
        tcp(("127.0.0.1", listener.getsockname()[1]))


def test_names_of_addresses_that_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """localhost is often ::1 first, on machines without IPv6."""
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
    with listening(host="localhost") as [listener]:
        assert listener.getsockname()[0] == "127.0.0.1"
    del found[1]
    with pytest.raises(OSError) as failed, listening(host="localhost"):
        pass
    assert failed.value.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    assert failed.value.filename.startswith("[2001:db8::1]:")


def test_every_interface_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int = -1, *args: int, **kwargs: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *args, **kwargs)

    monkeypatch.setattr("trio_sse.listeners.socket.socket", without_ipv6)
    with listening(host="") as [listener]:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_unknown_host() -> None:
    with pytest.raises(ConfigError, match="--host"):
        open_listeners(Config(host="no such host.invalid", port=0))


def test_port_in_use_names_address_and_errno() -> None:
    with listening() as [listener]:
        port = listener.getsockname()[1]
        with pytest.raises(OSError) as failed:
            open_listeners(Config(port=port))
    assert (failed.value.errno, failed.value.filename) == (errno.EADDRINUSE, f"127.0.0.1:{port}")


def test_port_in_time_wait_can_be_bound() -> None:
    with listening() as [listener]:
        port = listener.getsockname()[1]
        client = tcp(("127.0.0.1", port))
        time.sleep(0.01)
        server, _ = listener.accept()
        server.close()  # the side that closes first keeps the port in TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    with listening(port=port):
        pass


# ---- Unix sockets ----


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(uds=str(path)) as [listener]:
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert url(listener, secure=False) == f"unix:{path}"
        with pytest.raises(OSError) as failed, listening(uds=str(path)):
            pass
        assert (failed.value.errno, failed.value.filename) == (errno.EADDRINUSE, str(path))
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(str(path))  # the live one is untouched
    assert path.exists()  # its listener is closed: a stale file
    with listening(uds=str(path)):
        pass


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_socket_is_left_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()
    with pytest.raises(OSError) as failed, listening(uds=str(path)):
        pass
    assert (failed.value.errno, failed.value.filename) == (errno.EEXIST, str(path))
    assert path.is_dir() or path.read_text() == "precious"


def test_long_and_missing_paths(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 150), tmp_path / "missing" / "s"):
        with pytest.raises(OSError) as failed, listening(uds=str(path)):
            pass
        assert failed.value.errno in (errno.EINVAL, errno.ENOENT)
        assert failed.value.filename == str(path)


def test_unix_socket_survives_a_killed_server(tmp_path: Path) -> None:
    """Streaming, leaving, kill -9, start again on the same path, a clean end that takes the file along."""
    path = str(tmp_path / "s")
    for end in ("kill", "term"):
        with ServerProcess("--uds", path, "--lab", "--log-format", "json") as server:
            assert f"unix:{path}" in server.printed()
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(10)
                client.connect(path)
                client.sendall(get("/events?events=1000&interval_ms=20"))
                read_until(client, b"id: 3\n")
            server.wait_printed('"outcome": "client_disconnected"')
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(10)
                client.connect(path)
                client.sendall(get("/metrics", "Connection: close"))
                assert b"trio_sse_requests_running 0.0" in read_until(client)
            second = subprocess.run(
                [sys.executable, "-m", "trio_sse", "serve", "--backend", "scripted", "--uds", path],
                capture_output=True, text=True, cwd=ROOT, timeout=60, check=False,
            )  # fmt: skip
            assert second.returncode == 1
            assert second.stderr.count("\n") == 1
            assert path in second.stderr
            assert f"errno {errno.EADDRINUSE}" in second.stderr
            if end == "kill":
                server.process.kill()
                server.wait()
                assert Path(path).exists()
            else:
                server.process.terminate()
                assert server.wait() == 0
                assert not Path(path).exists()


# ---- systemd ----


_HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def test_systemd_sockets() -> None:
    """LISTEN_FDS wins over --port; not for our children; and the lab follows the address that was handed over, not --host."""
    for host, lab in (("127.0.0.1", b"200"), ("0.0.0.0", b"404")):
        with socket.create_server((host, 0)) as listener:
            with ServerProcess(prefix=[sys.executable, "-c", _HAND_OVER, str(listener.fileno())], pass_fds=[listener.fileno()]) as server:
                assert server.address[1] == listener.getsockname()[1]
                with tcp(("127.0.0.1", listener.getsockname()[1])) as client:
                    client.sendall(get("/traces", "Connection: close"))
                    assert read_until(client).startswith(b"HTTP/1.1 " + lab)
                server.process.terminate()
                assert server.wait() == 0


def test_sockets_for_another_process_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    monkeypatch.setenv("LISTEN_FDS", "1")
    with listening(host="127.0.0.1") as [listener]:
        assert listener.getsockname()[0] == "127.0.0.1"
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "one")
    with pytest.raises(ConfigError, match="LISTEN_FDS"):
        open_listeners(Config(port=0))


# ---- The process ----


def test_port_in_use_is_known_before_the_model_loads(tmp_path: Path) -> None:
    (tmp_path / "slow_backend.py").write_text(
        "import trio, trio_sse\n"
        "class Slow(trio_sse.Backend):\n"
        "    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED):\n"
        "        await trio.sleep(1000)\n"
        "    async def generate(self, prepared, events): ...\n"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with ServerProcess("--backend", "slow_backend:Slow", environment=environment, ready="listening on") as first:
        begin = time.monotonic()
        port = ("--port", str(first.address[1]))
        with ServerProcess(*port, "--backend", "slow_backend:Slow", environment=environment, ready=None) as second:
            assert second.wait() == 1
            assert second.printed() == (
                f"trio_sse: cannot listen on 127.0.0.1:{first.address[1]}: {os.strerror(errno.EADDRINUSE)} (errno {errno.EADDRINUSE})\n"
            )
        assert time.monotonic() - begin < 20
        with tcp(first.address) as client:
            client.sendall(get("/readyz") + post("/generate", {"prompt": "hi"}) + get("/healthz", "Connection: close"))
            answer = read_until(client)
            # The second one has a body that was not read: the connection ends with it.
            assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"503", b"503"]


@pytest.mark.parametrize(
    ("options", "warns"), [((), False), (("--host", "0.0.0.0"), True), (("--host", "0.0.0.0", "--api-key", "k"), False)]
)
def test_open_to_the_network(options: tuple[str, ...], warns: bool) -> None:
    with ServerProcess(*options) as server:
        assert ("warning: this address is open" in server.printed()) is warns
