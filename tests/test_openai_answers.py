"""OpenAI's answers: chunks and documents, validated by openai-python's own models in strict mode.

The letters in the names are the field cases: S09 is "finish_reason missing or null", and so on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from openai.types import Model

from tests.support.openai_wire import Json, chunks, document_text, parse, read_document, text_of, validate_chunk
from trio_sse.dialects.base import Answer, AnswerContext
from trio_sse.dialects.openai import model_document, models_document, parse_chat, parse_completion
from trio_sse.errors import InternalError, NotFound, UpstreamFailed
from trio_sse.events import Event, Finish, Started, Token, TokenLogprob, ToolCall
from trio_sse.sse import Parser

CONTEXT = AnswerContext(model='m"\N{GRINNING FACE}', request_id="r-1", created=1_700_000_000)


def chat_answer(**fields: Any) -> Answer:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), CONTEXT).answer


def completion_answer(**fields: Any) -> Answer:
    return parse_completion(json.dumps({"prompt": "hi", **fields}).encode(), CONTEXT).answer


Make = Callable[..., Answer]
both = pytest.mark.parametrize("make", [chat_answer, completion_answer])
USAGE = {"stream_options": {"include_usage": True}}


def stream(answer: Answer, events: Sequence[Event], *, prompt: int = 7) -> bytes:
    answer.prompt(prompt)
    return b"".join(answer.frames(event) for event in events)


def document(answer: Answer, events: Sequence[Event], *, prompt: int = 7) -> Json:
    answer.prompt(prompt)
    for event in events:
        answer.collect(event)
    data = answer.document()
    return read_document(data)


HELLO: list[Event] = [Started(), Token("Hel"), Token(""), Token("lo", count=2), Finish("stop")]


# --- S14: required and constant fields ---


@both
@pytest.mark.parametrize("fields", [{}, USAGE])
def test_s14_chunks_satisfy_openais_models(make: Make, fields: Json) -> None:
    found = chunks(stream(make(**fields), HELLO))
    assert len({(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in found}) == 1
    assert found[0]["model"] == CONTEXT.model
    assert found[0]["created"] == CONTEXT.created
    assert found[0]["id"].endswith("-r-1")
    assert all(choice["index"] == 0 for chunk in found for choice in chunk["choices"])


def test_s14_role_is_in_the_first_delta_and_only_there() -> None:
    found = chunks(stream(chat_answer(), HELLO))
    assert [chunk["choices"][0]["delta"].get("role") for chunk in found] == ["assistant", None, None, None]


def test_s14_role_leaves_with_the_head() -> None:
    answer = chat_answer()
    answer.prompt(1)
    (event,) = parse(answer.frames(Started()))
    assert json.loads(event.data)["choices"][0]["delta"] == {"role": "assistant", "content": ""}


# --- S08, S09: the end ---


@both
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_s09_exactly_one_finish_reason(make: Make, reason: str, tokens: int) -> None:
    found = chunks(stream(make(), [Started(), *[Token("a")] * tokens, Finish(reason)]))
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in found]
    assert reasons[-1] == reason
    assert set(reasons[:-1]) <= {None}
    assert text_of(found) == "a" * tokens


@both
def test_s08_zero_tokens_still_end_properly(make: Make) -> None:
    data = stream(make(), [Started(), Finish("stop")])
    assert data.endswith(b"data: [DONE]\n\n")
    assert chunks(data)[-1]["choices"][0]["finish_reason"] == "stop"


# --- S10: failures ---


@both
@pytest.mark.parametrize("sent", [0, 1, 3])
def test_s10_an_error_is_an_error_and_nothing_else(make: Make, sent: int) -> None:
    answer = make(**USAGE)
    data = stream(answer, [Started(), *[Token("a")] * sent]) + answer.error(UpstreamFailed("The engine failed."))
    *before, last = [json.loads(event.data) for event in parse(data)]
    assert last == {
        "error": {"message": "The engine failed.", "type": "upstream_error", "code": "upstream_failed", "param": None}
    }
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in before)
    assert b"[DONE]" not in data


def test_a11_an_internal_error_says_nothing() -> None:
    (event,) = parse(chat_answer().error(InternalError()))
    assert json.loads(event.data)["error"]["code"] == "internal_error"


# --- S13: usage ---


@both
@pytest.mark.parametrize("fields", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
def test_s13_no_usage_unless_asked(make: Make, fields: Json) -> None:
    for chunk in chunks(stream(make(**fields), HELLO)):
        assert "usage" not in chunk
        assert len(chunk["choices"]) == 1


@both
def test_s13_one_usage_chunk_last(make: Make) -> None:
    *others, last = chunks(stream(make(**USAGE), HELLO))
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in others)
    assert document(make(), HELLO)["usage"] == last["usage"]


# --- S15: stream and document are the same ---

_logprob = st.builds(
    TokenLogprob,
    token=st.text(max_size=3),
    bytes=st.binary(max_size=3),
    logprob=st.floats(max_value=0, allow_nan=False),
    top=st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3), st.floats(max_value=0)), max_size=2).map(tuple),
)
_token = st.builds(Token, text=st.text(max_size=6), count=st.integers(1, 3), logprobs=st.lists(_logprob, max_size=2).map(tuple))


@both
@given(tokens=st.lists(_token, max_size=8), reason=st.sampled_from(["stop", "length"]), usage=st.booleans())
def test_s15_stream_equals_document(make: Make, tokens: list[Token], reason: str, usage: bool) -> None:
    events: list[Event] = [Started(), *tokens, Finish(reason)]
    data = stream(make(**(USAGE if usage else {})), events)
    assert data.isascii()
    assert b"\r" not in data
    found = chunks(data)
    whole = document(make(), events)
    assert text_of(found) == document_text(whole) == "".join(token.text for token in tokens)
    ending = found[-2] if usage else found[-1]
    assert ending["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == reason
    assert document_logprobs(whole) == stream_logprobs(found)
    if usage:
        assert found[-1]["usage"] == whole["usage"]


def stream_logprobs(found: list[Json]) -> Json:
    """The logprobs of all chunks, joined key by key."""
    joined: Json = {}
    for chunk in found:
        for choice in chunk["choices"]:
            for key, entries in (choice["logprobs"] or {}).items():
                joined.setdefault(key, []).extend(entries or [])
    return {key: entries for key, entries in joined.items() if key != "top_logprobs"}


def document_logprobs(whole: Json) -> Json:
    logprobs = whole["choices"][0]["logprobs"] or {}
    return {key: entries or [] for key, entries in logprobs.items() if key != "top_logprobs"}


# --- S05, S06: text that could break a frame ---


@both
@pytest.mark.parametrize(
    "text",
    [
        "\r",
        "\n",
        "\n\n",
        "\r\n",
        "\ndata: [DONE]\n\n",
        "\revent: x",
        ":",
        "[DONE]",
        "\u2028",
        "\u2029",
        "\x85",
        "\x0b",
        "\x0c",
        "\x1c",
        "\x1d",
        "\x1e",
        "\x00",
        "\\",
        '"',
        "🦙",
        " ",
        "  two",
    ],
)
def test_s05_s06_any_text_survives_framing(make: Make, text: str) -> None:
    data = stream(make(), [Started(), Token(text), Token(text), Finish("stop")])
    assert data.isascii()
    # What a parser that splits on every Unicode line end would see.
    assert [line for line in data.decode().splitlines() if line] == [line for line in data.decode().split("\n") if line]
    assert text_of(chunks(data)) == text * 2


@both
def test_s02_heartbeats_are_comments_of_one_line(make: Make) -> None:
    answer = make()
    assert answer.heartbeat == b": hb\n"
    data = b"".join(answer.heartbeat + frame + answer.heartbeat for frame in (answer.frames(event) for event in HELLO))
    parser = Parser()
    events = parser.feed(data)
    assert parser.comments == 2 * len(HELLO)
    assert events[-1].data == "[DONE]"
    for event in events[:-1]:
        validate_chunk(json.loads(event.data))


@both
def test_s22_no_ids_events_or_retries(make: Make) -> None:
    for event in parse(stream(make(), HELLO)):
        assert event.id == ""
        assert event.event == "message"


@both
def test_tool_events_are_left_out(make: Make) -> None:
    assert text_of(chunks(stream(make(), [Started(), Token("a"), ToolCall({"name": "f"}), Token("b"), Finish("stop")]))) == "ab"
    assert document_text(document(make(), [Started(), Token("a"), ToolCall({"name": "f"}), Token("b"), Finish("stop")])) == "ab"


@both
def test_the_document_needs_an_end(make: Make) -> None:
    answer = make()
    answer.collect(Token("a"))
    with pytest.raises(RuntimeError):
        answer.document()


# --- D11: logprobs ---

LLAMA = "\N{LLAMA}".encode()
# An emoji of which each half is a token: the first entry comes with held-back text.
SPLIT: list[Event] = [
    Started(),
    Token("a", logprobs=(TokenLogprob("a", b"a", -0.5, (("a", b"a", -0.5), ("b", b"b", -1.5))),)),
    Token("", logprobs=(TokenLogprob("\ufffd", LLAMA[:2], -0.25, (("c", b"c", -0.125),)),)),
    Token("\N{LLAMA}", logprobs=(TokenLogprob("\ufffd", LLAMA[2:], float("-inf"), (("c", b"c", -1.0),)),)),
    Finish("length"),
]


def test_d11_one_entry_per_token_in_chat() -> None:
    whole = document(chat_answer(logprobs=True, top_logprobs=2), SPLIT)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"a", LLAMA[:2], LLAMA[2:]]
    assert [entry["logprob"] for entry in entries] == [-0.5, -0.25, -9999.0]
    assert [likely["token"] for likely in entries[0]["top_logprobs"]] == ["a", "b"]
    found = chunks(stream(chat_answer(logprobs=True, top_logprobs=2), SPLIT))
    assert stream_logprobs(found)["content"] == entries
    assert text_of(found) == "a\N{LLAMA}"


def test_d11_one_entry_per_token_in_completions() -> None:
    whole = document(completion_answer(logprobs=2), SPLIT)
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\xa6\\x99"]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["token_logprobs"] == [-0.5, -0.25, -9999.0]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert logprobs["top_logprobs"][1] == {"c": -0.125, "bytes:\\xf0\\x9f": -0.25}
    assert stream_logprobs(chunks(stream(completion_answer(logprobs=2), SPLIT))) == document_logprobs(whole)


def test_d11_no_candidates_asked_for() -> None:
    bare: list[Event] = [Started(), Token("a", logprobs=(TokenLogprob("a", b"a", -0.5),)), Finish("stop")]
    assert document(completion_answer(logprobs=0), bare)["choices"][0]["logprobs"]["top_logprobs"] is None
    assert document(chat_answer(logprobs=True), bare)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert document(chat_answer(), HELLO)["choices"][0]["logprobs"] is None


# --- /v1/models ---


def test_models() -> None:
    listed = json.loads(models_document("a/b", 5))
    assert listed["object"] == "list"
    (one,) = listed["data"]
    assert one == json.loads(model_document("a/b", "a/b", 5))
    Model.model_validate(one, strict=True)
    assert (one["id"], one["created"]) == ("a/b", 5)


def test_a_model_that_is_not_here() -> None:
    with pytest.raises(NotFound) as caught:
        model_document("gpt-9", "m", 5)
    assert caught.value.code == "model_not_found"
