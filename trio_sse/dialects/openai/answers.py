"""What a client of OpenAI's API gets back: chunks of a stream, or one document.

    Started        chat: a chunk whose delta has the role
    Token          a chunk with its text, unless there is nothing to show yet
    Finish         the one chunk with a finish_reason, the usage chunk if it was asked for, ``[DONE]``
    an error       ``data: {"error": …}`` and nothing after it: a failure must never look like an end

Rules:

1. The texts of the chunks, joined, are the document's text; finish reason and usage are the same. Both are made from the same events.
2. ``id``, ``created`` and ``model`` are constant within a stream. Nothing but the text changes between two chunks, so that the rest
   is encoded once per answer: encoding a token is one string escape and two concatenations.
3. ``usage`` counts generated tokens, also those whose text was held back or cut off by a stop string.
4. Where log probabilities were asked for, there is one entry per generated token, in order; their texts need not fall in line with
   the chunks' (half a character, half a stop string).
5. Tool events have no form here. They come from scripts for ``/events`` only, and are left out.
"""

from __future__ import annotations

import codecs
from abc import abstractmethod
from collections.abc import Sequence

from trio_sse.dialects.base import Answer, AnswerContext
from trio_sse.errors import HttpError, NotFound
from trio_sse.events import Event, Finish, Started, Token, TokenLogprob
from trio_sse.sse import json_string, json_text

__all__ = ["ChatAnswer", "CompletionAnswer", "model_document", "models_document"]

Json = dict[str, object]

_DONE = b"data: [DONE]\n\n"
_NEVER = -9999.0  # what OpenAI writes for the logarithm of zero, which JSON has no number for
_SPLIT = "\0"  # stands where the text goes while the chunk around it is encoded


def _frame(document: Json) -> bytes:
    return b"data: " + json_text(document).encode("ascii") + b"\n\n"


