"""The scenarios: every way of using the server that has a life of its own."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from tests.faults.scene import Client, Scenario, ServerScene
from tests.faults.tls_client import over_tls
from tests.support.stage import get, post
from trio_sse.script import Script
from trio_sse.trace import Outcome

__all__ = ["SCENARIOS"]

GENERATE = post("/generate", {"prompt": "hi there", "max_new_tokens": 3}, "X-Request-Id: one")
SECOND = post("/generate", {"prompt": "again", "max_new_tokens": 2}, "X-Request-Id: two")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
JSON = post("/v1/completions", {"prompt": "hi", "max_tokens": 3}, "X-Request-Id: one")
JSON_END = b"total_tokens"
LONG_JOB = post("/generate", {"prompt": "other", "max_new_tokens": 3}, "X-Request-Id: other")

DRAINS = Script(events=4, interval_ms=50, cancellation="must_drain")
FAILS = Script(events=3, fail_at=2)
SLOW = Script(events=3, interval_ms=1500)


def asks(*requests: bytes, mark: bytes = b"0\r\n\r\n", half_close: bool = False) -> Client:
    """Sends all at once (pipelined where there are several) and waits for as many answers."""

    async def client(scene: ServerScene) -> None:
        peer = scene.connect()
        peer.send(b"".join(requests))
        if half_close:
            peer.shutdown_write()
        await scene.until(len(requests), mark)

    return client


async def one_by_one(scene: ServerScene) -> None:
    scene.connect()
    for n, request in enumerate((GENERATE, SECOND), start=1):
        scene.say(request)
        await scene.until(n)


async def waits_for_a_slot(scene: ServerScene) -> None:
    """Somebody else has the only slot for a while, and a third one stands behind us."""
    other, third = scene.dial(), scene.dial()
    other.send(LONG_JOB)
    await wait_all_tasks_blocked()
    scene.connect().send(GENERATE)
    await wait_all_tasks_blocked()
    third.send(post("/generate", {"prompt": "third", "max_new_tokens": 1}))
    await scene.until(1)
    for peer in (other, third):
        while not (peer.ended or peer.aborted) and b"[DONE]" not in peer.received:
            await peer.wait_news()
        peer.close()


async def slow_reader(scene: ServerScene) -> None:
    peer = scene.connect()
    peer.stall()
    peer.send(GENERATE)
    while not (peer.ended or peer.aborted) and peer.received.count(b"0\r\n\r\n") < 1 and not peer.reading:
        await trio.sleep(0.1)
        peer.read(30)
    await scene.until(1)


async def reads_late(scene: ServerScene) -> None:
    """A burst into a window that is too small for it; the client reads it two seconds later."""
    peer = scene.connect()
    peer.stall()
    peer.send(GENERATE)
    await trio.sleep(2)
    peer.resume()
    await scene.until(1)


async def slow_upload(scene: ServerScene) -> None:
    scene.connect()
    head, _, body = post("/generate", {"prompt": "hi there", "max_new_tokens": 3}, "Expect: 100-continue", "X-Request-Id: one").partition(
        b"\r\n\r\n"
    )
    for piece in (head[:20], head[20:] + b"\r\n\r\n", body[:10], body[10:]):
        await trio.sleep(0.5)
        scene.say(piece)
    await scene.until(1)


async def refused_upload(scene: ServerScene) -> None:
    """Refused by its declared length, while the client is still sending."""
    scene.connect()
    scene.say(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999\r\n\r\n{")
    for _ in range(3):
        await trio.sleep(0.5)
        scene.say(b"x" * 1000)
    await scene.until(1, b'"param"')
    peer = scene.peer
    if peer is not None and not peer.closed:
        peer.shutdown_write()


async def makes_room(scene: ServerScene) -> None:
    """At the connection limit: somebody who is idle has to go for us."""
    other = scene.dial()
    other.send(get("/healthz"))
    await wait_all_tasks_blocked()
    scene.connect()
    scene.say(GENERATE)
    await scene.until(1)
    other.close()


async def two_streams(scene: ServerScene) -> None:
    """A neighbour in the same model steps."""
    other = scene.dial()
    other.send(LONG_JOB)
    scene.connect().send(GENERATE)
    await scene.until(1)
    while not (other.ended or other.aborted) and b"[DONE]" not in other.received:
        await other.wait_news()
    other.close()


LATE = frozenset({Outcome.COMPLETED, Outcome.DEADLINE_EXCEEDED})
UPLOADED = frozenset({Outcome.COMPLETED, Outcome.CLIENT_DISCONNECTED, Outcome.REJECTED})  # half a request is refused, or just gone
TLS_CUT = frozenset({Outcome.COMPLETED, Outcome.CLIENT_DISCONNECTED})  # end of file without close_notify is no half-close

_ALL = [
    Scenario("stream", asks(GENERATE)),
    Scenario("json", asks(JSON, mark=JSON_END)),
    Scenario("chat", asks(post("/v1/chat/completions", {**CHAT, "stream": True}, "X-Request-Id: one"))),
    Scenario("chat-json", asks(post("/v1/chat/completions", CHAT, "X-Request-Id: one"), mark=JSON_END)),
    Scenario(
        "completion-usage",
        asks(
            post(
                "/v1/completions",
                {"prompt": "hi", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
                "X-Request-Id: one",
            )
        ),
    ),
    Scenario("events", asks(get("/events?events=4&interval_ms=20&tool_every=2", "X-Request-Id: one")), ("GET",)),
    Scenario("burst", asks(GENERATE), script=Script(events=3)),
    Scenario("must-drain", asks(GENERATE), script=DRAINS),
    Scenario("must-drain-json", asks(JSON, mark=JSON_END), script=DRAINS),
    Scenario("must-drain-burst", reads_late, script=Script(events=3, cancellation="must_drain"), window=40),
    Scenario("waiting", waits_for_a_slot, script=Script(events=3, interval_ms=1000)),
    Scenario("waiting-must-drain", waits_for_a_slot, script=DRAINS),
    Scenario(
        "waiting-too-long",
        waits_for_a_slot,
        script=SLOW,
        options={"queue_timeout": 2.0},
        outcomes=frozenset({Outcome.REJECTED, Outcome.COMPLETED}),
    ),
    Scenario("prefill", asks(GENERATE), script=Script(events=2, prefill_ms=500)),
    Scenario("prefill-half-closed-json", asks(JSON, mark=JSON_END, half_close=True), script=Script(events=2, prefill_ms=3000)),
    Scenario("pipelined", asks(GENERATE, SECOND), ("POST", "POST")),
    Scenario("keep-alive", one_by_one, ("POST", "POST")),
    Scenario("heartbeat", asks(GENERATE), script=Script(events=2, interval_ms=200), options={"heartbeat": 0.07}),
    Scenario("heartbeat-in-prefill", asks(GENERATE), script=Script(events=1, prefill_ms=300), options={"heartbeat": 0.07}),
    Scenario("half-closed", asks(GENERATE, half_close=True), script=SLOW),
    Scenario("error-after-head", asks(GENERATE), script=FAILS, outcomes=frozenset({Outcome.BACKEND_ERROR})),
    Scenario("error-in-json", asks(JSON, mark=b"upstream_failed"), script=FAILS, outcomes=frozenset({Outcome.BACKEND_ERROR})),
    Scenario("deadline-in-stream", asks(GENERATE), script=SLOW, options={"request_deadline": 2.0}, outcomes=LATE),
    Scenario("deadline-in-json", asks(JSON, mark=b"deadline_exceeded"), script=SLOW, options={"request_deadline": 2.0}, outcomes=LATE),
    Scenario("deadline-must-drain", asks(GENERATE), script=DRAINS, options={"request_deadline": 0.12}, outcomes=LATE),
    Scenario("slow-reader", slow_reader, window=40),
    Scenario("reads-late", reads_late, script=Script(events=3), window=40),
    Scenario("upload", slow_upload, outcomes=UPLOADED),
    Scenario("http-1.0", asks(GENERATE.replace(b"HTTP/1.1", b"HTTP/1.0"), mark=b"[DONE]\n\n")),
    Scenario("refused", asks(post("/generate", {"prompt": ""}), mark=b'"param"'), outcomes=frozenset({Outcome.REJECTED})),
    Scenario("refused-upload", refused_upload, outcomes=frozenset({Outcome.REJECTED})),
    Scenario("makes-room", makes_room, options={"max_connections": 1}),
    Scenario("tls", over_tls(GENERATE), outcomes=TLS_CUT),
    Scenario("tls-json", over_tls(JSON, JSON_END), outcomes=TLS_CUT),
    Scenario("tls-half-closed", over_tls(GENERATE, half_close=True), script=SLOW, outcomes=TLS_CUT),
    Scenario("small", asks(get("/healthz"), get("/v1/models"), mark=b"}"), ("GET", "GET")),
    Scenario("engine", asks(GENERATE), script=None),
    Scenario("engine-chat", asks(post("/v1/chat/completions", {**CHAT, "stream": True}, "X-Request-Id: one")), script=None),
    Scenario("engine-json", asks(JSON, mark=JSON_END), script=None),
    Scenario("engine-two", two_streams, script=None),
    Scenario("engine-slow-reader", slow_reader, script=None, window=40),
]
SCENARIOS = {scenario.name: scenario for scenario in _ALL}
