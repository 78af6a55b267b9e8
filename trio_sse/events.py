"""What a dialect asks of a backend, and what a stream carries back.

    GenerationRequest ──▶ backend.prepare ──▶ Prepared ──▶ backend.generate ──▶ Started, (Token | ToolCall)*, Finish

Rules of the sequence:

1. ``Started`` comes first and exactly once. It says that the backend has accepted the work; the response's head is sent when it
   arrives. Whatever fails before it is an HTTP status.
2. Then any number of ``Token`` and ``ToolCall``.
3. ``Finish`` comes last, and only where the generation came to an end of its own. Work that fails raises instead.

A token is counted where it is generated and once more where its text is sent. Text that has to be held back (half a character,
half a stop string) leaves with a later event, whose ``count`` then says how many tokens it stands for. The sum of the counts is
the number of tokens generated, whatever the text did.
"""

from __future__ import annotations

import builtins

import msgspec

from trio_sse.script import Script

__all__ = [
    "Event",
    "Finish",
    "GenerationRequest",
    "Message",
    "Sampling",
    "Started",
    "Token",
    "TokenLogprob",
    "ToolCall",
]


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation. ``content`` is plain text: a dialect joins parts before it gets here."""

    role: str
    content: str


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen. The defaults are greedy decoding.

    ``temperature`` 0 is greedy; ``top_p``, ``min_p`` in 0..1 and ``top_k`` (0 = off) cut the distribution; the penalties are
    OpenAI's (−2..2, subtracted from logits) and Hugging Face's ``repetition_penalty`` (1 = off); ``logit_bias`` maps a token id to
    what is added to its logit; ``seed`` None is a fresh one; ``logprobs`` None asks for none, N for the chosen token's and the N
    most likely ones beside it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True):
    """One piece of work, as a dialect understood it. Exactly one of ``prompt``, ``messages`` and ``script`` is set.

    ``max_tokens`` None means: up to the end of the context window. ``stop`` holds up to a few non-empty strings. ``script`` is only
    for the scripted backend behind ``/events``.
    """

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    script: Script | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    model: str | None = None


class Started(msgspec.Struct, frozen=True):
    """The backend has accepted the work."""


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One generated token: its text, its bytes, its natural-log probability, and the likeliest ones at its place."""

    token: str
    bytes: bytes
    logprob: float
    top: tuple[tuple[str, builtins.bytes, float], ...] = ()  # bytes alone would be the field


class Token(msgspec.Struct, frozen=True, gc=False):
    """Text that is ready to be shown, and the number of generated tokens it stands for."""

    text: str
    count: int = 1
    logprobs: tuple[TokenLogprob, ...] = ()


class ToolCall(msgspec.Struct, frozen=True):
    """A tool event. ``data`` is JSON-ready."""

    data: dict[str, object]


class Finish(msgspec.Struct, frozen=True):
    """The generation ended of itself. ``reason`` is ``stop`` (end token or stop string) or ``length``."""

    reason: str


Event = Started | Token | ToolCall | Finish
