"""Field cases T: what goes wrong for people between socket and request. One table; each case is an experiment.

Most run on the fake clock; those that are about the kernel run on real sockets. Deeper suites stand beside it: ``test_connection_*``,
``test_transport``, ``test_tls``, ``test_nginx``.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.capture import captured_log, check_quiet
from tests.support.cases import CaseTable
from tests.support.pieces import bytewise, converse, halves
from tests.support.process import live
from tests.support.stage import Answer, Stage, answers, get, peer_answer, post
from tests.support.tls import certificates
from trio_sse.script import Script
from trio_sse.trace import Outcome

cases = CaseTable(
    {
        "T02": "EOF handling leaves CLOSE_WAIT sockets or spins the CPU",
        "T05": "Bytes after Connection: close are parsed",
        "T06": "Keep-alive reuse: not-reusable state and leaked timers",
        "T07": "Connection that sends nothing",
        "T08": "Slowloris: one header or body byte at a time",
        "T09": "An unfinished upload must not hold a generation slot",
        "T11": "HEAD",
        "T13": "Chunked request bodies",
        "T14": "Conflicting framing headers",
        "T15": "Malformed chunk ends",
        "T16": "Large headers",
        "T17": "Body limits and absurd lengths",
        "T18": "Early refusal while the client is still sending",
        "T19": "Byte-by-byte and oddly split requests",
        "T20": "Compression breaks streaming",
        "T21": "Proxy buffering headers",
        "T22": "Response head must not wait for the first token",
        "T23": "Adapter copies hop-by-hop or stale framing headers",
        "T24": "TLS close and unresponsive peers",
        "T25": "Control bytes in header values",
        "T26": "TCP health checks and aborted handshakes make noise or leak",
    },
    later={"T23": "about the gateway in front of another engine, which is not built yet"},
)

CHAT = {"model": "m", "stream": True, "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
HEADS = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"


def test_every_case_is_settled_or_listed_as_later() -> None:
    cases.check()


async def ask(stage: Stage, raw: bytes, *methods: str) -> list[Answer]:
    """All answers on one connection, which the client leaves open until the server closes it."""
    return (await converse(stage, [raw])).answers(*(methods or (raw.split()[0].decode(),)))


@cases.settles("T02")
@pytest.mark.net
async def test_t02_end_of_file_leaves_nothing_behind() -> None:
    """Half-closing and vanishing, end of file without a byte, end of file in the middle of a head."""
    async with live(script=Script(events=1000, interval_ms=5000), slots=100) as stage:
        for said in (post("/generate", {"prompt": "hi"}), b"", b"GET /healthz HTT"):
            streams = [await stage.open(said) for _ in range(60)]
            for stream in streams:
                await stream.send_eof()
            await trio.sleep(0.1)
            for stream in streams:
                stream.socket.close()
            await stage.wait_connections(0)
        stage.check_idle()
        assert stage.outcomes.count(Outcome.CLIENT_DISCONNECTED) == 60
        table = trio.Path("/proc/net/tcp")
        if await table.exists():
            rows = [line.split() for line in (await table.read_text()).splitlines()[1:]]
            assert not [row for row in rows if row[1].endswith(f":{stage.address[1]:04X}") and row[3] == "08"]  # CLOSE_WAIT


@cases.settles("T05")
async def test_t05_nothing_after_connection_close_is_run(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    with captured_log() as log:
        transcript = await converse(stage, [get("/healthz", "Connection: close") + get("/healthz")])
    assert (transcript.responses, transcript.aborted, len(stage.records)) == (1, False, 1)
    check_quiet(log)


@cases.settles("T06")
async def test_t06_two_hundred_requests_on_one_connection(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Streams, documents, errors, HEAD and Expect by turns, with pauses just under the idle time; the end is a FIN in silence."""
    stage = Stage(nursery, script=Script(events=3, interval_ms=10), keep_alive=5.0)
    kinds = [
        (post("/v1/chat/completions", CHAT), 200),
        (post("/v1/chat/completions", CHAT | {"stream": False}), 200),
        (post("/generate", {"prompt": 5}), 400),
        (get("/nowhere"), 404),
        (get("/healthz", method="HEAD"), 200),
        (post("/generate", {"prompt": "hi"}, "Expect: 100-continue"), 200),
        (get("/events?events=3"), 200),
        (get("/healthz", method="PUT"), 405),
    ]
    with captured_log() as log:
        peer = stage.connect()
        for number in range(200):
            raw, status = kinds[number % len(kinds)]
            peer.received.clear()
            peer.send(raw)
            method = raw.split()[0].decode()
            while True:
                received = re.sub(rb"HTTP/1.1 100 Continue\r\n\r\n", b"", bytes(peer.received))
                found = answers(received, method, closed=False)
                if found and found[0].complete:
                    break
                await peer.wait_news()
            assert found[0].status == status, number
            assert not peer.ended
            if number % 10 == 0:
                await trio.sleep(4.99)
        assert stage.connections == 1
        peer.received.clear()
        begin = trio.current_time()
        await peer.wait_closed()
        assert trio.current_time() - begin == pytest.approx(5.0)
        assert (bytes(peer.received), peer.aborted) == (b"", False)
    check_quiet(log)


