"""Through a real nginx as a distribution ships it: its default buffering, and HTTP/1.0 to us."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.support.process import LiveStage, live, tcp
from tests.support.stage import answers, get, post
from trio_sse.script import Script
from trio_sse.trace import Outcome

pytestmark = [pytest.mark.net, pytest.mark.nginx]

PROMPT = {"prompt": "hi", "max_new_tokens": 100}
COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 100}

# Nothing is set about proxying but where to: buffering, HTTP version and timeouts are nginx's own.
_CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{target}; }}
    }}
}}
"""


@contextmanager
def nginx(program: str, folder: Path, target: int) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = folder / "nginx.conf"
    config.write_text(_CONFIG.format(folder=folder, port=port, target=target))
    with subprocess.Popen([program, "-p", str(folder), "-c", str(config)], stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 20
            while True:
                try:
                    tcp(("127.0.0.1", port)).close()
                    break
                except OSError:
                    assert process.poll() is None, (folder / "error.log").read_text()
                    assert time.monotonic() < until
                    time.sleep(0.02)
            yield "127.0.0.1", port
        finally:
            process.terminate()


async def client(stage: LiveStage, front: tuple[str, int], raw: bytes) -> trio.SocketStream:
    """A client of nginx."""
    direct, stage.address = stage.address, front
    stream = await stage.open(raw)
    stage.address = direct
    return stream


async def read(stream: trio.SocketStream, mark: bytes | None) -> bytes:
    data = b""
    with trio.fail_after(30):
        while mark is None or mark not in data:
            part = bytes(await stream.receive_some(65536))
            if not part:
                assert mark is None, data
                break
            data += part
    return data


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/events?events=8&interval_ms=150"])
async def test_events_arrive_as_they_are_produced(path: str, need: Callable[[str], str], tmp_path: Path) -> None:
    async with live(script=Script(events=8, interval_ms=150)) as stage:
        with nginx(need("nginx"), tmp_path, stage.address[1]) as front:
            body = COMPLETION | {"stream": True} if path.startswith("/v1") else PROMPT
            raw = get(path, "Connection: close") if "?" in path else post(path, body, "Connection: close")
            stream = await client(stage, front, raw)
            head = await read(stream, b"\r\n\r\n")
            backend = stage.script_backend if "?" in path else stage.backend
            data = head
            for number in range(1, 9):
                if b"w%d " % number not in data:
                    data += await read(stream, b"w%d " % number)
                # The event is here, and the one after the next has not even been produced.
                assert backend.steps <= number + 1  # type: ignore[attr-defined]
            data += await read(stream, None)
            (answer,) = answers(data, "GET" if "?" in path else "POST")
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert "content-encoding" not in answer.headers
            assert answer.complete
            assert b"[DONE]" in answer.body or b"event: done" in answer.body
        assert stage.outcomes == [Outcome.COMPLETED]


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("who", ["streamed", "json", "waiting"])
async def test_client_that_leaves_nginx_stops_the_model(who: str, leave: str, need: Callable[[str], str], tmp_path: Path) -> None:
    async with live(script=Script(events=1000, interval_ms=500), queue=1) as stage:
        with nginx(need("nginx"), tmp_path, stage.address[1]) as front:
            admission = stage.server.routes.admission
            if who == "waiting":
                await stage.open(post("/generate", PROMPT))
                await stage.wait_until(lambda: admission.running == 1)
            raw = post("/generate", PROMPT) if who == "streamed" else post("/v1/completions", COMPLETION)
            stream = await client(stage, front, raw)
            if who == "streamed":
                await read(stream, b"w1 ")
            else:
                await stage.wait_until(lambda: (admission.waiting if who == "waiting" else admission.running) == 1)
            begin = trio.current_time()
            if leave == "reset":
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            stream.socket.close()
            assert await stage.wait_outcomes(1) == [Outcome.CLIENT_DISCONNECTED]
            assert trio.current_time() - begin < 2
            assert admission.waiting == 0
            assert admission.running == (who == "waiting")
            assert stage.records[0].tokens_after_verdict == 0


async def test_errors_and_small_answers(need: Callable[[str], str], tmp_path: Path) -> None:
    async with live(api_key=("k",)) as stage:
        with nginx(need("nginx"), tmp_path, stage.address[1]) as front:
            for raw, status in (
                (get("/healthz"), 200),
                (get("/healthz", method="HEAD"), 200),
                (post("/v1/chat/completions", None, raw=b"x" * 900_000), 401),
                (post("/generate", {}, "Authorization: Bearer k"), 400),
                (get("/generate", "Authorization: Bearer k"), 405),
                (get("/events", "Authorization: Bearer k", "X-Forwarded-For: 10.0.0.1"), 404),  # the lab is not for proxies
            ):
                stream = await client(stage, front, raw.replace(b"Host: t\r\n", b"Host: t\r\nConnection: close\r\n"))
                (answer,) = answers(await read(stream, None), raw.split()[0].decode())
                assert answer.status == status
                assert answer.complete
                if status >= 400:
                    assert answer.error["message"]
