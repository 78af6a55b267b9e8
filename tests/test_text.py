"""From ids to text: nothing raises, nothing is lost, nothing is shown that has to be taken back."""

from __future__ import annotations

import codecs
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.fakes.small_tokenizers import byte_level, metaspace, sentencepiece
from trio_sse.backends.transformers.text import StopMatcher, TextDecoder, TokenStream, Vocabulary
from trio_sse.errors import ConfigError
from trio_sse.events import Token, TokenLogprob

TEXTS = [
    "🦙👩‍👩‍👧‍👦 ďábelské 漢字 עברית ไทย",
    "🇫🇷🇩🇪 ภาษาไทย e\u0301 \ufffd real",
    "  two  spaces\n\tand tabs\n    def f():\n        pass",
    " x",
    "",
]


def pieces(tokenizer: Tokenizer, ids: list[int], *, continues: bool = False) -> list[str]:
    decoder = TextDecoder(Vocabulary(tokenizer), continues=continues)
    return [*(decoder.feed(token) for token in ids), decoder.flush()]


# The oracle for invalid UTF-8 spells the tokens' bytes out by other means than the code under test.


def byte_level_bytes(tokenizer: Tokenizer, id: int) -> bytes:
    alphabet = byte_alphabet()
    token = tokenizer.id_to_token(id)
    if token is None or token == "<eos>":
        return b""
    return token.encode() if token == "zwei wörter" else bytes(alphabet.index(c) for c in token)


@cache
def byte_alphabet() -> str:
    return "".join(_byte_alphabet())


