"""Every request, cut in two at every byte and sent byte by byte, is answered as it is in one piece."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import MockClock

from tests.support.capture import captured_log, check_quiet
from tests.support.pieces import bytewise, converse, halves
from tests.support.stage import Stage, get, post
from trio_sse.script import Script

_CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi \U0001f999"}], "max_tokens": 2}


def chunked(path: str, body: bytes, *sizes: int) -> bytes:
    """``body`` in chunks of ``sizes`` (the rest in one), with an extension, upper-case digits and a trailer."""
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nX-Request-Id: r\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    parts = []
    for size in sizes:
        parts.append(body[:size])
        body = body[size:]
    parts.append(body)
    lines = [b"%X;ext=1\r\n%s\r\n" % (len(part), part) for part in parts]
    return head + b"".join(lines) + b"0\r\nX-Trailer: ignored\r\n\r\n"


_SAME = "X-Request-Id: r"
REQUESTS: dict[str, tuple[bytes, int]] = {  # name → bytes, responses
    "stream": (post("/generate", {"prompt": "hi", "max_new_tokens": 2}, _SAME), 1),
    "chat-stream": (post("/v1/chat/completions", _CHAT | {"stream": True}, _SAME), 1),
    "chat-document": (post("/v1/chat/completions", _CHAT, _SAME), 1),
    "chat-chunked": (chunked("/v1/chat/completions", json.dumps(_CHAT, ensure_ascii=False).encode(), 1, 2, 7, 45, 2), 1),
    "expect": (post("/generate", {"prompt": "hi", "max_new_tokens": 1}, _SAME, "Expect: 100-continue"), 1),
    "bad-field": (post("/generate", {"prompt": 5}, _SAME), 1),
    "bad-json": (post("/generate", None, _SAME, raw=b'{"prompt": "\xff"}'), 1),
    "too-long": (post("/generate", None, _SAME, "X: y", raw=b"x").replace(b"Length: 1\r", b"Length: 16385\r"), 1),
    "unknown-path-with-body": (post("/nowhere", {"prompt": "hi"}, _SAME), 1),
    "wrong-method": (get("/generate", _SAME), 1),
    "head-then-get": (get("/healthz", method="HEAD") + get("/healthz"), 2),
    "http-1.0": (get("/events?events=2&interval_ms=10", _SAME, version="1.0"), 1),
    "bare-line-feeds": (b"POST /generate HTTP/1.1\nHost: t\nContent-Length: 34\n\n" + b'{"prompt":"hi","max_new_tokens":1}', 1),
    "absolute-form": (get("http://example.org/healthz"), 1),
    "pipelined": (get("/events?events=2&interval_ms=10") + post("/generate", {"prompt": "hi"}) + get("/nowhere") + get("/healthz"), 4),
    "smuggled": (post("/generate", None, "Transfer-Encoding: chunked", raw=b"0\r\n\r\n") + get("/metrics"), 1),
    "malformed": (b"GET / HTTP/1.1\r\nHost : t\r\n\r\n" + get("/metrics"), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_cut_does_not_matter(name: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    raw, responses = REQUESTS[name]
    stage = Stage(nursery, script=Script(events=3, interval_ms=10))
    with captured_log() as log:
        whole = await converse(stage, [raw])
        assert whole.responses == responses
        for cut in halves(raw):
            assert await converse(stage, cut) == whole, f"cut after {len(cut[0])} bytes"
        assert await converse(stage, bytewise(raw)) == whole
    check_quiet(log)
    await stage.settled()


async def test_the_cut_does_not_matter_for_refusals_at_the_door(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, api_key=("k",), cors_origin=("https://a.example",))
    for headers, status in (
        (("Authorization: Bearer wrong",), 401),
        (("Authorization: Bearer k", "Origin: https://b.example"), 403),
        (("Authorization: Bearer k", "Content-Type: multipart/form-data; boundary=x"), 415),
        (("Authorization: bearer k", "Origin: https://a.example"), 200),
    ):
        raw = post("/generate", {"prompt": "hi"}, _SAME, *headers)
        whole = await converse(stage, [raw])
        assert whole.answers()[0].status == status
        for cut in halves(raw):
            assert await converse(stage, cut) == whole
        assert await converse(stage, bytewise(raw)) == whole
    await stage.settled()