class _Answer(Answer):
    """What the two formats share: the envelope, the text collected, the usage.

    Args:
      usage: end the stream with a usage chunk; every other chunk then carries ``"usage": null``.
    """

    prefix: str  # of the id
    chunk_object: str
    document_object: str

    def __init__(self, context: AnswerContext, *, usage: bool) -> None:
        self._head: Json = {
            "id": f"{self.prefix}-{context.request_id}",
            "object": self.chunk_object,
            "created": context.created,
            "model": context.model,
        }
        self._usage = usage
        self._prompt_tokens = 0
        self._tokens = 0
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._reason: str | None = None
        before, _, after = self._chunk(self._choice(_SPLIT, None, None)).partition(json_text(_SPLIT).encode("ascii"))
        self._before, self._after = before, after

    def prompt(self, tokens: int) -> None:
        self._prompt_tokens = tokens

    # --- a stream ---

    def frames(self, event: Event) -> bytes:
        if isinstance(event, Token):
            self._tokens += event.count
            if event.logprobs:
                return self._chunk(self._choice(event.text, self._encode_logprobs(event.logprobs), None))
            if event.text:
                return self._before + json_string(event.text).encode("ascii") + self._after
            return b""
        if isinstance(event, Finish):
            usage = _frame({**self._head, "choices": [], "usage": self._counts()}) if self._usage else b""
            return self._chunk(self._last_choice(event.reason)) + usage + _DONE
        if isinstance(event, Started):
            return self._opening()
        return b""

    def error(self, error: HttpError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def _chunk(self, choice: Json) -> bytes:
        chunk: Json = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return _frame(chunk)

    # --- one document ---

    def collect(self, event: Event) -> None:
        if isinstance(event, Token):
            self._tokens += event.count
            self._texts.append(event.text)
            self._logprobs.extend(event.logprobs)
        elif isinstance(event, Finish):
            self._reason = event.reason

    def document(self) -> bytes:
        if self._reason is None:
            raise RuntimeError("the document is asked for before Finish was collected")
        logprobs = self._encode_logprobs(self._logprobs) if self._logprobs else None
        choice = self._whole_choice("".join(self._texts), logprobs, self._reason)
        whole: Json = {**self._head, "object": self.document_object, "choices": [choice], "usage": self._counts()}
        return json_text(whole).encode("ascii")

    def _counts(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
        }

    # --- where they differ ---

    def _opening(self) -> bytes:
        return b""

    @abstractmethod
    def _choice(self, text: str, logprobs: Json | None, reason: str | None) -> Json:
        """The choice of a chunk."""

    @abstractmethod
    def _last_choice(self, reason: str) -> Json:
        """The choice of the chunk that carries the finish reason, and no text."""

    @abstractmethod
    def _whole_choice(self, text: str, logprobs: Json | None, reason: str) -> Json:
        """The choice of the document."""

    @abstractmethod
    def _encode_logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        """The format's logprobs object."""


class ChatAnswer(_Answer):
    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    document_object = "chat.completion"

    def _opening(self) -> bytes:
        return self._chunk(_delta({"role": "assistant", "content": ""}, None, None))

    def _choice(self, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return _delta({"content": text}, logprobs, reason)

    def _last_choice(self, reason: str) -> Json:
        return _delta({}, None, reason)

    def _whole_choice(self, text: str, logprobs: Json | None, reason: str) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _encode_logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        content = [
            {**_entry(one.token, one.bytes, one.logprob), "top_logprobs": [_entry(*likely) for likely in one.top]}
            for one in entries
        ]
        return {"content": content, "refusal": None}


def _delta(delta: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _entry(token: str, raw: bytes, logprob: float) -> Json:
    return {"token": token, "logprob": max(logprob, _NEVER), "bytes": list(raw)}


class CompletionAnswer(_Answer):
    prefix = "cmpl"
    chunk_object = document_object = "text_completion"

    def __init__(self, context: AnswerContext, *, usage: bool) -> None:
        super().__init__(context, usage=usage)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters in the tokens so far

    def _choice(self, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _last_choice(self, reason: str) -> Json:
        return self._choice("", None, reason)

    def _whole_choice(self, text: str, logprobs: Json | None, reason: str) -> Json:
        return self._choice(text, logprobs, reason)

    def _encode_logprobs(self, entries: Sequence[TokenLogprob]) -> Json:
        offsets: list[int] = []
        for one in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(one.bytes))
        ranked = any(one.top for one in entries)
        return {
            "tokens": [_label(one.token, one.bytes) for one in entries],
            "token_logprobs": [max(one.logprob, _NEVER) for one in entries],
            "top_logprobs": [_ranking(one) for one in entries] if ranked else None,
            "text_offset": offsets,
        }


def _ranking(one: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens; the chosen one is always among them, as with OpenAI."""
    candidates = (*one.top, (one.token, one.bytes, one.logprob))
    return {_label(token, raw): max(logprob, _NEVER) for token, raw, logprob in candidates}


def _label(token: str, raw: bytes) -> str:
    r"""A token's name in this format, which knows no bytes: what is no text of its own is spelt ``bytes:\xe2\x80``."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return token


def _model(model: str, created: int) -> Json:
    return {"id": model, "object": "model", "created": created, "owned_by": "trio_sse"}


def models_document(model: str, created: int) -> bytes:
    """The JSON of ``GET /v1/models``. ``created`` is in seconds since 1970: when the server was started."""
    return json_text({"object": "list", "data": [_model(model, created)]}).encode("ascii")


def model_document(asked: str, model: str, created: int) -> bytes:
    """The JSON of ``GET /v1/models/{asked}``; raises :class:`~trio_sse.errors.NotFound` unless it is ``model``."""
    if asked != model:
        raise NotFound("There is no such model here; GET /v1/models lists what there is.", param="model", code="model_not_found")
    return json_text(_model(model, created)).encode("ascii")
