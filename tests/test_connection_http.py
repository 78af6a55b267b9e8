"""What HTTP/1.1 asks of a server, on the fake clock: reuse, pipelining, Expect, HEAD, deadlines, limits, refusals that arrive."""

from __future__ import annotations

import json

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.capture import captured_log, check_quiet
from tests.support.stage import Answer, Stage, answers, get, peer_answer, post
from trio_sse.config import Config
from trio_sse.http11 import LINGER_BYTES, LINGER_SECONDS, READ_AHEAD, Http11Connection
from trio_sse.script import Script
from trio_sse.simulated import SimulatedPeer, SimulatedTransport
from trio_sse.trace import Outcome

PROMPT = {"prompt": "hi", "max_new_tokens": 2}


async def wait_answers(peer: SimulatedPeer, *methods: str) -> list[Answer]:
    """Waits for a whole answer to each of ``methods``, or for the end."""
    while True:
        closed = peer.ended or peer.aborted
        found = answers(bytes(peer.received), *methods, closed=closed)
        if closed or (len(found) == len(methods) and found[-1].complete):
            return found
        await peer.wait_news()


# ---- Reuse and pipelining ----


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (post("/generate", PROMPT), 200),
        (post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}), 200),
        (post("/generate", {}), 400),
        (get("/nowhere"), 404),
        (get("/generate"), 405),
        (get("/v1/models/nothing"), 404),
        (get("/healthz", method="HEAD"), 200),
        (get("/events?events=3&fail_at=0"), 200),
    ],
    ids=["stream", "document", "400", "404", "405", "404-model", "HEAD", "failed-stream"],
)
async def test_reuse(first: bytes, status: int, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """The connection lives on after anything that was read and answered to the end; not after an error in band."""
    stage = Stage(nursery, script=Script(events=2, interval_ms=10))
    peer = stage.connect()
    method = first.split()[0].decode()
    peer.send(first)
    assert (await wait_answers(peer, method))[0].status == status
    await wait_all_tasks_blocked()
    if b"fail_at" in first:
        assert peer.ended
        return
    peer.send(get("/healthz"))
    _, second = await wait_answers(peer, method, "GET")
    assert second.body == b'{"status":"ok"}'
    assert stage.connections == 1


async def test_idle_connection_ends_in_silence(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, keep_alive=5.0)
    peer = stage.connect()
    for _ in range(3):
        await trio.sleep(4.9)
        peer.send(get("/healthz"))
        await wait_all_tasks_blocked()
        assert not peer.ended
    said = bytes(peer.received)
    begin = trio.current_time()
    await peer.wait_closed()
    assert trio.current_time() - begin == pytest.approx(5.0)
    assert bytes(peer.received) == said
    assert not peer.aborted


async def test_pipelined_behind_a_stream(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """In order, and the second begins when the first has ended."""
    stage = Stage(nursery, script=Script(events=3, interval_ms=100))
    peer = stage.connect()
    peer.send(post("/generate", PROMPT) + get("/healthz"))
    await trio.sleep(0.05)
    peer.send(get("/nowhere") + post("/generate", PROMPT))
    first, health, nowhere, last = await wait_answers(peer, "POST", "GET", "GET", "POST")
    assert first.body.endswith(b"[DONE]\n\n")
    assert (health.status, nowhere.status) == (200, 404)
    assert last.body == first.body
    await wait_all_tasks_blocked()
    assert [record.route for record in stage.records] == ["/generate", "/healthz", "-", "/generate"]


@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_leaving_is_seen_behind_pipelined_bytes(leave: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    for extra in (get("/healthz"), b"x" * (3 * READ_AHEAD)):
        stage = Stage(nursery, script=Script(events=1000, interval_ms=20))
        peer = stage.connect()
        peer.send(get("/events?events=1000&interval_ms=20"))
        await peer.wait_received(b"id: 3\n")
        peer.send(extra)
        await wait_all_tasks_blocked()
        getattr(peer, leave)()
        await trio.sleep(0.1)
        await stage.settled()
        assert stage.outcomes == [Outcome.CLIENT_DISCONNECTED]
        assert stage.records[0].events_produced <= 4


async def test_pipelining_leaves_the_others_their_turn(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    greedy = stage.connect()
    await wait_all_tasks_blocked()
    greedy.send(get("/healthz") * 1000)
    turns = 0
    while bytes(greedy.received).count(b"200 OK") < 1000:
        await trio.lowlevel.checkpoint()
        turns += 1
    assert turns >= 500


async def test_read_ahead_is_bounded(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Past the bound bytes are thrown away and the connection ends with the response, without a half-read request being run."""
    stage = Stage(nursery)
    peer = stage.connect()
    peer.send(get("/events?events=10&interval_ms=20"))
    await peer.wait_received(b"id: 1\n")
    for _ in range(40):
        peer.send(get("/metrics") * 100)
        await wait_all_tasks_blocked()
    found = await wait_answers(peer, *["GET"] * 5)
    assert [answer.status for answer in found] == [200]
    assert found[0].complete
    assert [record.route for record in stage.records] == ["/events"]


async def test_read_ahead_is_bounded_over_many_responses(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Each response lets in what the last one has left room for, not the whole bound again."""
    stage = Stage(nursery)
    peer = stage.connect()
    one = get("/events?events=1&interval_ms=1")
    total = 0
    while not peer.ended and total < 100 * READ_AHEAD:
        peer.send(one * 200)
        total += len(one) * 200
        await trio.sleep(0.001)
    assert total < 3 * READ_AHEAD


@pytest.mark.parametrize("arrives", [True, False], ids=["came-before", "did-not-come"])
async def test_hung_up_while_the_others_have_their_turn(arrives: bool, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Between two requests a connection lets the others go first. What has come when it goes on is served, hung up or not."""
    transport = SimulatedTransport(65536)
    connection = Http11Connection(transport, Config())
    transport.client.send(get("/first"))
    assert await connection.next_request() is not None
    assert connection.take_no_body()
    await connection.respond(200, [], b"")
    assert connection.next_cycle()

    async def another() -> None:  # noqa: ASYNC124  (a task)
        if arrives:
            transport.client.send(get("/second"))
        connection.hang_up()

    nursery.start_soon(another)
    request = await connection.next_request()
    assert (request.path if request is not None else None) == ("/second" if arrives else None)
    assert trio.current_time() == 0


# ---- Expect, HEAD, OPTIONS, HTTP/1.0 ----


async def test_expect(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """The body is asked for only where it will be taken."""
    stage = Stage(nursery, script=Script(events=100, interval_ms=100), api_key=("k",))
    key = "Authorization: Bearer k"
    whole = post("/generate", PROMPT, key, "Expect: 100-continue")
    head, body = whole[: -len(json.dumps(PROMPT))], whole[-len(json.dumps(PROMPT)) :]
    peer = stage.connect()
    peer.send(head)
    await wait_all_tasks_blocked()
    assert peer.received == b"HTTP/1.1 100 Continue\r\n\r\n"
    peer.send(body)
    await peer.wait_received(b"w1 ")
    refused = {
        "401": post("/generate", PROMPT, "Expect: 100-continue"),
        "404": post("/nowhere", PROMPT, key, "Expect: 100-continue"),
        "405": post("/healthz", PROMPT, key, "Expect: 100-continue"),
        "413": post("/generate", None, key, "Expect: 100-continue", raw=b"x" * 20_000),
        "415": post("/generate", PROMPT, key, "Content-Type: multipart/form-data", "Expect: 100-continue"),
        "429": whole,  # the only slot is taken
    }
    for status, raw in refused.items():
        other = stage.connect()
        other.send(raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        await wait_all_tasks_blocked()
        assert other.received.startswith(f"HTTP/1.1 {status} ".encode()), status
        assert b"100 Continue" not in other.received
        assert b"connection: close" in other.received.lower()


async def test_expect_on_http_1_0_is_ignored(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    peer = stage.connect()
    raw = post("/generate", PROMPT, "Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    peer.send(raw[:-5])
    await wait_all_tasks_blocked()
    assert not peer.received
    peer.send(raw[-5:])
    assert (await peer_answer(peer)).status == 200


async def test_head_says_what_get_would(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    targets = ["/healthz", "/readyz", "/v1/models", "/v1/models/scripted", "/traces", "/events?events=3", "/events?events=x", "/nowhere"]
    for target in targets:
        peer = stage.connect()
        own = f"X-Request-Id: {targets.index(target)}"
        peer.send(get(target, own, method="HEAD") + get(target, own))
        head, whole = await wait_answers(peer, "HEAD", "GET")
        assert head.body == b""
        assert head.status == whole.status
        del head.headers["date"], whole.headers["date"]
        if target != "/traces":  # each request adds to it
            assert head.headers == whole.headers
    assert stage.script_backend.steps == 3  # GET's: HEAD has started nothing
    metrics = stage.connect()
    metrics.send(get("/metrics", method="HEAD") + get("/healthz"))
    assert [answer.status for answer in await wait_answers(metrics, "HEAD", "GET")] == [200, 200]


async def test_options_and_405(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    for target, allow in (
        ("/healthz", "GET, HEAD, OPTIONS"),
        ("/generate", "POST, OPTIONS"),
        ("/v1/chat/completions", "POST, OPTIONS"),
        ("/requests/x", "DELETE, OPTIONS"),
        ("/traces/x", "GET, HEAD, OPTIONS"),
    ):
        peer = stage.connect()
        peer.send(get(target, method="OPTIONS") + get(target, method="PUT") + get("/healthz"))
        options, put, _ = await wait_answers(peer, "OPTIONS", "PUT", "GET")
        assert (options.status, options.headers["allow"], options.body) == (204, allow, b"")
        assert (put.status, put.headers["allow"]) == (405, allow)
        assert put.error["code"] == "method_not_allowed"


async def test_http_1_0_stream_ends_with_the_connection(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    peer = stage.connect()
    peer.send(get("/events?events=3&interval_ms=10", "Connection: keep-alive", version="1.0"))
    await peer.wait_closed()
    head, _, body = bytes(peer.received).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body.startswith(b"event: token\nid: 1\n")
    assert body.endswith(b'event: done\nid: 3\ndata: {"seq":3}\n\n')
    assert not peer.aborted
    assert stage.outcomes == [Outcome.COMPLETED]


async def test_every_response_has_date_and_id(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    for raw in (get("/healthz"), get("/nowhere"), get("/events?events=1"), b"nonsense\r\n\r\n", post("/generate", {})):
        peer = stage.connect()
        peer.send(raw)
        answer = await peer_answer(peer, "GET")
        assert len(answer.headers["x-request-id"]) == 32
        assert answer.headers["date"].endswith(" GMT")


# ---- Slow and silent clients ----


async def test_silent_connection_is_closed_without_a_word(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, header_timeout=10.0)
    peer = stage.connect()
    begin = trio.current_time()
    await peer.wait_closed()
    assert trio.current_time() - begin == pytest.approx(10.0)
    assert not peer.received
    assert not stage.records


async def test_head_deadline_is_absolute(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """One byte a second does not move it: on the first request from the connection's begin, later from the first byte."""
    stage = Stage(nursery, header_timeout=10.0, keep_alive=5.0)
    for before, waited in ((b"", 10.0), (get("/healthz"), 14.0)):
        peer = stage.connect()
        peer.send(before)
        await wait_all_tasks_blocked()
        begin = trio.current_time()
        await trio.sleep(4 if before else 0)
        for byte in b"GET /healthz HTTP/1.1\r\n":
            if b"408" in peer.received:
                break
            peer.send(bytes([byte]))
            await trio.sleep(1)
        assert trio.current_time() - begin == pytest.approx(waited, abs=1.01)
        answer = answers(bytes(peer.received), *(["GET"] * (2 if before else 1)))[-1]
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        peer.close()
        await stage.settled()


async def test_body_deadline_is_absolute(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, body_timeout=30.0)
    peer = stage.connect()
    whole = post("/generate", None, raw=b" " * 100)
    peer.send(whole[:-100])
    begin = trio.current_time()
    while not peer.received:
        peer.send(b" ")
        await trio.sleep(1)
    assert trio.current_time() - begin == pytest.approx(30, abs=1.01)
    answer = await peer_answer(peer)
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    # nor did it hold the only slot
    other = stage.connect()
    other.send(post("/generate", PROMPT))
    assert (await peer_answer(other)).status == 200
    await wait_all_tasks_blocked()
    assert stage.outcomes == [Outcome.REJECTED, Outcome.COMPLETED]


async def test_deadlines_end_with_the_request(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """A response may take longer than head, body and idle time together."""
    stage = Stage(nursery, script=Script(events=10, interval_ms=20_000), header_timeout=1.0, body_timeout=1.0, keep_alive=1.0)
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "hi", "max_new_tokens": 10}))
    answer = await peer_answer(peer)
    assert answer.complete
    assert trio.current_time() >= 200
    await wait_all_tasks_blocked()
    assert stage.outcomes == [Outcome.COMPLETED]


async def test_unfinished_upload_holds_no_slot(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    uploads = [stage.connect() for _ in range(5)]
    for peer in uploads:
        peer.send(post("/generate", None, raw=b"x" * 5000)[:-4990])
    await wait_all_tasks_blocked()
    assert stage.server.routes.admission.running == 0
    peer = stage.connect()
    peer.send(post("/generate", PROMPT))
    assert (await peer_answer(peer)).status == 200
    for peer in uploads[:3]:
        peer.reset()
    uploads[3].close()
    await wait_all_tasks_blocked()
    assert stage.outcomes.count(Outcome.CLIENT_DISCONNECTED) == 4


# ---- Limits, and refusals that arrive ----


async def test_head_limit(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    for size, status in ((15_000, 200), (16_384, 200), (16_385, 431), (40_000, 431)):
        peer = stage.connect()
        head = get("/healthz", "X: ")
        peer.send(head.replace(b"X: ", b"X: " + b"x" * (size - len(head))))
        answer = await peer_answer(peer, "GET")
        assert answer.status == status
    endless = stage.connect()
    for _ in range(100):
        endless.send(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 10_000)
        await wait_all_tasks_blocked()
    assert (await peer_answer(endless, "GET")).error["code"] == "head_too_large"


async def test_body_limits(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """By the declared length before anything is read, by the decoded length while reading."""
    stage = Stage(nursery, max_body=1_000_000)
    for path, headers, body, status in (
        ("/v1/chat/completions", ("Content-Length: 99999999999999",), b"", 413),
        ("/generate", ("Content-Length: 16385",), b"", 413),
        ("/healthz", ("Content-Length: 1000001",), b"", 413),
        ("/v1/chat/completions", ("Transfer-Encoding: chunked",), b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n", 413),
    ):
        peer = stage.connect()
        method = "GET" if path == "/healthz" else "POST"
        peer.send(f"{method} {path} HTTP/1.1\r\nHost: t\r\n{headers[0]}\r\n\r\n".encode())
        sent = 0
        while body and not peer.received and sent < 40:
            peer.send(body)
            sent += 1
            await wait_all_tasks_blocked()
        assert sent * 0xFFFF < 1_100_000
        answer = await peer_answer(peer)
        assert (answer.status, answer.error["code"]) == (status, "body_too_large")
        assert answer.headers["connection"] == "close"


async def test_refusal_waits_for_a_client_that_is_still_sending(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, api_key=("k",))
    with captured_log() as log:
        peer = stage.connect()
        peer.send(post("/generate", None, raw=b"x" * 8_000_000)[:1000])
        assert (await peer_answer(peer)).status == 401
        for _ in range(25):
            peer.send(b"x" * 300_000)
            await trio.sleep(1)
            assert not peer.aborted
        peer.close()
        await wait_all_tasks_blocked()
        assert not peer.aborted
    check_quiet(log)
    await stage.settled()


async def test_lingering_is_bounded(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    slow, much = stage.connect(), stage.connect()
    for peer in (slow, much):
        peer.send(get("/nowhere", "Content-Length: 999999999"))
    await wait_all_tasks_blocked()
    begin = trio.current_time()
    sent = 0
    while sent < 2 * LINGER_BYTES and stage.connections == 2:
        much.send(b"x" * 1_000_000)
        sent += 1_000_000
        await wait_all_tasks_blocked()
    assert LINGER_BYTES <= sent <= LINGER_BYTES + 1_000_000
    assert trio.current_time() == begin
    while stage.connections:
        slow.send(b"x")
        await trio.sleep(1)
    assert trio.current_time() - begin == pytest.approx(LINGER_SECONDS, abs=1.01)


# ---- Half-closed clients ----


async def test_half_closed_json_client(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Before the head the probes are the bytes that it begins with anyway: at once, then one a second."""
    stage = Stage(nursery, script=Script(events=3, interval_ms=1500))
    peer = stage.connect()
    peer.send(post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}))
    peer.shutdown_write()
    await wait_all_tasks_blocked()
    assert peer.received == b"H"
    await trio.sleep(3.5)
    assert peer.received == b"HTTP"
    answer = await peer_answer(peer)
    assert answer.status == 200
    assert json.loads(answer.body)["usage"]["completion_tokens"] == 3
    await wait_all_tasks_blocked()
    assert stage.outcomes == [Outcome.COMPLETED]
    assert peer.ended
    assert not peer.aborted


async def test_half_closed_client_that_waits_longer_than_there_are_probes(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=1, prefill_ms=30_000))
    peer = stage.connect()
    peer.send(post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}))
    peer.shutdown_write()
    await trio.sleep(20)
    assert peer.received == b"HTTP/1.1 "
    answer = await peer_answer(peer)
    assert (answer.status, answer.complete) == (200, True)


@pytest.mark.parametrize("wait", ["stream", "json", "slot", "prefill"])
async def test_half_closed_then_closed(wait: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """A client that half-closes first and leaves later is found by the next probe, whatever it waits for."""
    stage = Stage(nursery, script=Script(events=100, interval_ms=5000, prefill_ms=60_000 * (wait == "prefill")), queue=1)
    if wait == "slot":
        stage.connect().send(post("/generate", {"prompt": "hi", "max_new_tokens": 100}))
        await wait_all_tasks_blocked()
    peer = stage.connect()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    peer.send(post("/v1/chat/completions", body | {"stream": wait in ("stream", "prefill")}))
    await wait_all_tasks_blocked()
    peer.shutdown_write()
    await trio.sleep(2.5)
    assert not stage.records
    peer.close()
    await trio.sleep(1)
    assert [(record.outcome, record.witness) for record in stage.records] == [(Outcome.CLIENT_DISCONNECTED, "reset_after_eof")]
    assert stage.server.routes.admission.waiting == 0
    assert stage.server.routes.admission.running == (wait == "slot")


async def test_half_closed_client_gets_small_answers(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """``printf … | nc -N``: all requests and the end come in one go."""
    stage = Stage(nursery)
    peer = stage.connect()
    peer.send(get("/healthz") + get("/nowhere") + get("/events?events=2&interval_ms=10"))
    peer.shutdown_write()
    found = await wait_answers(peer, "GET", "GET", "GET")
    assert [answer.status for answer in found] == [200, 404, 200]
    assert found[-1].complete
    await peer.wait_closed()
    assert not peer.aborted
    await stage.settled()


# ---- The connection limit ----


async def test_at_the_limit_the_longest_idle_goes(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, max_connections=4, keep_alive=100.0, header_timeout=100.0)
    busy, half, first, second = (stage.connect() for _ in range(4))
    busy.send(get("/events?events=1000&interval_ms=1000"))
    half.send(b"GET /heal")
    await trio.sleep(1)
    first.send(get("/healthz"))  # idle again from 1 s on; the second one has been idle since 0 s
    await trio.sleep(1)
    third = stage.connect()
    await wait_all_tasks_blocked()
    assert (second.ended, first.ended, stage.connections) == (True, False, 4)
    fourth = stage.connect()
    await wait_all_tasks_blocked()
    assert (first.ended, third.ended, stage.connections) == (True, False, 4)
    for peer in (third, fourth):
        peer.send(b"GET /heal")
    await wait_all_tasks_blocked()
    refused = stage.connect()
    refused.send(get("/healthz"))
    answer = await peer_answer(refused, "GET")
    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "too_many_connections", "1")
    assert not busy.ended
    half.send(b"thz HTTP/1.1\r\nHost: t\r\n\r\n")
    assert (await peer_answer(half, "GET")).status == 200


async def test_hanging_up_loses_no_request(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """The room is asked for in the very instant in which an idle client's request arrives: the request is served."""
    stage = Stage(nursery, max_connections=1)
    first = stage.connect()
    await wait_all_tasks_blocked()
    first.send(get("/healthz"))
    second = stage.connect()
    await wait_all_tasks_blocked()
    assert b"200 OK" in first.received or not first.received
    if not first.received:  # it was hung up before its request had come: then the newcomer is served
        second.send(get("/healthz"))
        assert (await peer_answer(second, "GET")).status == 200
