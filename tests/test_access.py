"""API keys, web pages' origins, request ids, cancelling by id."""

from __future__ import annotations

import os

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.capture import captured_log
from tests.support.stage import Answer, Stage, get, peer_answer, post
from trio_sse.access import Access, is_loopback, request_id
from trio_sse.errors import Forbidden, Unauthorized
from trio_sse.script import Script
from trio_sse.simulated import SimulatedPeer
from trio_sse.trace import Outcome

PAGE = "https://page.example"


async def ask(stage: Stage, raw: bytes) -> Answer:
    peer = stage.connect()
    peer.send(raw)
    return await peer_answer(peer, raw.split()[0].decode())


# ---- Keys ----


@pytest.mark.parametrize(
    ("given", "owner"),
    [
        ([b"Bearer k1"], 0), ([b"Bearer k2"], 1), ([b"bearer k1"], 0), ([b"BEARER k1"], 0), ([b"Bearer  k1"], 0), ([b"Bearer k1 "], 0),
        ([b"Bearer \xc3\xa9"], 2), ([b"Bearer a b"], 3),
        ([], None), ([b""], None), ([b"k1"], None), ([b"Basic k1"], None), ([b"Bearer"], None), ([b"Bearer k"], None),
        ([b"Bearer k11"], None),
        ([b"Bearer\tk1"], None), ([b"Bearerk1"], None), ([b"Bearer K1"], None), ([b"Bearer \xff"], None), ([b"Bearer \xe9"], None),
        ([b"Bearer k1", b"Bearer k1"], None), ([b"Bearer k1", b"Basic x"], None), ([b"Bearer k1,k2"], None),
    ],
)  # fmt: skip
def test_keys(given: list[bytes], owner: int | None) -> None:
    access = Access(("k1", "k2", "é", "a b"), (), secure=False)
    if owner is None:
        with pytest.raises(Unauthorized) as refused:
            access.owner(given)
        assert refused.value.headers == ((b"WWW-Authenticate", b'Bearer realm="trio_sse"'),)
    else:
        assert access.owner(given) == owner


def test_no_key_is_asked_for_where_there_is_none() -> None:
    assert Access((), (), secure=False).owner([b"Bearer whatever"]) is None


def test_key_of_undecodable_bytes_from_the_environment() -> None:
    assert Access((os.fsdecode(b"\xff"),), (), secure=False).owner([b"Bearer \xff"]) == 0


async def test_keys_guard_everything_but_health(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, api_key=("secret-key", "other"))
    for path in ("/healthz", "/readyz"):
        assert (await ask(stage, get(path))).status == 200
    closed = [get("/metrics"), get("/v1/models"), get("/events"), get("/traces"), get("/requests/x", method="DELETE")]
    closed.append(post("/generate", {}))
    with captured_log() as log:
        for raw in closed:
            answer = await ask(stage, raw)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"].startswith("Bearer")
            wrong = raw.replace(b"Host: t", b"Host: t\r\nAuthorization: Bearer secret-kez\xff")
            assert (await ask(stage, wrong)).status == 401
            right = raw.replace(b"Host: t", b"Host: t\r\nAuthorization: bearer secret-key")
            assert (await ask(stage, right)).status in (200, 400, 404)
    assert len(log) == 3 * len(closed)
    told = " ".join(str(vars(entry)) for entry in log)
    assert "secret" not in told
    await stage.settled()


# ---- Web pages ----