@cases.settles("T07")
async def test_t07_silent_connections_end_at_the_head_deadline(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, header_timeout=10.0)
    with captured_log() as log:
        silent = [stage.connect() for _ in range(1000)]
        for peer in silent[500:]:
            peer.send(b"G")
        await trio.sleep(9.9)
        assert (await ask(stage, get("/healthz", "Connection: close")))[0].status == 200
        await trio.sleep(0.2)
        assert all(peer.ended for peer in silent)
        assert not any(peer.received for peer in silent[:500])
        assert all(b" 408 " in peer.received for peer in silent[500:])
    check_quiet(log)
    for peer in silent:
        peer.close()
    await wait_all_tasks_blocked()
    assert stage.connections == 0


@cases.settles("T08")
@pytest.mark.parametrize("part", ["head", "body"])
async def test_t08_a_byte_a_second_moves_no_deadline(part: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, header_timeout=10.0, body_timeout=20.0)
    raw = post("/v1/chat/completions", CHAT)
    head = raw.index(b"\r\n\r\n") + 4
    peer = stage.connect()
    sent = 0 if part == "head" else head
    peer.send(raw[:sent])
    begin = trio.current_time()
    while not peer.received:
        peer.send(raw[sent : sent + 1])
        sent += 1
        await trio.sleep(1)
    assert trio.current_time() - begin == pytest.approx(10 if part == "head" else 20, abs=1)
    assert (await peer_answer(peer)).status == 408


@cases.settles("T09")
async def test_t09_an_unfinished_upload_holds_no_slot(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=50, interval_ms=100), body_timeout=30.0)
    upload = stage.connect()
    upload.send(HEADS + b'Content-Length: 5000\r\n\r\n{"model":"')
    await wait_all_tasks_blocked()
    peer = stage.connect()
    peer.send(post("/v1/chat/completions", CHAT))
    await peer.wait_received(b"HTTP/1.1 200 OK")
    assert trio.current_time() == 0
    # the other way round: a full server need not have the body to say so
    asking = stage.connect()
    asking.send(HEADS + b"Content-Length: 5000\r\nExpect: 100-continue\r\n\r\n")
    assert (await peer_answer(asking)).status == 429
    assert (await peer_answer(upload)).status == 408
    assert (await peer_answer(peer)).complete


@cases.settles("T11")
async def test_t11_head_has_no_body(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, api_key=("k",))
    for raw, status in (
        (get("/healthz", method="HEAD"), 200),
        (get("/nowhere", "Authorization: Bearer k", method="HEAD"), 404),
        (get("/v1/chat/completions", "Authorization: Bearer k", method="HEAD"), 405),
        (get("/v1/models", "Authorization: Bearer wrong", method="HEAD"), 401),
    ):
        head, following = await ask(stage, raw + get("/healthz", "Connection: close"), "HEAD", "GET")
        assert (head.status, head.body, following.body) == (status, b"", b'{"status":"ok"}')
        assert int(head.headers["content-length"]) > 0
        if status == 405:
            assert head.headers["allow"] == "POST, OPTIONS"


