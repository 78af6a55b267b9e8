"""From token ids to text that may be shown: incremental decoding, stop strings, and the account of what is held back. Pure.

    id ──Vocabulary──▶ bytes ──TextDecoder──▶ characters ──StopMatcher──▶ text ──TokenStream──▶ Token(text, count, logprobs)

A token is a few *bytes*, not characters: an emoji may be spread over four tokens. So ids become bytes, one lookup each, and one
incremental UTF-8 decoder makes characters of them. That is the whole trick: nothing is ever decoded twice, so the cost is linear;
an unfinished character stays inside the decoder, so no U+FFFD is shown for it; a U+FFFD that the model really wrote is three bytes
like any others; and there is no id sequence that could raise, because bytes that are no UTF-8 become U+FFFD.

Which bytes a token stands for is read from the tokenizer's own decoder: byte-level BPE maps characters to bytes, SentencePiece
spells a byte as ``<0x0A>`` and a space as ``▁``. A decoder that cannot be read like this is refused when the model is loaded.

Rules:

1. What leaves here is final; text only grows.
2. The text of a whole generation equals the tokenizer's one-shot decode of its ids (special tokens skipped) where their bytes are
   valid UTF-8, and an incremental decode with replacement elsewhere.
3. SentencePiece tokenizers drop the space in front of the very first word. A text that *continues* a prompt keeps it.
4. The stop string that is complete first wins; of two that are complete at the same character, the longer. The text ends before it.
5. Held back is only the longest tail that could still become a stop string, and half a character. It is released exactly once.
6. Every generated token is counted once, in the event that carries its text or in the first one after it.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from tokenizers import Tokenizer

from trio_sse.errors import ConfigError
from trio_sse.events import Token, TokenLogprob

__all__ = ["StopMatcher", "TextDecoder", "TokenStream", "Vocabulary"]


class Vocabulary:
    """Token id → bytes, for one tokenizer. Entries are made when they are first needed.

    Raises:
      ConfigError: the tokenizer's decoder is of a kind whose tokens have no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {n for n, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._replace: list[tuple[str, str]] = []
        self._byte_level = False
        self._byte_fallback = False
        self._dropped_in_first = ""  # Metaspace: all of these go from the first token
        self.strip = ("", 0)  # (character, how many of it go from the front of the whole text)
        self._read(tokenizer)
        self._known: dict[int, bytes | None] = {}

    def bytes_of(self, id: int, *, first: bool = False) -> bytes | None:
        """The bytes of one token; None for an unknown or special one, which leaves no trace in the text.

        ``first``: no token with bytes came before, and the text continues no other.
        """
        if first and self._dropped_in_first:
            return self._make(id, first=True)
        try:
            return self._known[id]
        except KeyError:
            value = self._known[id] = self._make(id)
            return value

    def _make(self, id: int, *, first: bool = False) -> bytes | None:
        if id in self._special or not 0 <= id < 1 << 32:
            return None
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return None
        if first:
            token = token.replace(self._dropped_in_first, "")
        for old, new in self._replace:
            token = token.replace(old, new)
        if self._byte_level:
            # A token with a foreign character in it (an added one) stands for itself.
            return bytes(_BYTE_OF[c] for c in token) if all(c in _BYTE_OF for c in token) else token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    def _read(self, tokenizer: Tokenizer) -> None:
        """Reads the decoder's configuration, which the library gives as JSON to whoever pickles it."""
        decoder = tokenizer.decoder
        config: dict[str, Any] = {"type": "nothing"} if decoder is None else json.loads(decoder.__getstate__())
        parts: list[dict[str, Any]] = config["decoders"] if config["type"] == "Sequence" else [config]
        to_bytes = fused = False  # a replacement that comes after either would have to work on the joined text
        for part in parts:
            kind = part["type"]
            if kind == "Replace" and "String" in part["pattern"] and not (to_bytes or fused):
                self._replace.append((part["pattern"]["String"], part["content"]))
            elif kind == "Metaspace" and not (to_bytes or fused):
                self._replace.append((part["replacement"], " "))
                if part["prepend_scheme"] != "never":
                    self._dropped_in_first = part["replacement"]
            elif kind == "ByteLevel" and not (to_bytes or fused):
                self._byte_level = to_bytes = True
            elif kind == "ByteFallback" and not (to_bytes or fused):
                self._byte_fallback = to_bytes = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and part["stop"] == 0 and self.strip[1] == 0:
                self.strip = (part["content"], part["start"])
            else:
                raise ConfigError(f"--model: its tokenizer decodes by {kind}, of which the text cannot be streamed")