@pytest.mark.parametrize(
    ("origin", "local", "fine"),
    [
        (None, ("127.0.0.1", 8766), True),
        (b"http://127.0.0.1:8766", ("127.0.0.1", 8766), True),
        (b"http://localhost:8766", ("127.0.0.1", 8766), True),
        (b"http://[::1]:8766", ("127.0.0.1", 8766), True),
        (b"HTTP://LocalHost:8766", ("127.0.0.1", 8766), True),
        (b"http://localhost:8766", ("::1", 8766), True),
        (b"http://127.0.0.1:8766", ("::ffff:127.0.0.1", 8766), True),
        (b"http://127.0.0.2:8766", ("127.0.0.2", 8766), True),
        (b"http://localhost", ("127.0.0.1", 80), True),
        (b"http://192.168.0.9:8766", ("192.168.0.9", 8766), True),
        (b"https://page.example", ("127.0.0.1", 8766), True),
        (b"http://localhost:8767", ("127.0.0.1", 8766), False),  # another server's page
        (b"http://localhost", ("127.0.0.1", 8766), False),
        (b"https://localhost:8766", ("127.0.0.1", 8766), False),
        (b"http://evil.example", ("127.0.0.1", 8766), False),  # drive-by
        (b"http://evil.example:8766", ("127.0.0.1", 8766), False),  # rebinding: a name of its own for our address
        (b"http://localhost.evil.example:8766", ("127.0.0.1", 8766), False),
        (b"http://localhost:8766@evil.example", ("127.0.0.1", 8766), False),
        (b"http://localhost:8766", ("192.168.0.9", 8766), False),
        (b"http://page.example", ("127.0.0.1", 8766), False),
        (b"https://page.example.evil.example", ("127.0.0.1", 8766), False),
        (b"null", ("127.0.0.1", 8766), False),
        (b"", ("127.0.0.1", 8766), False),
        (b"\xff", ("127.0.0.1", 8766), False),
        (b"http://localhost:8766", None, False),  # a Unix socket: whatever stands before it has to be named
        (b"https://page.example", None, True),
    ],
)
def test_origins(origin: bytes | None, local: tuple[str, int] | None, fine: bool) -> None:
    access = Access((), (PAGE,), secure=False)
    if fine:
        access.check_origin(origin, local)
    else:
        with pytest.raises(Forbidden):
            access.check_origin(origin, local)


def test_own_origin_over_tls() -> None:
    access = Access((), (), secure=True)
    access.check_origin(b"https://localhost:8766", ("127.0.0.1", 8766))
    access.check_origin(b"https://127.0.0.1", ("127.0.0.1", 443))
    with pytest.raises(Forbidden):
        access.check_origin(b"http://localhost:8766", ("127.0.0.1", 8766))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("127.evil.example", False), ("127.0.0.1.evil.example", False), ("", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


async def test_strange_origin_starts_nothing(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """A page may send a "simple" POST without asking: it is refused before anything is done, whatever Host it claims."""
    stage = Stage(nursery)
    for host in ("127.0.0.1:8766", "evil.example"):
        raw = post("/generate", {"prompt": "hi"}, "Origin: http://evil.example", "Content-Type: text/plain")
        answer = await ask(stage, raw.replace(b"Host: t", f"Host: {host}".encode()))
        assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers
    assert (await ask(stage, get("/healthz", "Origin: null"))).status == 403
    assert stage.backend.steps == 0  # type: ignore[attr-defined]


async def test_preflight_needs_no_key(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, api_key=("k",), cors_origin=(PAGE,))
    asked = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type,x-stainless-os")
    answer = await ask(stage, get("/v1/chat/completions", f"Origin: {PAGE}", *asked, method="OPTIONS"))
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert answer.headers["vary"] == "Origin"
    refused = await ask(stage, get("/v1/chat/completions", "Origin: https://evil.example", *asked, method="OPTIONS"))
    assert refused.status == 403
    assert "access-control-allow-origin" not in refused.headers


async def test_cors_headers_on_streams_and_errors_too(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=2, interval_ms=10), api_key=("k",), cors_origin=(PAGE,))
    key, origin = "Authorization: Bearer k", f"Origin: {PAGE}"
    for raw, status in (
        (post("/generate", {"prompt": "hi"}, key, origin), 200),
        (post("/v1/completions", {"model": "m", "prompt": "hi"}, key, origin), 200),
        (post("/generate", {}, key, origin), 400),
        (post("/generate", {"prompt": "hi"}, origin), 401),
        (get("/nowhere", key, origin), 404),
        (get("/generate", key, origin), 405),
        (post("/generate", None, key, origin, raw=b"x" * 20000), 413),
    ):
        answer = await ask(stage, raw)
        assert answer.status == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    plain = await ask(stage, get("/healthz"))
    assert "access-control-allow-origin" not in plain.headers
    assert plain.headers["vary"] == "Origin"


# ---- Request ids ----


@pytest.mark.parametrize("fine", ["a", "A-z_0.9", "x" * 128])
def test_own_ids(fine: str) -> None:
    assert request_id(fine.encode(), ()) == fine


@pytest.mark.parametrize("bad", [b"", b"x" * 129, b"a b", b"a/b", b"\xff", b"a\n", b"%0d%0a", b"a\r\nX: y", None])
def test_ids_that_are_replaced(bad: bytes | None) -> None:
    assert len(request_id(bad, ())) == 32


async def test_id_of_a_live_request_is_not_given_again(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """From the head on: two uploads under one id would otherwise be two live requests of one name."""
    stage = Stage(nursery, script=Script(events=100, interval_ms=100), slots=2)
    raw = post("/generate", {"prompt": "hi", "max_new_tokens": 50}, "X-Request-Id: mine")
    first, second = stage.connect(), stage.connect()
    first.send(raw[:-5])
    await wait_all_tasks_blocked()
    second.send(raw)
    await second.wait_received(b"w1 ")
    first.send(raw[-5:])
    await first.wait_received(b"w1 ")
    assert b"X-Request-Id: mine\r\n" in first.received
    assert b"X-Request-Id: mine\r\n" not in second.received
    assert len(stage.server.routes.live) == 2
    for peer in (first, second):
        peer.close()
    await wait_all_tasks_blocked()
    third = stage.connect()
    third.send(raw)
    await third.wait_received(b"X-Request-Id: mine\r\n")  # free again


# ---- DELETE /requests/{id} ----


def start(stage: Stage, name: str, key: str = "a") -> SimulatedPeer:
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "hi", "max_new_tokens": 100}, f"X-Request-Id: {name}", f"Authorization: Bearer {key}"))
    return peer


