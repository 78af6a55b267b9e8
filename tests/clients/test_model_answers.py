"""The packaged model behind OpenAI's API: a stream and a document of the same request say the same, however they end."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.support.openai_wire import Json, chunks, document_text, read_document, text_of

from .conftest import Servers

pytestmark = [pytest.mark.model, pytest.mark.net, pytest.mark.slow, pytest.mark.timeout(900)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STORY = "Tell me a short story about a llama who learns to swim."
END = "2"  # <|im_end|>
# Greedy and seeded, over both paths; the seeded ones with OpenAI's default temperature and with everything that cuts.
REQUESTS = [
    (CHAT, {"temperature": 0}),
    (CHAT, {"seed": 7}),
    (COMPLETIONS, {"temperature": 0}),
    (COMPLETIONS, {"seed": 11, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0.2}),
]


def ask(servers: Servers, path: str, **fields: Any) -> httpx2.Response:
    (host, port) = servers.addresses["model"]
    prompt = {"messages": [{"role": "user", "content": STORY}]} if path == CHAT else {"prompt": "Once upon a time"}
    return httpx2.post(f"http://{host}:{port}{path}", json={**prompt, **fields}, timeout=300)


def both_ways(servers: Servers, path: str, **fields: Any) -> Json:
    """The document, after checking that the stream of the same request equals it."""
    whole = ask(servers, path, **fields)
    assert whole.status_code == 200, whole.text
    document = read_document(whole.content)
    streamed = ask(servers, path, **fields, stream=True, stream_options={"include_usage": True})
    *found, finish, usage = chunks(streamed.content)
    assert text_of([*found, finish]) == document_text(document)
    assert "\ufffd" not in document_text(document)[:-1], "only the limit may cut a character, and then it is the last"
    assert finish["choices"][0]["finish_reason"] == document["choices"][0]["finish_reason"]
    assert usage["usage"] == document["usage"]
    return document


def reason(document: Json) -> str:
    found: str = document["choices"][0]["finish_reason"]
    return found


@pytest.mark.parametrize(("path", "sampling"), REQUESTS, ids=str)
def test_s15_ends_by_length(path: str, sampling: Json, model_server: Servers) -> None:
    document = both_ways(model_server, path, max_tokens=6, logit_bias={END: -100}, **sampling)
    assert reason(document) == "length"
    assert document["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(("path", "sampling"), REQUESTS, ids=str)
def test_s15_ends_by_a_stop_string(path: str, sampling: Json, model_server: Servers) -> None:
    free = both_ways(model_server, path, max_tokens=14, logit_bias={END: -100}, **sampling)
    text = document_text(free)
    stop = text[len(text) // 2 : len(text) // 2 + 5]  # across tokens, as a rule, and inside them
    stopped = both_ways(model_server, path, max_tokens=14, logit_bias={END: -100}, stop=["\0never", stop], **sampling)
    assert document_text(stopped) == text[: text.index(stop)]
    assert reason(stopped) == "stop"
    assert stopped["usage"]["completion_tokens"] <= free["usage"]["completion_tokens"]


@pytest.mark.parametrize(("path", "sampling"), REQUESTS, ids=str)
def test_s15_ends_by_the_end_token(path: str, sampling: Json, model_server: Servers) -> None:
    document = both_ways(model_server, path, max_tokens=12, logit_bias={END: 100}, **sampling)
    assert reason(document) == "stop"
    assert document_text(document) == ""


def test_s15_a_natural_end(model_server: Servers) -> None:
    messages = [{"role": "user", "content": "Reply with the single word: yes"}]
    document = both_ways(model_server, CHAT, messages=messages, temperature=0, max_tokens=200)
    assert reason(document) == "stop"
    assert document_text(document)


def test_seeds_decide(model_server: Servers) -> None:
    texts = [document_text(ask(model_server, CHAT, seed=seed, max_tokens=10).json()) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_d11_one_entry_per_generated_token(path: str, model_server: Servers) -> None:
    asked: Json = {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}
    # Emoji are split over tokens, and the stop string is held back: neither loses an entry.
    more: Json = {"messages": [{"role": "user", "content": "Repeat: 🦙🦙🦙"}]} if path == CHAT else {"prompt": "🦙🦙🦙🦙"}
    document = both_ways(model_server, path, temperature=0, max_tokens=12, stop=["zz"], logit_bias={END: -100}, **asked, **more)
    logprobs = document["choices"][0]["logprobs"]
    if path == CHAT:
        entries = logprobs["content"]
        raw = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert raw.decode("utf-8", "ignore").strip() == document_text(document).strip()
        for entry in entries:
            assert len(entry["top_logprobs"]) == 3
            assert entry["logprob"] == max(likely["logprob"] for likely in entry["top_logprobs"]), "greedy takes the likeliest"
    else:
        entries = logprobs["tokens"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"]) == len(entries)
    assert len(entries) == document["usage"]["completion_tokens"] == 12


def test_s11_a_prompt_beyond_the_context(model_server: Servers) -> None:
    messages = [{"role": "user", "content": "word " * 20_000}]
    whole = ask(model_server, CHAT, messages=messages)
    streamed = ask(model_server, CHAT, messages=messages, stream=True)
    assert whole.status_code == streamed.status_code == 400
    assert whole.json() == streamed.json()
    assert whole.json()["error"]["code"] == "context_length_exceeded"


def test_a10_max_tokens_beyond_the_context(model_server: Servers) -> None:
    answer = ask(model_server, CHAT, max_tokens=10**9)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("content", ["", "\N{LLAMA}\u2028\x00", [{"type": "text", "text": "hi"}, {"type": "text", "text": "!"}]])
def test_a09_a14_unusual_content_is_answered(content: object, model_server: Servers) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}, {"role": "user", "content": content}]
    both_ways(model_server, CHAT, messages=messages, temperature=0, max_tokens=4)