def _byte_alphabet() -> Iterator[str]:
    """The character for each byte, found by asking the library's own pre-tokenizer for all two-byte sequences of UTF-8 and ASCII."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known: dict[int, str] = {}
    for char in [
        *map(chr, range(0x800)),
        *(chr(n << 12) for n in range(1, 16)),
        *(chr(n << 18) for n in range(1, 4)),
        "\U00100000",
    ]:
        if 0xD800 <= ord(char) < 0xE000:
            continue
        known.update(zip(char.encode(), split.pre_tokenize_str(char)[0][0], strict=True))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    left = sorted(set(alphabet) - set(known.values()))
    for byte in range(256):
        # C0, C1 and F5 to FF occur in no UTF-8: all of them are printable in Latin-1 and stand for themselves.
        yield known.get(byte) or (chr(byte) if chr(byte) in left else pytest.fail(f"no character for {byte:#x}"))


def sentencepiece_bytes(tokenizer: Tokenizer, id: int) -> bytes:
    token = tokenizer.id_to_token(id)
    if token is None or token in ("<unk>", "<s>", "</s>"):
        return b""
    if re.fullmatch("<0x..>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


@pytest.mark.parametrize(
    ("build", "bytes_of", "stripped"), [(byte_level, byte_level_bytes, False), (sentencepiece, sentencepiece_bytes, True)]
)
def test_random_ids(build: Callable[[], Tokenizer], bytes_of: Callable[[Tokenizer, int], bytes], stripped: bool) -> None:
    """10,000 sequences each: the one-shot decode where the bytes are UTF-8, an incremental decoder with replacement elsewhere."""
    tokenizer = build()
    size = tokenizer.get_vocab_size()
    known = [bytes_of(tokenizer, token) for token in range(size)]
    rng = random.Random(8)
    valid = 0
    for n in range(10_000):
        if n % 3:
            ids = [rng.randrange(size) for _ in range(rng.randrange(12))]
        else:
            text = "".join(rng.choices(TEXTS, k=2))
            ids = tokenizer.encode(text).ids[rng.randrange(3) :]
        shown = "".join(pieces(tokenizer, ids))
        data = b"".join(known[token] for token in ids)
        try:
            data.decode()
        except UnicodeDecodeError:
            expected = codecs.getincrementaldecoder("utf-8")("replace").decode(data, True)
            if stripped:
                expected = expected.removeprefix(" ")
        else:
            valid += 1
            expected = tokenizer.decode(ids, skip_special_tokens=True)
        assert shown == expected, ids
    assert 2000 < valid < 9000  # both kinds were there


@pytest.mark.parametrize(
    "tokenizer", [byte_level(), sentencepiece(), metaspace()], ids=["byte-level", "sentencepiece", "metaspace"]
)
def test_no_id_raises(tokenizer: Tokenizer) -> None:
    for token in (-1, 10**6, 2**31, 2**32, 2**40):
        assert pieces(tokenizer, [token, token]) == ["", "", ""]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_split_characters_arrive_whole(tokenizer: Tokenizer, text: str) -> None:
    """D01, D06."""
    ids = tokenizer.encode(text).ids
    deltas = pieces(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids) == text
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")
    if "🦙" in text:
        assert "" in deltas[:-1]  # at least one of its characters really was split


def test_ascii_is_not_delayed() -> None:
    ids = byte_level().encode("plain words, one by one").ids
    deltas = pieces(byte_level(), ids)
    assert all(deltas[:-1])
    assert deltas[-1] == ""


def test_text_without_spaces_is_not_withheld() -> None:
    """D07: a delta for every token that completes a character."""
    tokenizer = byte_level()
    ids = tokenizer.encode("漢字" * 100).ids
    held = longest = 0
    for delta in pieces(tokenizer, ids):
        held = 0 if delta else held + 1
        longest = max(longest, held)
    assert longest <= 3  # the bytes of one character


def test_real_replacement_character_passes_at_once() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a\ufffdb").ids
    deltas = pieces(tokenizer, ids)
    assert "".join(deltas) == "a\ufffdb"
    assert deltas[-1] == ""


def test_half_a_character_at_the_end_is_flushed_once() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("x🦙").ids[:-1]
    deltas = pieces(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids) == "x\ufffd"
    assert deltas[-1] == "\ufffd"


def test_space_in_front() -> None:
    """D06: a text of its own loses SentencePiece's dummy space, as in the one-shot decode; one that continues a prompt keeps it."""
    tokenizer = sentencepiece()
    ids = tokenizer.encode("the dog").ids
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "the dog"
    assert "".join(pieces(tokenizer, ids, continues=True)) == " the dog"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace(scheme: str) -> None:
    tokenizer = metaspace(scheme)
    rng = random.Random(1)
    for _ in range(500):
        ids = [rng.randrange(6) for _ in range(rng.randrange(6))]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(pieces(tokenizer, [0, 2], continues=True)) == " ac"


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")])]
)
def test_decoder_that_cannot_stream_is_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match="--model"):
        Vocabulary(tokenizer)


# Stop strings


def matched(stops: tuple[str, ...], parts: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(part) for part in parts)
    return shown + matcher.flush(), matcher.matched


@pytest.mark.parametrize(
    ("stops", "parts", "text", "stop"),
    [
        (("DEFGHIJ",), ["ABC", "DEF", "G", "HI", "J!!"], "ABC", "DEFGHIJ"),
        (("DEFGHIJ",), ["ABC", "DEF", "G", "HI", "X"], "ABCDEFGHIX", None),
        (("\nUser:",), ["fine.", "\n", "Use", "r", ": hi"], "fine.", "\nUser:"),
        (("in",), ["begin it"], "beg", "in"),
        (("stop", "stopped"), ["we st", "opped"], "we ", "stop"),
        (("stopped", "stop"), ["we st", "opped"], "we ", "stop"),
        (("aab",), ["a", "a", "a", "b"], "a", "aab"),
        (("aab",), ["aaab"], "a", "aab"),
        (("abcd", "bc"), ["xabcd"], "xa", "bc"),
        (("xbc", "bc"), ["axbc"], "a", "xbc"),
        (("👩‍👧",), ["👩", "\u200d", "👧", "!"], "", "👩‍👧"),
        (("👩",), ["a👩\u200d", "👧"], "a", "👩"),
        (("end",), ["the e", "n"], "the en", None),
        ((), ["any", "thing"], "anything", None),
    ],
)
def test_stop_strings(stops: tuple[str, ...], parts: list[str], text: str, stop: str | None) -> None:
    """D08."""
    assert matched(stops, parts) == (text, stop)


