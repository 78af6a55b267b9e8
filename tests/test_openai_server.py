"""OpenAI's routes through the whole server, on the fake clock. The letters in the names are the field cases."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.openai_wire import Json, chunks, document_text, parse, read_document, text_of, validate_chunk
from tests.support.stage import Answer, Stage, get, peer_answer, post
from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.errors import BadRequest
from trio_sse.events import Event, Finish, GenerationRequest, Started, Token, TokenLogprob
from trio_sse.script import Script
from trio_sse.trace import Outcome

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SECRET = "secret /etc/path in SecretError"
both = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def body(path: str, **fields: Any) -> Json:
    asked: Json = (
        {"model": "m", "messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"model": "m", "prompt": "hi"}
    )
    return {**asked, **fields}


async def call(stage: Stage, path: str, *headers: str, **fields: Any) -> Answer:
    peer = stage.connect()
    peer.send(post(path, body(path, **fields), *headers))
    return await peer_answer(peer)


class SecretError(Exception):
    pass


class Playing(Backend):
    """Yields ``events``; an exception among them is raised at its place. ``refusal`` is what ``prepare`` says."""

    slots = 4

    def __init__(self, *events: Event | BaseException, refusal: Exception | None = None) -> None:
        self.events = events
        self.refusal = refusal
        self.generated = 0

    async def prepare(self, request: GenerationRequest) -> Prepared:
        await trio.lowlevel.checkpoint()
        if self.refusal is not None:
            raise self.refusal
        return Prepared(request=request, prompt_tokens=7)

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        self.generated += 1
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            await events.send(event)


# --- S14, S15, S13, S08, S09: the two forms of an answer ---


@both
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 20])
async def test_s15_stream_equals_document(path: str, limit: int, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=7, interval_ms=20))
    streamed = await call(stage, path, max_tokens=limit, stream=True, stream_options={"include_usage": True})
    whole = await call(stage, path, max_tokens=limit)
    assert (streamed.status, whole.status) == (200, 200)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert whole.headers["content-type"] == "application/json"
    *others, finish, usage = chunks(streamed.body)
    document = read_document(whole.body)
    assert text_of(others) == document_text(document) != ""
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in (*others, finish)]
    assert reasons == [None] * len(others) + ["length" if limit < 7 else "stop"]
    assert document["choices"][0]["finish_reason"] == reasons[-1]
    assert document["usage"] == usage["usage"]
    assert usage["usage"]["completion_tokens"] == min(limit, 7)
    await stage.settled()
    assert stage.outcomes == [Outcome.COMPLETED] * 2


@both
async def test_s14_ids_differ_between_streams(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    ids = set()
    for _ in range(3):
        found = chunks((await call(stage, path, stream=True)).body)
        assert len({(chunk["id"], chunk["created"]) for chunk in found}) == 1
        ids.add(found[0]["id"])
    assert len(ids) == 3


@both
@pytest.mark.parametrize("stream", [True, False])
async def test_s08_s09_no_token_at_all(path: str, stream: bool, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, Playing(Started(), Finish("stop")))
    answer = await call(stage, path, stream=stream)
    assert answer.complete
    if stream:
        found = chunks(answer.body)
        assert text_of(found) == ""
        assert found[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert document_text(read_document(answer.body)) == ""
    await stage.settled()
    assert stage.outcomes == [Outcome.COMPLETED]


async def test_d11_logprobs_through_the_server(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    entry = TokenLogprob("a", b"a", -0.5, (("a", b"a", -0.5),))
    stage = Stage(nursery, Playing(Started(), Token("", logprobs=(entry,)), Token("aa", logprobs=(entry,)), Finish("stop")))
    found = chunks((await call(stage, CHAT, stream=True, logprobs=True, top_logprobs=1)).body)
    entries = [one for chunk in found for one in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    whole = read_document((await call(stage, CHAT, logprobs=True, top_logprobs=1)).body)
    assert whole["choices"][0]["logprobs"]["content"] == entries
    assert len(entries) == 2


# --- S10, A11: failures ---


@both
@pytest.mark.parametrize("sent", [0, 5])
async def test_s10_failure_after_the_head(path: str, sent: int, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, Playing(Started(), *[Token("a")] * sent, SecretError(SECRET)))
    answer = await call(stage, path, stream=True)
    assert answer.status == 200
    assert answer.complete, "the body ends properly"
    *before, last = [json.loads(event.data) for event in parse(answer.body)]
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in answer.body.decode().lower()
    assert text_of(before) == "a" * sent
    for chunk in before:
        validate_chunk(chunk)
        assert chunk["choices"][0]["finish_reason"] is None
    await stage.settled()
    assert stage.connections == 0, "the connection is closed"
    assert stage.outcomes == [Outcome.BACKEND_ERROR]


@both
async def test_s10_encoder_fails(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    broken = Token("b", logprobs=(TokenLogprob("b", b"b", float("nan")),))
    stage = Stage(nursery, Playing(Started(), Token("a"), broken, Token("c"), Finish("stop")))
    answer = await call(stage, path, stream=True)
    *before, last = [json.loads(event.data) for event in parse(answer.body)]
    assert last["error"]["code"] == "internal_error"
    assert text_of(before) == "a"
    await stage.settled()
    assert stage.outcomes == [Outcome.BACKEND_ERROR]


@both
async def test_s10_deadline_in_mid_stream(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=100, interval_ms=100), request_deadline=0.45)
    answer = await call(stage, path, stream=True, max_tokens=100)
    *before, last = [json.loads(event.data) for event in parse(answer.body)]
    assert last["error"]["code"] == "deadline_exceeded"
    assert {chunk["choices"][0]["finish_reason"] for chunk in before} == {None}
    await stage.settled()
    assert stage.outcomes == [Outcome.DEADLINE_EXCEEDED]


@both
@pytest.mark.parametrize("stream", [True, False])
async def test_a11_failure_before_the_head_is_a_bare_500(
    path: str, stream: bool, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    for backend in (Playing(SecretError(SECRET)), Playing(refusal=SecretError(SECRET))):
        stage = Stage(nursery, backend)
        answer = await call(stage, path, stream=stream)
        assert answer.status == 500
        assert answer.error["code"] == "internal_error"
        assert "secret" not in answer.body.decode().lower()
        assert answer.headers["x-request-id"]
        await stage.settled()


@both
async def test_a11_a_document_that_fails_half_way_is_a_500(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, Playing(Started(), Token("half"), SecretError(SECRET)))
    answer = await call(stage, path)
    assert answer.status == 500
    assert b"half" not in answer.body


# --- S11, A05, A13: what is known before the head is a status, the same for stream and document ---


@both
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 7}, "top_p"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 3}, "n"),
        ({"stop": ""}, "stop"),
        ({"stream_options": "yes"}, "stream_options"),
        ({"temperature": 1e999}, "temperature"),
    ],
    ids=str,
)
async def test_s11_refusals_are_statuses(
    path: str, fields: Json, param: str, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    backend = Playing(Started(), Finish("stop"))
    stage = Stage(nursery, backend)
    whole = await call(stage, path, **fields)
    streamed = await call(stage, path, **fields, stream=True)
    assert (whole.status, whole.error["param"]) == (400, param)
    assert whole.headers["content-type"] == streamed.headers["content-type"] == "application/json"
    assert (streamed.status, streamed.body) == (whole.status, whole.body)
    assert backend.generated == 0
    await stage.settled()
    assert stage.outcomes == [Outcome.REJECTED] * 2


@both
async def test_s11_prompt_beyond_the_context(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    refusal = BadRequest("The prompt is too long.", param="messages", code="context_length_exceeded")
    stage = Stage(nursery, Playing(refusal=refusal))
    whole, streamed = await call(stage, path), await call(stage, path, stream=True)
    assert (whole.status, whole.error["code"]) == (400, "context_length_exceeded")
    assert (streamed.status, streamed.body) == (whole.status, whole.body)


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_a01_lone_surrogate_is_400(stream: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    peer = stage.connect()
    raw = b'{"stream":%s,"messages":[{"role":"user","content":"emoji \\ud83d"}]}' % stream.encode()
    peer.send(post(CHAT, None, raw=raw))
    answer = await peer_answer(peer)
    assert (answer.status, answer.error["param"]) == (400, "messages[0].content")


# --- A12: bodies and their type ---


@both
@pytest.mark.parametrize(
    "raw", [b"", b"null", b"[]", b'"x"', b"1", b"{}", b"{}{}", b'{"messages":1,"prompt":1}', b"\xff\xfe{\0}\0"]
)
async def test_a12_wrong_shaped_bodies(path: str, raw: bytes, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    peer = stage.connect()
    peer.send(post(path, None, raw=raw))
    answer = await peer_answer(peer)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    peer.send(post(path, body(path)))
    await peer.wait_received(b"200 OK")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Content-Type: text/plain", 200),
        ("Content-Type: nonsense", 200),
        ("X-None: 1", 200),
        ("Content-Type: multipart/form-data", 415),
    ],
)
async def test_a12_content_types(header: str, status: int, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    answer = await call(Stage(nursery), CHAT, header)
    assert answer.status == status


async def test_a12_no_body_at_all(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    peer = Stage(nursery).connect()
    peer.send(f"POST {CHAT} HTTP/1.1\r\nHost: t\r\n\r\n".encode())
    assert (await peer_answer(peer)).status == 400


# --- S03, S02: heartbeats ---


@both
async def test_s03_comments_while_the_model_is_silent(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=2, prefill_ms=5500, interval_ms=5500), heartbeat=1.0)
    answer = await call(stage, path, stream=True)
    before, middle, after = answer.body.split(b"w1 ")[0], answer.body.split(b"w1 ")[-1], answer.body.split(b"[DONE]")[1]
    assert before.count(b": hb\n") == 11, "five and a half seconds of prefill and as many for the first token"
    assert middle.count(b": hb\n") == 5
    assert after == b"\n\n"
    assert answer.body.count(b": hb\n\n") == 0, "a blank line would dispatch an empty event"
    assert len(chunks(answer.body)) >= 3


async def test_s03_heartbeat_0_is_none(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=2, interval_ms=60_000), heartbeat=0)
    assert b": hb" not in (await call(stage, CHAT, stream=True)).body


@both
async def test_s04_heartbeats_never_land_inside_an_event(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    # The window is smaller than an event and the reader slow, so a comment falls due in the middle of nearly every write.
    stage = Stage(nursery, script=Script(events=60, size=3000, interval_ms=35), heartbeat=0.01, window=2000)
    peer = stage.connect()
    peer.stall()
    peer.send(post(path, body(path, stream=True, max_tokens=60)))
    while b"[DONE]" not in peer.received:
        await trio.sleep(0.005)
        peer.read(700)
    peer.resume()
    answer = await peer_answer(peer)
    texts = [text_of([chunk]) for chunk in chunks(answer.body)]
    assert [text for text in texts if text] == [(f"w{n} " * 3000)[:3000] for n in range(1, 61)]
    assert answer.body.count(b"\n: hb\n") > 20, "there were heartbeats between the events"
    await stage.settled()


# --- L01, L03, S21: a chat client that leaves ---


@both
@pytest.mark.parametrize("leave", ["close", "reset"])
async def test_s21_client_that_leaves_stops_the_work(
    path: str, leave: str, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    stage = Stage(nursery, script=Script(events=2000, interval_ms=20))
    peer = stage.connect()
    peer.send(post(path, body(path, stream=True, max_tokens=2000)))
    await peer.wait_received(b"w5 ")
    getattr(peer, leave)()
    await trio.sleep(1)
    await stage.settled()
    (record,) = stage.records
    assert record.outcome is Outcome.CLIENT_DISCONNECTED
    assert record.prompt_tokens == 1
    assert record.tokens_sent == 5
    assert record.tokens_generated in (5, 6)
    assert record.tokens_after_verdict == 0


@both
async def test_l03_document_client_that_leaves_stops_the_work(
    path: str, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    stage = Stage(nursery, script=Script(events=2000, interval_ms=20))
    peer = stage.connect()
    peer.send(post(path, body(path, max_tokens=2000)))
    await trio.sleep(0.21)
    peer.close()
    await trio.sleep(1)
    await stage.settled()
    (record,) = stage.records
    assert record.outcome is Outcome.CLIENT_DISCONNECTED
    assert record.tokens_generated <= 12
    assert record.status != 200


# --- S17, S22: reconnecting ---


@pytest.mark.parametrize("value", ["5", "garbage \xe9", "x" * 10_000])
async def test_s17_s22_last_event_id_is_ignored(value: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    answer = await call(stage, CHAT, f"Last-Event-ID: {value}", stream=True)
    assert answer.status == 200
    assert text_of(chunks(answer.body)) == "".join(f"w{n} w{n} w{n}" for n in range(1, 6)), "a fresh stream"
    assert value.encode("latin-1") not in answer.body or value == "5"
    assert not any(event.id for event in answer.events)


async def test_s17_no_get_starts_a_completion(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    peer = Stage(nursery).connect()
    peer.send(get(CHAT))
    assert (await peer_answer(peer, "GET")).status == 405


# --- S19: keys ---


@pytest.mark.parametrize("value", ["Bearer K", "bearer K", "BEARER K", "Bearer  K", "Bearer K "])
async def test_s19_keys_accepted(value: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, api_key=("K",))
    assert (await call(stage, CHAT, f"Authorization: {value}")).status == 200


@pytest.mark.parametrize("value", ["K", "Basic K", "", "Bearer", "Bearer X", "Bearer K K", "Bearer \xc3\xa9", "Bearer \xff"])
async def test_s19_keys_refused(
    value: str, nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(nursery, api_key=("K", "topsecret"))
    answer = await call(stage, CHAT, f"Authorization: {value}", stream=True)
    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.error["type"] == "authentication_error"
    assert "topsecret" not in caplog.text


async def test_s19_two_keys_are_one_too_many(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, api_key=("K",))
    assert (await call(stage, CHAT, "Authorization: Bearer K", "Authorization: Bearer K")).status == 401


@pytest.mark.parametrize(("path", "status"), [("/healthz", 200), ("/readyz", 200), ("/metrics", 401), ("/v1/models", 401)])
async def test_s19_what_is_open(path: str, status: int, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    peer = Stage(nursery, api_key=("K",)).connect()
    peer.send(get(path))
    assert (await peer_answer(peer, "GET")).status == status


# --- S20: unknown routes and methods ---


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("POST", "/v1/v1/chat/completions", 404, None),
        ("GET", CHAT, 405, "POST"),
        ("PUT", "/v1/models", 405, "GET"),
        ("GET", "//v1/models", 404, None),
        ("GET", "/v1/models/", 404, None),
        ("GET", "/v1/models/nothing", 404, None),
        ("GET", "/v1", 404, None),
    ],
)
async def test_s20_errors_are_json(
    method: str, path: str, status: int, allow: str | None, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    peer = Stage(nursery).connect()
    peer.send(get(path, method=method))
    answer = await peer_answer(peer, method)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["message"]
    assert allow is None or allow in answer.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models?x=1", "/v1/models/scripted"])
async def test_s20_models_and_queries(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    peer = Stage(nursery).connect()
    peer.send(get(path))
    answer = await peer_answer(peer, "GET")
    assert answer.status == 200
    assert b'"id":"scripted"' in answer.body


# --- S05: ids that a client chose ---


@pytest.mark.parametrize("value", ["a b", "\xe9", "x" * 129, "a/b", "a%0d%0ab"])
async def test_s05_request_ids_that_do_not_fit_are_replaced(value: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    answer = await call(Stage(nursery), CHAT, f"X-Request-Id: {value}", stream=True)
    assert answer.headers["x-request-id"] != value
    assert answer.headers["x-request-id"] in chunks(answer.body)[0]["id"]


@pytest.mark.parametrize("value", ["a\x0bb", "a\rb", "a\0b"])
async def test_s05_request_ids_with_control_characters_are_refused(
    value: str, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    answer = await call(Stage(nursery), CHAT, f"X-Request-Id: {value}", stream=True)
    assert answer.status == 400


async def test_s05_a_fitting_request_id_is_the_streams_id(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    answer = await call(Stage(nursery), CHAT, "X-Request-Id: my-own.id_1", stream=True)
    assert {chunk["id"] for chunk in chunks(answer.body)} == {"chatcmpl-my-own.id_1"}


# --- O06: no slot is a 429 in OpenAI's form ---


@both
async def test_busy_is_429_for_stream_and_document(path: str, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=100, interval_ms=100))
    first = stage.connect()
    first.send(post(path, body(path, stream=True, max_tokens=100)))
    await wait_all_tasks_blocked()
    for stream in (True, False):
        answer = await call(stage, path, stream=stream)
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.error["type"] == "rate_limit_error"
    first.close()
    await trio.sleep(1)
    await stage.settled()
