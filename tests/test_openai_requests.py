"""OpenAI's requests: what is taken, what is refused by name, what is ignored.

The letters in the names are the field cases: A05 is "true accepted as 1", and so on.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from trio_sse.dialects.base import AnswerContext, Parsed
from trio_sse.dialects.openai import parse_chat, parse_completion
from trio_sse.errors import BadRequest
from trio_sse.events import Message, Sampling

CONTEXT = AnswerContext(model="m", request_id="r", created=1)
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Parsed:
    return parse_chat(json.dumps({"model": "m", "messages": HI, **fields}).encode(), CONTEXT)


def completion(**fields: Any) -> Parsed:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), CONTEXT)


def chat_refusal(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    # A refusal is known before the head, and is the same whether or not a stream was asked for.
    with pytest.raises(BadRequest) as streamed:
        chat(**{"stream": True, **fields})
    assert caught.value.body() == streamed.value.body() or "stream" in fields
    return caught.value


def completion_refusal(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        completion(**fields)
    return caught.value


# --- defaults and the plain translation ---


def test_defaults_are_openais() -> None:
    parsed = chat()
    assert not parsed.stream
    work = parsed.request
    assert work.messages == (Message("user", "hi"),)
    assert work.prompt is None
    assert work.max_tokens is None, "a chat goes on to the end of the context"
    assert work.stop == ()
    assert work.model == "m"
    assert work.sampling == Sampling(temperature=1.0)
    work = completion().request
    assert work.prompt == "hi"
    assert work.messages is None
    assert work.max_tokens == 16
    assert work.sampling == Sampling(temperature=1.0)


NULLS = dict.fromkeys(
    [
        "stream",
        "stream_options",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "stop",
        "n",
        "logprobs",
        "user",
        "metadata",
        "model",
    ]
)


def test_null_is_the_same_as_leaving_it_out() -> None:
    given, left_out = chat(**NULLS, max_completion_tokens=None, top_logprobs=None), chat(model=None)
    assert given.request == left_out.request
    given, left_out = completion(**NULLS, echo=None, best_of=None, suffix=None), completion(model=None)
    assert given.request == left_out.request


@pytest.mark.parametrize("call", [chat, completion])
def test_sampling_is_taken_over(call: Any) -> None:
    work = call(
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "17": 1.5},
        seed=-7,
        max_tokens=9,
        stop=["a", "b", "c", "d"],
    ).request
    assert work.sampling == Sampling(0.0, 0.5, 40, 0.1, -2.0, 2.0, 1.1, ((5, -100.0), (17, 1.5)), -7)
    assert work.max_tokens == 9
    assert work.stop == ("a", "b", "c", "d")
    assert call(top_k=-1).request.sampling.top_k == 0


def test_model_may_be_anything_or_missing() -> None:
    assert parse_chat(json.dumps({"messages": HI}).encode(), CONTEXT).request.model is None
    assert chat(model="gpt-9").request.model == "gpt-9"
    assert chat_refusal(model=5).param == "model"


@pytest.mark.parametrize(("stream", "expected"), [(True, True), (False, False), (None, False)])
def test_stream(stream: bool | None, expected: bool) -> None:
    assert chat(stream=stream).stream is expected
    assert completion(stream=stream).stream is expected


# --- A01, A02, A03, A05, A07, A12: the JSON itself (test_json_in.py has the rest) ---


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"model":"m","messages":[{"role":"user","content":"emoji \ud83d"}]}', "messages[0].content"),
        (rb'{"model":"\ud83d","messages":[{"role":"user","content":"a"}]}', "model"),
        (rb'{"messages":[{"role":"\ud83d","content":"a"}]}', "messages[0].role"),
        (rb'{"messages":[{"role":"user","content":"a"}],"stop":["\ude00"]}', "stop[0]"),
        (rb'{"messages":[{"role":"user","content":"a"}],"user":"\ud83d"}', "user"),
        (rb'{"messages":[{"role":"user","content":"a"}],"\ud83d":1}', "?"),
    ],
)
@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a01_lone_surrogate_names_the_field(body: bytes, param: str, stream: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(body[:-1] + b',"stream":' + stream + b"}", CONTEXT)
    assert caught.value.param == param


def test_a01_paired_surrogates_are_fine() -> None:
    body = rb'{"messages":[{"role":"user","content":"\ud83d\ude00"}]}'
    assert parse_chat(body, CONTEXT).request.messages == (Message("user", "\N{GRINNING FACE}"),)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"a\x97b"}]}',
        b"\xef\xbb\xbf" + json.dumps({"messages": HI}).encode(),
        json.dumps({"messages": HI}).encode("utf-16"),
        b'{"messages":[{"role":"user","content":"a"}],"x":"\xc0\x80"}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    ],
)
def test_a02_body_that_is_not_utf8(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_chat(body, CONTEXT)


@pytest.mark.parametrize("where", ['"x":%s', '"tools":[{"function":{"parameters":%s}}]', '"metadata":{"a":%s}', '"stop":%s'])
def test_a03_deep_nesting_is_refused_quickly(where: str) -> None:
    began = time.perf_counter()
    for opening, closing, levels in (("[", "]", 100_000), ('{"a":', "}", 1000), ("[", "]", 1000)):
        deep = opening * levels + "1" + closing * levels
        body = '{"messages":[{"role":"user","content":"a"}],' + where % deep + "}"
        with pytest.raises(BadRequest, match="deeper than 64"):
            parse_chat(body.encode(), CONTEXT)
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, True) for name in ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "n", "top_logprobs")),
        *((name, True) for name in ("presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty", "stop")),
        ("stream", 1),
        ("stream", "true"),
        ("logprobs", 1),
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", 5.5),
        ("seed", 5.0),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("max_tokens", 10**30),
        ("temperature", "1"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 2),
        ("top_k", -2),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
    ],
)
def test_a05_wrong_types_and_ranges_name_the_field(name: str, value: object) -> None:
    fields = {"logprobs": True, name: value} if name == "top_logprobs" else {name: value}
    assert chat_refusal(**fields).param == name


def test_a07_a_key_given_twice() -> None:
    body = b'{"model":"m","max_tokens":1,"max_tokens":4096,"stream":false,"messages":[{"role":"user","content":"hi"}]}'
    with pytest.raises(BadRequest) as caught:
        parse_chat(body, CONTEXT)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "duplicate_key"


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b'"x"', b"1", b"{}", b'{"messages":1}', b"{}{}", b'{"messages":[]} x'])
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_a12_wrong_shaped_bodies(body: bytes, parse: Any) -> None:
    with pytest.raises(BadRequest):
        parse(body, CONTEXT)


# --- A09, A10: messages, prompts, max_tokens ---


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ({}, "messages"),
        ("hi", "messages"),
        ([None], "messages[0]"),
        (["hi"], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "system", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "assistant", "content": []}, *HI], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([*HI, {"role": "robot", "content": "hi"}], "messages[1].role"),
        ([*HI, {"role": "", "content": "hi"}], "messages[1].role"),
        ([*HI, {"role": "tool", "content": "hi", "tool_call_id": "1"}], "messages[1].role"),
        ([*HI, {"role": "function", "content": "hi", "name": "f"}], "messages[1].role"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": None, "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "assistant", "content": None, "refusal": "no"}], "messages[0].refusal"),
    ],
)
def test_a09_unusable_messages_name_their_place(messages: object, param: str) -> None:
    assert chat_refusal(messages=messages).param == param


def test_a09_missing_messages_and_prompt() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat(b'{"model":"m"}', CONTEXT)
    assert caught.value.param == "messages"
    with pytest.raises(BadRequest) as caught:
        parse_completion(b'{"model":"m"}', CONTEXT)
    assert caught.value.param == "prompt"


def test_a09_empty_content_is_a_message_too() -> None:
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": [], "audio": None},
        {"role": "assistant"},
        {"role": "user", "content": "hi", "name": "Ann"},
    ]
    assert chat(messages=turns).request.messages == (
        Message("system", "be brief"),
        Message("user", ""),
        Message("assistant", ""),
        Message("user", "so?"),
        Message("assistant", ""),
        Message("assistant", ""),
        Message("user", "hi"),
    )


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([""], "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (["a", "b"], "prompt"),
        (5, "prompt"),
        ([1, 2], "prompt[0]"),
        ([[1, 2]], "prompt[0]"),
    ],
)
def test_a09_unusable_prompts(prompt: object, param: str) -> None:
    assert completion_refusal(prompt=prompt).param == param


def test_a09_one_prompt_in_a_list() -> None:
    assert completion(prompt=["Once "]).request.prompt == "Once "


@pytest.mark.parametrize("value", [0, -1, -(2**63)])
def test_a10_max_tokens_below_one(value: int) -> None:
    assert chat_refusal(max_tokens=value).param == "max_tokens"
    assert chat_refusal(max_completion_tokens=value).param == "max_completion_tokens"
    assert completion_refusal(max_tokens=value).param == "max_tokens"


def test_a10_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=32, max_completion_tokens=1).request.max_tokens == 1
    assert chat(max_tokens=1, max_completion_tokens=32).request.max_tokens == 32
    assert chat(max_tokens=32, max_completion_tokens=None).request.max_tokens == 32
    assert chat(max_tokens=10**9).request.max_tokens == 10**9, "the context is the backend's to know"


# --- A13, S16: known but not implemented ---

UNSUPPORTED_IN_CHAT = {
    "n": 3,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "parallel_tool_calls": "yes",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "moderation": {"model": "x"},
    "service_tier": "flex",
    "store": True,
}
UNSUPPORTED_IN_COMPLETIONS = {"n": 2, "best_of": 3, "echo": True, "suffix": "end", "store": True}


@pytest.mark.parametrize("name", UNSUPPORTED_IN_CHAT)
def test_a13_s16_unsupported_in_chat_is_refused_by_name(name: str) -> None:
    error = chat_refusal(**{name: UNSUPPORTED_IN_CHAT[name]})
    assert error.param == name
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize("name", UNSUPPORTED_IN_COMPLETIONS)
def test_a13_unsupported_in_completions_is_refused_by_name(name: str) -> None:
    assert completion_refusal(**{name: UNSUPPORTED_IN_COMPLETIONS[name]}).param == name


@pytest.mark.parametrize(("name", "value"), [("n", True), ("n", 1.0), ("n", 0), ("n", "1"), ("store", 0), ("tools", {})])
def test_a13_neutral_values_are_compared_exactly(name: str, value: object) -> None:
    assert chat_refusal(**{name: value}).param == name


def test_a13_neutral_values_are_taken() -> None:
    neutral = {
        "n": 1,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "functions": [],
        "function_call": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "audio": None,
        "reasoning_effort": None,
        "verbosity": "medium",
        "service_tier": "auto",
        "store": False,
        "logprobs": False,
        "logit_bias": {},
    }
    assert chat(**neutral).request == chat().request
    assert completion(n=1, best_of=1, echo=False, suffix=None, logit_bias={}).request == completion().request


def test_a13_unknown_and_irrelevant_fields_are_ignored() -> None:
    ignored = {
        "foo": {"bar": [1, 2]},
        "max_retries": 3,
        "user": "u",
        "metadata": {"a": "b"},
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "messages": [{"role": "user", "content": "hi", "extra": 1, "cache_control": {}}],
    }
    assert chat(**ignored).request == chat().request
    assert completion(foo=1, user=5, messages=3).request == completion().request


# --- A14: content as parts ---


def test_a14_text_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": ""}, {"type": "text", "text": "b\n"}]
    for role in ("user", "system", "assistant"):
        assert chat(messages=[{"role": role, "content": parts}]).request.messages == (Message(role, "ab\n"),)


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "messages[0].content[1]"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[1]"),
        ({"type": "refusal", "refusal": "no"}, "messages[0].content[1]"),
        ({"type": "text"}, "messages[0].content[1].text"),
        ({"type": "text", "text": None}, "messages[0].content[1].text"),
        ({"type": "text", "text": 5}, "messages[0].content[1].text"),
        ({"text": "a"}, "messages[0].content[1].type"),
        ({"type": None, "text": "a"}, "messages[0].content[1].type"),
        ("a", "messages[0].content[1]"),
        (None, "messages[0].content[1]"),
    ],
)
def test_a14_other_parts_are_refused_naming_the_part(part: object, param: str) -> None:
    assert chat_refusal(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]).param == param


# --- D10: stop ---


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ([], ()), ("x", ("x",)), (["\nUser:", "a"], ("\nUser:", "a"))])
def test_d10_stop_accepted(stop: object, expected: tuple[str, ...]) -> None:
    assert chat(stop=stop).request.stop == expected
    assert completion(stop=stop).request.stop == expected


@pytest.mark.parametrize(
    ("stop", "param"),
    [
        ("", "stop"),
        ([""], "stop[0]"),
        (["a", ""], "stop[1]"),
        (["a", "b", "c", "d", "e"], "stop"),
        (5, "stop"),
        ([5], "stop[0]"),
        ([None], "stop[0]"),
        ({}, "stop"),
        ("x" * 1_000_000, "stop"),
        (["x" * 1001], "stop[0]"),
        (["x"] * 10_000, "stop"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_d10_stop_refused(stop: object, param: str) -> None:
    assert chat_refusal(stop=stop).param == param
    assert completion_refusal(stop=stop).param == param


# --- D11: logprobs, and logit_bias ---


def test_d11_logprobs_in_chat() -> None:
    assert chat(logprobs=True).request.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).request.sampling.logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).request.sampling.logprobs is None
    assert chat_refusal(top_logprobs=2).param == "top_logprobs"
    assert chat_refusal(logprobs=False, top_logprobs=2).param == "top_logprobs"


def test_d11_logprobs_in_completions() -> None:
    assert completion(logprobs=0).request.sampling.logprobs == 0
    assert completion(logprobs=5).request.sampling.logprobs == 5
    assert completion_refusal(logprobs=True).param == "logprobs"
    assert completion_refusal(logprobs=21).param == "logprobs"


@pytest.mark.parametrize(
    "bias",
    [
        {"x": 1},
        {"-1": 1},
        {" 5 ": 1},
        {"1_0": 1},
        {"٣": 1},
        {"": 1},
        {"9" * 400: 1},
        {"5": 1, "05": 2},
        {"5": 101},
        {"5": True},
        [],
        {str(number): 1 for number in range(1025)},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_logit_bias_refused(bias: object) -> None:
    assert chat_refusal(logit_bias=bias).param == "logit_bias"


# --- S13: stream_options ---


@pytest.mark.parametrize(
    ("options", "param"),
    [("yes", "stream_options"), ([], "stream_options"), ({"include_usage": "yes"}, "stream_options.include_usage")],
)
def test_s13_bad_stream_options(options: object, param: str) -> None:
    assert chat_refusal(stream_options=options).param == param


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False, "include_obfuscation": False}])
def test_s13_stream_options_that_ask_for_nothing(options: object) -> None:
    assert chat(stream=True, stream_options=options).request == chat().request