async def test_cancel_by_id(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=100, interval_ms=100), queue=1, api_key=("a", "b"))
    running = start(stage, "running")
    await running.wait_received(b"w2 ")
    waiting = start(stage, "waiting")
    await wait_all_tasks_blocked()

    async def cancel(name: str, key: str) -> Answer:
        return await ask(stage, get(f"/requests/{name}", f"Authorization: Bearer {key}", method="DELETE"))

    assert (await cancel("running", "b")).status == 404  # another key's: not even that it exists is told
    assert (await cancel("unknown", "a")).status == 404
    assert not stage.outcomes.count(Outcome.CANCELLED)

    assert (await cancel("waiting", "a")).status == 202
    answer = await peer_answer(waiting)
    assert (answer.status, answer.error["code"], answer.headers["x-should-retry"]) == (499, "request_cancelled", "false")

    steps = stage.backend.steps  # type: ignore[attr-defined]
    assert (await cancel("running", "a")).status == 202
    stream = await peer_answer(running)
    assert stream.complete
    assert [event.event for event in stream.events][-1] == "error"
    assert b"[DONE]" not in stream.body
    assert stage.backend.steps - steps <= 1  # type: ignore[attr-defined]
    await wait_all_tasks_blocked()
    assert (await cancel("running", "a")).status == 404  # finished
    assert stage.outcomes.count(Outcome.CANCELLED) == 2
    await stage.settled()


async def test_cancel_twice_while_it_ends(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Must-drain work takes its time: until it has ended, cancelling once more changes nothing."""
    stage = Stage(nursery)
    peer = stage.connect()
    peer.send(get("/events?events=20&interval_ms=100&cancellation=must_drain", "X-Request-Id: drain"))
    await peer.wait_received(b"id: 2\n")
    for _ in range(2):
        assert (await ask(stage, get("/requests/drain", method="DELETE"))).status == 202
        await trio.sleep(0.1)
    await trio.sleep(3)
    assert (await ask(stage, get("/requests/drain", method="DELETE"))).status == 404
    assert [record.outcome for record in stage.records if record.route == "/events"] == [Outcome.CANCELLED]
    await stage.settled()


# ---- The lab ----


@pytest.mark.parametrize("header", ["Forwarded: for=10.0.0.1", "X-Forwarded-For: 10.0.0.1", "Via: 1.1 proxy"])
async def test_the_lab_is_not_for_proxies(header: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    for path in ("/events", "/traces", "/traces/x"):
        answer = await ask(stage, get(path, header))
        assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert (await ask(stage, post("/generate", {"prompt": "hi"}, header))).status == 200
    assert stage.script_backend.steps == 0


@pytest.mark.parametrize(
    ("options", "there"),
    [({"host": "127.0.0.1"}, True), ({"host": "::1"}, True), ({"host": "0.0.0.0"}, False), ({"uds": "/x"}, False),
     ({"host": "0.0.0.0", "lab": True}, True), ({"host": "127.0.0.1", "lab": False}, False)],
)  # fmt: skip
async def test_where_the_lab_is(options: dict[str, object], there: bool, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, **({"lab": None} | options))  # type: ignore[arg-type]
    assert (await ask(stage, get("/events?events=1"))).status == (200 if there else 404)
    assert (await ask(stage, get("/events?events=1", method="OPTIONS"))).status == (204 if there else 404)
    assert (await ask(stage, get("/traces"))).status == (200 if there else 404)
    assert bool(stage.records[0].marks) is there
