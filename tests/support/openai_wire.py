"""Reading OpenAI's format in tests: every chunk and document is validated by openai-python's own models, in strict mode."""

from __future__ import annotations

import json
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from trio_sse.sse import Parser, ServerSentEvent

__all__ = ["Json", "chunks", "document_text", "parse", "read_document", "text_of", "validate_chunk"]

Json = dict[str, Any]


def parse(data: bytes) -> list[ServerSentEvent]:
    """Every event of ``data``; on /v1 there is nothing but data fields."""
    events = Parser().feed(data)
    assert all(line.startswith((b"data: ", b": hb")) or not line for line in data.split(b"\n"))
    return events


def chunks(data: bytes) -> list[Json]:
    """The chunks of a whole stream, every one validated, and the one [DONE] behind them."""
    events = parse(data)
    assert [event.data for event in events].count("[DONE]") == 1
    assert events[-1].data == "[DONE]"
    found = [json.loads(event.data) for event in events[:-1]]
    for chunk in found:
        validate_chunk(chunk)
    return found


def validate_chunk(chunk: Json) -> None:
    if chunk["object"] == "chat.completion.chunk":
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)
        return
    # openai-python reads a completion's chunk as a whole Completion, in which finish_reason may not be null, though OpenAI itself
    # sends null in all but one. So that one field is filled in; everything else must be right as it is.
    filled = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    Completion.model_validate_json(json.dumps({**chunk, "choices": filled}), strict=True)


def text_of(found: list[Json]) -> str:
    choices = [choice for chunk in found for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def read_document(data: bytes) -> Json:
    """A document, validated."""
    assert data.isascii()
    model = ChatCompletion if b'"chat.completion"' in data else Completion
    model.model_validate_json(data, strict=True)
    read: Json = json.loads(data)
    return read


def document_text(whole: Json) -> str:
    choice = whole["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text