@cases.settles("T13")
async def test_t13_chunked_bodies(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=3, interval_ms=10), max_body=1000)
    message = CHAT | {"messages": [{"role": "user", "content": "hi \U0001f999"}]}
    body = json.dumps(message, ensure_ascii=False).encode()
    emoji = body.index("\U0001f999".encode())
    cuts = [0, 1, 3, 10, emoji + 1, emoji + 3, len(body)]  # 1, 2, 7, … bytes; the emoji in three
    parts = [body[begin:end] for begin, end in pairwise(cuts)]
    chunks = b"".join(b"%s\r\n%s\r\n" % ((b"%X;ext=1" if n == 2 else b"%X") % len(part), part) for n, part in enumerate(parts))
    raw = HEADS + b"X-Request-Id: r\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nX-Trailer: x\r\n\r\n"
    chunked, health = await ask(stage, raw + get("/healthz"), "POST", "GET")
    (plain,) = await ask(stage, post("/v1/chat/completions", None, "X-Request-Id: r", raw=body))
    assert chunked.body == plain.body
    assert chunked.body.endswith(b"data: [DONE]\n\n")
    assert health.status == 200
    too_much = HEADS + b"Transfer-Encoding: chunked\r\n\r\n" + b"64\r\n" + b"x" * 100 + b"\r\n"
    (answer,) = await ask(stage, too_much + b"64\r\n%s\r\n" % (b"x" * 100) * 10)
    assert answer.status == 413


