"""Odd and hostile requests: refused, or read as the RFCs allow; one response at most where framing is in doubt; never a traceback.

Each raw request stands in front of ``GET /v1/models``: the request that an attacker would have smuggled. ``statuses`` are all responses
that may come. Whether the bytes come in one piece or in many makes no difference.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import trio
from hypothesis import HealthCheck, given, settings, strategies as st
from trio.testing import MockClock

from tests.support.capture import captured_log, check_quiet
from tests.support.pieces import Transcript, bytewise, converse, in_pieces
from tests.support.stage import Stage, get
from trio_sse.script import Script

HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"


@dataclass(frozen=True)
class Odd:
    name: str
    raw: bytes
    statuses: tuple[int, ...]
    param: str | None = None


def _post(*headers: bytes, body: bytes = b"", version: bytes = b"1.1", host: bytes = b"Host: t\r\n") -> bytes:
    return b"POST /generate HTTP/%s\r\n%s%s\r\n%s" % (version, host, b"".join(h + b"\r\n" for h in headers), body)


def _get(*headers: bytes, target: bytes = b"/healthz", version: bytes = b"1.1", host: bytes = b"Host: t\r\n") -> bytes:
    return b"GET %s HTTP/%s\r\n%s%s\r\n" % (target, version, host, b"".join(h + b"\r\n" for h in headers))


CHUNKED = b"Transfer-Encoding: chunked"
FRAMING = [
    Odd("both-lengths", _post(b"Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"), (400,)),
    Odd("both-lengths-other-order", _post(CHUNKED, b"Content-Length: 5", body=b"0\r\n\r\n"), (400,)),
    Odd("two-lengths", _post(b"Content-Length: 5", b"Content-Length: 6", body=b"xxxxx"), (400,)),
    Odd("list-of-lengths", _post(b"Content-Length: 5, 6", body=b"xxxxx"), (400,)),
    Odd("plus", _post(b"Content-Length: +5", body=b"xxxxx"), (400,)),
    Odd("hexadecimal", _post(b"Content-Length: 0x5", body=b"xxxxx"), (400,)),
    Odd("negative", _post(b"Content-Length: -1"), (400,)),
    Odd("underscore", _post(b"Content-Length: 1_0", body=b"x" * 10), (400,)),
    Odd("empty-length", _post(b"Content-Length:"), (400,)),
    Odd("no-number", _post(b"Content-Length: five", body=b"xxxxx"), (400,)),
    Odd("length-of-5000-digits", _post(b"Content-Length: " + b"9" * 5000), (400,)),
    Odd("length-of-arabic-digits", _post("Content-Length: ٥".encode(), body=b"xxxxx"), (400,)),
    Odd("xchunked", _post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"), (501,)),
    Odd("chunked-gzip", _post(b"Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n"), (501,)),
    Odd("gzip-chunked", _post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"), (501,)),
    Odd("identity", _post(b"Transfer-Encoding: identity", body=b"0\r\n\r\n"), (501,)),
    Odd("twice-chunked", _post(CHUNKED, CHUNKED, body=b"0\r\n\r\n"), (501,)),
    Odd("vertical-tab-chunked", _post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"), (400,)),
    Odd("space-before-colon", _post(b"Content-Length : 5", body=b"xxxxx"), (400,)),
    Odd("folded-length", _post(b"Content-Length:\r\n 5", body=b"xxxxx"), (400,)),
    Odd("folded-coding", _post(b"Transfer-Encoding:\r\n chunked", body=b"0\r\n\r\n"), (400,)),
    Odd("folded-by-tab", _get(b"X: a\r\n\tb"), (400,)),
    Odd("chunked-on-1.0", _post(CHUNKED, version=b"1.0", body=b"0\r\n\r\n"), (400,)),
    # a chunked body that ends badly
    Odd("chunk-end", _post(CHUNKED, body=b"5\r\nhelloXX0\r\n\r\n"), (400,)),
    Odd("chunk-size-by-line-feed", _post(CHUNKED, body=b"5\nhello\r\n0\r\n\r\n"), (400,)),
    Odd("chunk-size-too-long", _post(CHUNKED, body=b"1" + b"0" * 20 + b"\r\n"), (400,)),
    Odd("chunk-extension-by-line-feed", _post(CHUNKED, body=b"5;\nX\r\nhello\r\n0\r\n\r\n"), (400,)),
    Odd("chunk-size-negative", _post(CHUNKED, body=b"-5\r\n"), (400,)),
    Odd("chunk-size-empty", _post(CHUNKED, body=b"\r\nhello\r\n0\r\n\r\n"), (400,)),
    Odd("chunk-size-prefixed", _post(CHUNKED, body=b"0x5\r\nhello\r\n0\r\n\r\n"), (400,)),
    Odd("chunk-size-spaced", _post(CHUNKED, body=b" 5\r\nhello\r\n0\r\n\r\n"), (400,)),
    Odd("bad-trailer", _post(CHUNKED, body=b"0\r\nX y\r\n\r\n"), (400,)),
]  # fmt: skip
HEADS = [
    Odd("no-version", b"GET /healthz\r\n\r\n", (400,)),
    Odd("version-2.0", _get(version=b"2.0"), (400,)),
    Odd("version-1.2", _get(version=b"1.2"), (400,)),
    Odd("version-0.9", _get(version=b"0.9"), (400,)),
    Odd("version-11", _get(version=b"11"), (400,)),
    Odd("http2-preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    Odd("tls-hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400,)),
    Odd("ssh", b"SSH-2.0-OpenSSH_9.2\r\n\r\n", (400,)),
    Odd("redis", b"*1\r\n$4\r\nPING\r\n\r\n", (400,)),
    Odd("empty-line-first", b"\r\n" + _get(), (400,)),
    Odd("two-spaces", b"GET  /healthz HTTP/1.1\r\nHost: t\r\n\r\n", (400,)),
    Odd("space-in-target", _get(target=b"/health z"), (400,)),
    Odd("latin-1-in-target", _get(target=b"/\xe9"), (400,)),
    Odd("bare-cr-in-request-line", b"GET /healthz HTTP/1.1\rX: y\r\nHost: t\r\n\r\n", (400,)),
    Odd("no-host", _get(host=b""), (400,)),
    Odd("two-hosts", _get(host=b"Host: t\r\nHost: t\r\n"), (400,)),
    Odd("host-with-path", _get(host=b"Host: t/x\r\n"), (400,), param="Host"),
    Odd("host-with-user", _get(host=b"Host: u@t\r\n"), (400,), param="Host"),
    Odd("host-with-comma", _get(host=b"Host: t, u\r\n"), (400,), param="Host"),
    Odd("host-bad-port", _get(host=b"Host: t:port\r\n"), (400,), param="Host"),
    Odd("host-unclosed-bracket", _get(host=b"Host: [::1\r\n"), (400,), param="Host"),
    Odd("nul", _get(b"X: a\x00b"), (400,)),
    Odd("bare-cr", _get(b"X: a\rb"), (400,)),
    Odd("escape", _get(b"X: a\x1b[31mb"), (400,), ),
    Odd("delete", _get(b"X: a\x7fb"), (400,)),
    Odd("empty-name", _get(b": x"), (400,)),
    Odd("no-colon", _get(b"nonsense"), (400,)),
    Odd("space-in-name", _get(b"a b: x"), (400,)),
    Odd("latin-1-name", _get(b"\xe9: x"), (400,)),
    Odd("long-head", _get(b"X: " + b"x" * 20_000), (431,)),
    Odd("long-and-malformed-head", _get(b"X y: " + b"x" * 20_000), (431,)),
    Odd("many-headers", _get(*[b"X-%d: y" % n for n in range(3000)]), (431,)),
    Odd("connect", b"CONNECT t:443 HTTP/1.1\r\nHost: t\r\n\r\n", (404,)),
]  # fmt: skip
# What is only odd: answered, and so is the request behind it.
ODD = [
    Odd("http-1.1-host-anything", _get(host=b"Host: rebound.example:1\r\n"), (200, 200)),
    Odd("host-empty", _get(host=b"Host:\r\n"), (200, 200)),
    Odd("host-ipv6", _get(host=b"Host: [::1]:8766\r\n"), (200, 200)),
    Odd("opaque-value", _get(b"X: a\xff\xfeb"), (200, 200)),
    Odd("tab-in-value", _get(b"X: a\tb"), (200, 200)),
    Odd("empty-value", _get(b"X:"), (200, 200)),
    Odd("equal-lengths", b"POST /nowhere HTTP/1.1\r\nHost: t\r\nContent-Length: 0, 0\r\n\r\n", (404, 200)),
    Odd("chunked-in-capitals", _get(b"Transfer-Encoding: CHUNKED") + b"0\r\n\r\n", (200, 200)),
    Odd("body-on-get", _get(b"Content-Length: 5") + b"xxxxx", (200, 200)),
    Odd("unknown-method", b"FROB /healthz HTTP/1.1\r\nHost: t\r\n\r\n", (405, 200)),
    Odd("long-method", b"F" * 9000 + b" /healthz HTTP/1.1\r\nHost: t\r\n\r\n", (405, 200)),
    Odd("upgrade", _get(b"Connection: Upgrade", b"Upgrade: websocket"), (200, 200)),
    Odd("upgrade-h2c", _get(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"), (200, 200)),
    Odd("expect-something-else", _get(b"Expect: the-unexpected"), (200, 200)),
    Odd("options-star", b"OPTIONS * HTTP/1.1\r\nHost: t\r\n\r\n", (404, 200)),
    Odd("query-on-known-route", _get(target=b"/healthz?a=%00&b"), (200, 200)),
    Odd("encoded-path", _get(target=b"/%68ealthz"), (404, 200)),
    Odd("dots", _get(target=b"/../../etc/passwd"), (404, 200)),
    Odd("double-slash", _get(target=b"//healthz"), (404, 200)),
    Odd("template-as-path", _get(target=b"/requests/{id}"), (404, 200)),
    Odd("absolute-form-without-path", _get(target=b"HTTP://t"), (404, 200)),
    Odd("close", _get(b"Connection: close"), (200,)),
    Odd("old-version", _get(version=b"1.0"), (200,)),
    Odd("old-version-keep-alive", _get(b"Connection: keep-alive", version=b"1.0"), (200,)),
]  # fmt: skip
CORPUS = {odd.name: odd for odd in [*FRAMING, *HEADS, *ODD]}


def check_errors(transcript: Transcript, statuses: tuple[int, ...]) -> None:
    answers = transcript.answers(*["GET"] * 3)
    assert tuple(answer.status for answer in answers) == statuses
    assert transcript.responses == len(statuses)
    for answer in answers:
        assert answer.complete
        if answer.status >= 400:
            assert answer.headers["content-type"] == "application/json"
            assert int(answer.headers["content-length"]) == len(answer.body)
            error = json.loads(answer.body)["error"]
            assert set(error) == {"message", "type", "code", "param"}
            assert "h11" not in answer.body.decode("ascii")


@pytest.mark.parametrize("name", CORPUS)
async def test_corpus(name: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    odd = CORPUS[name]
    stage = Stage(nursery, script=Script(events=2, interval_ms=10))
    raw = odd.raw + HIDDEN
    with captured_log() as log:
        whole = await converse(stage, [raw])
        check_errors(whole, odd.statuses)
        if odd.param is not None:
            assert whole.answers("GET")[0].error["param"] == odd.param
        for size in (1, 3, 17, 1000):
            if len(raw) / size < 4000:  # long heads byte by byte: only the quadratic cost of reading would be measured
                assert await converse(stage, in_pieces(raw, size)) == whole, size
    check_quiet(log)
    ran = [record.route for record in stage.records].count("/v1/models")
    assert ran == 0 or len(odd.statuses) == 2
    await stage.settled()


async def test_head_is_refused_without_a_body(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """A refusal of HEAD is an answer to HEAD: what follows its head would be taken for the next response."""
    stage = Stage(nursery)
    for raw, status in (
        (b"HEAD /healthz HTTP/1.1\r\nHost: t\r\nX: a\r\n b\r\n\r\n", b"400"),
        (b"HEAD /healthz HTTP/1.1\r\nHost: a/b\r\n\r\n", b"400"),
        (get("/nowhere", method="HEAD"), b"404"),
        (get("/generate", method="HEAD"), b"405"),
    ):
        transcript = await converse(stage, [raw])
        assert transcript.received.startswith(b"HTTP/1.1 %s " % status)
        assert transcript.received.endswith(b"\r\n\r\n")
        assert transcript.received.count(b"\r\n\r\n") == 1
    await stage.settled()


# Lines of requests, recombined: nobody has thought of all of them.
_LINES = [
    b"GET /healthz HTTP/1.1\r\n", b"POST /generate HTTP/1.1\r\n", b"HEAD /readyz HTTP/1.0\r\n", b"Host: t\r\n", b"Host: t\n",
    b"Content-Length: 3\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
    b"Expect: 100-continue\r\n", b" folded\r\n", b"\r\n", b"\n", b"0\r\n\r\n", b"3\r\nabc\r\n", b"{}\n", b"abc", b"\x00", b"\xff\xfe",
    b"X: \x01\r\n", b": \r\n", HIDDEN,
]  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.sampled_from(_LINES) | st.binary(max_size=8), max_size=12), size=st.integers(1, 40), fin=st.booleans())
def test_any_bytes(lines: list[bytes], size: int, fin: bool) -> None:
    """Whatever comes is answered by well-formed responses, the same for any cut, and nothing is left behind."""
    raw = b"".join(lines)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            stage = Stage(nursery, script=Script(events=2, interval_ms=10))
            with captured_log() as log:
                whole = await converse(stage, [raw], fin=fin)
                many = await converse(stage, in_pieces(raw, size), fin=fin)
                assert (many.received, many.responses) == (whole.received, whole.responses)
                await converse(stage, bytewise(raw), fin=fin)
            check_quiet(log)
            await stage.settled()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