def test_stop_strings_in_any_cutting() -> None:
    """Against a plain search, character by character, over random texts, stop strings and cuttings; with the least held back."""
    rng = random.Random(3)
    for _ in range(20_000):
        text = "".join(rng.choices("ab", k=rng.randrange(15)))
        stops = tuple({"".join(rng.choices("abc", weights=(5, 5, 1), k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))})
        expected, stop = text, None
        for end in range(1, len(text) + 1):
            if ending := [s for s in stops if text[:end].endswith(s)]:
                stop = max(ending, key=len)
                expected = text[: end - len(stop)]
                break
        matcher = StopMatcher(stops)
        shown = ""
        at = 0
        while at < len(text):
            cut = at + rng.randrange(1, 4)
            shown += matcher.feed(text[at:cut])
            at = cut
            if matcher.matched is None:
                seen = text[:cut]
                held = max((n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
                assert shown == seen[: len(seen) - held]
        assert matcher.feed("") + matcher.flush() == expected[len(shown) :]
        assert matcher.matched == stop


@pytest.mark.slow
def test_stop_matching_is_linear() -> None:
    """D10: near misses of long stop strings cost no more than the text's length. Ten times the text, about ten times the time."""

    def seconds(size: int) -> float:
        matcher = StopMatcher(("a" * 1000 + "b", "a" * 999 + "c", "ab", "aaaaaac"))
        begin = time.perf_counter()
        for _ in range(size):
            matcher.feed("a")
        return time.perf_counter() - begin

    seconds(2_000)
    assert seconds(100_000) < 30 * min(seconds(10_000) for _ in range(3))


# The account


def events(stream: TokenStream, ids: list[int]) -> list[Token]:
    made = [event for token in ids if not stream.stopped and (event := stream.feed(token))]
    tail = stream.finish()
    return made if tail is None else [*made, tail]


def test_every_token_is_counted_once() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    rng = random.Random(5)
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(12))]
        stream = TokenStream(vocabulary, ("the", "e", "é"))
        fed = 0
        made = []
        for token in ids:
            if stream.stopped:
                break
            fed += 1
            if event := stream.feed(token):
                assert event.text
                made.append(event)
        if tail := stream.finish():
            made.append(tail)
        assert sum(event.count for event in made) == fed
        assert stream.finish() is None


def test_logprobs_stay_with_their_tokens() -> None:
    """D11: one entry per token, in order, though text was held back."""
    tokenizer = byte_level()
    ids = tokenizer.encode("a🦙 the end").ids
    entries = [TokenLogprob(str(n), b"", -float(n)) for n in range(len(ids))]
    stream = TokenStream(Vocabulary(tokenizer), (" the ending",))
    made = [event for token, entry in zip(ids, entries, strict=True) if (event := stream.feed(token, entry))]
    tail = stream.finish()
    assert tail is not None
    assert [entry for event in [*made, tail] for entry in event.logprobs] == entries
    assert all(len(event.logprobs) == event.count for event in [*made, tail])
    assert "".join(event.text for event in [*made, tail]) == "a🦙 the end"


def test_stop_completed_by_the_flush() -> None:
    """Half a character at the end becomes U+FFFD, and that may be what was to be stopped at."""
    tokenizer = byte_level()
    stream = TokenStream(Vocabulary(tokenizer), ("x\ufffd",))
    made = events(stream, tokenizer.encode("ax🦙").ids[:-1])
    assert "".join(event.text for event in made) == "a"
    assert stream.stopped