def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is one, else the next free one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_of()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_utf8 = codecs.getincrementaldecoder("utf-8")


class TextDecoder:
    """Ids in, whole characters out. ``continues``: the text goes on from a prompt, so that a space in front belongs to it."""

    def __init__(self, vocabulary: Vocabulary, *, continues: bool = False) -> None:
        self._vocabulary = vocabulary
        self._utf8 = _utf8("replace")
        self._first = not continues
        self._strip = 0 if continues else vocabulary.strip[1]

    def feed(self, id: int) -> str:
        """The characters that ``id`` completes; often one word, sometimes nothing."""
        data = self._vocabulary.bytes_of(id, first=self._first)
        if data is None:
            return ""
        self._first = False
        text = self._utf8.decode(data)
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """The end: bytes that never became a character are U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(self._vocabulary.strip[0]):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0  # the front of the text has gone by
        return text


class StopMatcher:
    """Finds the first of several stop strings in a text that arrives in pieces (Knuth, Morris and Pratt, one state per stop string).

    What is held back is by definition the beginning of a stop string. It is therefore not stored: the states say which one, and
    how much of it. So neither long stop strings nor endless near misses cost more than a constant per character.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = [(stop, _failure(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._firsts = {stop[0] for stop in stops}
        self._held = ("", 0)  # a stop string, and how much of it is held back
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown now. Once ``matched`` is set that is nothing, for ever."""
        if self.matched is not None:
            return ""
        if not self._held[1] and not any(first in text for first in self._firsts):
            return text
        for end, char in enumerate(text, 1):
            stop = self._advance(char)
            if stop:
                self.matched = stop
                return self._release(text, end - len(stop))
        held = max(self._states)
        released = self._release(text, len(text) - held)
        self._held = (self._stops[self._states.index(held)][0], held)
        return released

    def flush(self) -> str:
        """The end: what was held back is no stop string after all."""
        return "" if self.matched is not None else self._release("", 0)

    def _advance(self, char: str) -> str:
        """Takes one character in; the longest stop string that it completes, or ``""``."""
        complete = ""
        for n, (stop, failure) in enumerate(self._stops):
            state = self._states[n]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            self._states[n] = state
            if state == len(stop) and state > len(complete):
                complete = stop
        return complete

    def _release(self, text: str, end: int) -> str:
        """What was held back and ``text[:end]``; a negative ``end`` leaves some of what was held back where it is."""
        stop, held = self._held
        self._held = ("", 0)
        return stop[: held + end] if end <= 0 else stop[:held] + text[:end]


def _failure(stop: str) -> list[int]:
    """``failure[i]``: the length of the longest proper prefix of ``stop`` that ends ``stop[:i + 1]``."""
    failure = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = failure[length - 1]
        if stop[i] == stop[length]:
            length += 1
        failure[i] = length
    return failure


class TokenStream:
    """Generated ids in, :class:`~trio_sse.events.Token` events out, for one generation."""

    def __init__(self, vocabulary: Vocabulary, stops: tuple[str, ...] = (), *, continues: bool = False) -> None:
        self._decoder = TextDecoder(vocabulary, continues=continues)
        self._matcher = StopMatcher(stops)
        self._count = 0
        self._logprobs: list[TokenLogprob] = []

    @property
    def stopped(self) -> bool:
        """A stop string is complete: the generation is over."""
        return self._matcher.matched is not None

    def feed(self, id: int, logprob: TokenLogprob | None = None) -> Token | None:
        """Takes one generated token in; an event, if there is text to show."""
        self._count += 1
        if logprob is not None:
            self._logprobs.append(logprob)
        return self._event(self._matcher.feed(self._decoder.feed(id)))

    def finish(self) -> Token | None:
        """The last event: what is held back, and the tokens not yet accounted for. None where there is neither."""
        text = self._matcher.feed(self._decoder.flush()) + self._matcher.flush()
        return self._event(text, even_empty=self._count > 0)

    def _event(self, text: str, *, even_empty: bool = False) -> Token | None:
        if not text and not even_empty:
            return None
        token = Token(text, self._count, tuple(self._logprobs))
        self._count = 0
        self._logprobs.clear()
        return token