_SMUGGLED = {
    "both-lengths": (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "two-lengths": (b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxx", 400),
    **{f"length-{value}": (b"Content-Length: %s\r\n\r\nxxxxx" % value.encode(), 400) for value in ("+5", "5, 6", "0x5", "-1", '"5"')},
    **{value: (b"Transfer-Encoding: %s\r\n\r\n0\r\n\r\n" % value.encode(), 501) for value in ("xchunked", "chunked, gzip", "identity")},
    "space-before-colon": (b"Content-Length : 5\r\n\r\nxxxxx", 400),
    "obs-fold": (b"Content-Length:\r\n 5\r\n\r\nxxxxx", 400),
}


@cases.settles("T14")
@pytest.mark.parametrize("shape", _SMUGGLED)
async def test_t14_conflicting_framing(shape: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    rest, status = _SMUGGLED[shape]
    transcript = await converse(stage, [HEADS + rest + get("/metrics")])
    (answer,) = transcript.answers("POST", "GET")
    assert (answer.status, answer.headers["connection"], transcript.responses) == (status, "close", 1)
    assert not [record for record in stage.records if record.route == "/metrics"]


@cases.settles("T14")
async def test_t14_what_is_allowed_is_read_as_the_rfc_says(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    raw = HEADS + b"Content-Length: 5\r\nContent-Length:  5 \r\n\r\nxxxxx" + get("/healthz")
    assert [answer.status for answer in await ask(stage, raw, "POST", "GET")] == [400, 200]


@cases.settles("T15")
@pytest.mark.parametrize(
    "body",
    [b"5\r\nhelloXX0\r\n\r\n", b"5\nhello\r\n0\r\n\r\n", b"100000000000000000000\r\n", b"5;\nX\r\nhello\r\n0\r\n\r\n", b"-5\r\n"],
    ids=repr,
)
async def test_t15_malformed_chunks(body: bytes, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    transcript = await converse(stage, [HEADS + b"Transfer-Encoding: chunked\r\n\r\n" + body + get("/metrics")])
    (answer,) = transcript.answers("POST", "GET")
    assert (answer.status, answer.headers["connection"], transcript.responses) == (400, "close", 1)


@cases.settles("T15")
async def test_t15_a_huge_chunk_is_refused_as_soon_as_it_is_too_long(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, max_body=1000)
    (answer,) = await ask(stage, HEADS + b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n" + b"x" * 2000)
    assert answer.status == 413


@cases.settles("T15")
def test_t15_the_parser_is_new_enough(root: Path) -> None:
    """Older ones accept any two bytes behind a chunk."""
    dependencies = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "h11>=0.16" in dependencies


@cases.settles("T16")
async def test_t16_large_heads(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    with captured_log() as log:
        for headers, status in (
            ([f"Authorization: Bearer {'x' * 9000}"], 200),
            ([f"Cookie: {'x' * 14_900}"], 200),
            ([f"Cookie: {'x' * 40_000}"], 431),
            ([f"X-{number}: y" for number in range(10_000)], 431),
        ):
            (answer,) = await ask(stage, get("/healthz", *headers))
            assert answer.status == status
            assert answer.headers.get("connection") == ("close" if status == 431 else None)
        endless = stage.connect()
        endless.send(b"GET /healthz HTTP/1.1\r\nX: ")
        for _ in range(160):
            endless.send(b"x" * 65536)
            await wait_all_tasks_blocked()
        assert (await peer_answer(endless)).status == 431
    check_quiet(log)
    wide = Stage(nursery, max_header=65536)
    assert (await ask(wide, get("/healthz", f"Cookie: {'x' * 40_000}")))[0].status == 200


@cases.settles("T17")
async def test_t17_absurd_lengths(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, max_body=10_000_000)
    declared = stage.connect()
    declared.send(HEADS + b"Content-Length: 99999999999999\r\n\r\n")
    assert (await peer_answer(declared)).status == 413
    assert trio.current_time() == 0
    endless = stage.connect()
    endless.send(HEADS + b"Transfer-Encoding: chunked\r\n\r\n")
    sent = 0
    while not endless.received:
        endless.send(b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n")
        sent += 0xFFFF
        await wait_all_tasks_blocked()
    assert sent < 10_000_000 + 2 * 65536
    assert (await peer_answer(endless)).status == 413
    whole = stage.connect()
    whole.send(post("/v1/chat/completions", None, raw=b"x" * 11_000_000))
    assert (await peer_answer(whole)).status == 413
    assert not whole.aborted


@cases.settles("T18")
@pytest.mark.net
@pytest.mark.parametrize("why", ["key", "path"])
async def test_t18_refusals_survive_an_upload(why: str) -> None:
    """Sent to the end before anything is read, in a hundred small pieces or in one go."""
    async with live(api_key=("k",)) as stage:
        key, path = ("Bearer wrong", "/generate") if why == "key" else ("Bearer k", "/nowhere")
        raw = post(path, None, f"Authorization: {key}", raw=b"x" * 2_000_000)
        for run in range(25):
            client = await stage.open()
            for piece in [raw] if run else [raw[begin : begin + 20_000] for begin in range(0, len(raw), 20_000)]:
                await client.send_all(piece)
            data = b""
            with trio.fail_after(30):
                while part := await client.receive_some(65536):
                    data += bytes(part)
            (answer,) = answers(data)
            assert (answer.status, answer.complete) == (401 if why == "key" else 404, True)
            assert answer.error["message"]
            client.socket.close()


@cases.settles("T19")
async def test_t19_any_cut(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=3, interval_ms=10))
    raw = post("/v1/chat/completions", CHAT, "X-Request-Id: r")
    whole = await converse(stage, [raw])
    assert whole.answers()[0].status == 200
    for cut in halves(raw):
        assert await converse(stage, cut) == whole
    assert await converse(stage, bytewise(raw)) == whole


@cases.settles("T19")
@pytest.mark.net
async def test_t19_a_segment_per_byte() -> None:
    async with live(script=Script(events=3, interval_ms=1)) as stage:
        client = await stage.open()
        for byte in bytewise(post("/v1/chat/completions", CHAT, "Connection: close")):
            await client.send_all(byte)
            await trio.sleep(0.001)
        data = b""
        with trio.fail_after(30):
            while part := await client.receive_some(65536):
                data += bytes(part)
        assert answers(data)[0].body.endswith(b"data: [DONE]\n\n")


@cases.settles("T20")
async def test_t20_nothing_is_compressed_or_held_back(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=5, interval_ms=1000, prefill_ms=1000))
    peer = stage.connect()
    peer.send(post("/v1/chat/completions", CHAT, "Accept-Encoding: gzip, deflate, br, zstd"))
    await peer.wait_received(b"\r\n\r\n")
    assert trio.current_time() == 0  # the head, before any token
    for number in range(1, 6):
        await peer.wait_received(b"w%d " % number)
        assert trio.current_time() == pytest.approx(1 + number)
    assert "content-encoding" not in (await peer_answer(peer)).headers


@cases.settles("T21")
async def test_t21_headers_against_buffering(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """On streams only. What a proxy makes of them: ``test_nginx``."""
    stage = Stage(nursery)
    for raw in (post("/v1/chat/completions", CHAT), post("/generate", {"prompt": "hi"}), get("/events?events=2")):
        headers = (await ask(stage, raw))[0].headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache, no-transform"
        assert headers["x-accel-buffering"] == "no"
    for raw in (post("/v1/chat/completions", CHAT | {"stream": False}), get("/healthz"), post("/generate", {})):
        headers = (await ask(stage, raw))[0].headers
        assert "x-accel-buffering" not in headers
        assert headers["content-type"] == "application/json"


@cases.settles("T22")
async def test_t22_the_head_does_not_wait_for_a_token(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=2, prefill_ms=2900), heartbeat=0.5)
    peer = stage.connect()
    peer.send(post("/v1/chat/completions", CHAT))
    await peer.wait_received(b"HTTP/1.1 200 OK")
    assert trio.current_time() == 0
    await peer.wait_received(b": hb\n")
    assert trio.current_time() == pytest.approx(0.5)
    body = (await peer_answer(peer)).body
    assert body.partition(b"w1 ")[0].count(b": hb\n") == 5


@cases.settles("T24")
@pytest.mark.net
async def test_t24_tls_peers_in_every_state(tmp_path: Path) -> None:
    """Stops reading and never closes; a reset in the handshake; plain HTTP to the TLS port; silence. ``test_tls`` has close_notify."""
    certificate, key = certificates().write(tmp_path)
    with captured_log() as log:
        async with live(certfile=certificate, keyfile=key, write_timeout=0.5, header_timeout=0.7) as stage:
            lower = await stage.open(receive_buffer=2048)
            client = trio.SSLStream(lower, certificates().client, server_hostname="localhost", https_compatible=True)
            await client.send_all(get("/events?events=100000&size=4000"))
            reset = await stage.open(b"\x16\x03\x01\x02\x00")
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            reset.socket.close()
            await stage.open(get("/healthz"))
            await stage.open()
            begin = trio.current_time()
            assert await stage.wait_outcomes(1) == [Outcome.CLIENT_STALLED]
            await stage.wait_connections(0)
            assert trio.current_time() - begin < 10
            stage.check_idle()
    check_quiet(log)


@cases.settles("T25")
@pytest.mark.parametrize("line", [b"X: a\x00b", b"X: a\rb", b"X: a\nb", b": x", b"Host: t"], ids=repr)
async def test_t25_control_bytes(line: bytes, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    transcript = await converse(stage, [b"GET /healthz HTTP/1.1\r\nHost: t\r\n" + line + b"\r\n\r\n" + get("/metrics")])
    (answer,) = transcript.answers("GET", "GET")
    assert (answer.status, answer.headers["connection"]) == (400, "close")


@cases.settles("T25")
async def test_t25_no_host_and_opaque_values(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    assert (await ask(stage, b"GET /healthz HTTP/1.1\r\n\r\n"))[0].status == 400
    for header in ("X: \xff", "Authorization: Bearer \xff", "X-Request-Id: \xff", "Last-Event-ID: \xff", "Content-Type: \xff"):
        assert (await ask(stage, get("/events?events=1", header)))[0].status == 200
        assert (await ask(stage, post("/generate", {"prompt": "hi"}, header)))[0].status == 200


@cases.settles("T26")
@pytest.mark.net
async def test_t26_health_checks_and_leaving_make_no_noise() -> None:
    with captured_log() as log:
        async with live(script=Script(events=1000, interval_ms=5), slots=200) as stage:
            for number in range(1000):
                stream = await stage.open(post("/generate", {"prompt": "hi"}) if number % 10 == 0 else b"")
                if number % 20 == 0:
                    await stream.receive_some(1000)
                stream.socket.close()
            stage.streams.clear()
            await stage.wait_connections(0)
            stage.check_idle()
    check_quiet(log)
    assert [entry.getMessage() for entry in log].count("request") == len(stage.records) <= 100
