"""Strict JSON in: a request body becomes a typed value, or a 400 that names the field.

What a lenient reader lets through comes back later as a wrong answer or a crash: ``true`` becomes 1 token, NaN poisons a sampler,
a lone surrogate blows up the tokenizer, the first of two equal keys is what a gateway checked and the last what the engine used.
So the body is read once by the standard library's parser, the tree is looked over here, and msgspec fits it to its type.

Rules:

1. Bytes are UTF-8 without a byte order mark, everywhere, in ignored fields too.
2. One JSON object, and nothing behind it. No key twice in any object. At most :data:`MAX_DEPTH` levels.
3. Numbers are finite, strings have no lone surrogate, everywhere.
4. Types are exact: ``true`` and ``5.0`` are no integers, ``"5"`` is no number, ``1`` is no boolean. 5 is a number where fractions
   are allowed. Fields that the type does not know are ignored.
5. Nothing but :class:`~trio_sse.errors.BadRequest` comes out. Its ``param`` is the field's path (``messages[0].role``) where one
   is to blame, and its words are ours: a library's message may change, and may show a class's name.

msgspec's own decoder would be faster, yet it neither sees duplicate keys nor says which string holds a surrogate; and it raises
RecursionError at a depth that hangs on the caller's stack. 9 KB of messages take some 100 µs here; the worst megabyte, all
brackets, half a second, so a big body is better decoded off the event loop.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec

from trio_sse.errors import BadRequest

__all__ = ["MAX_DEPTH", "Int64", "decode"]

T = TypeVar("T")

MAX_DEPTH = 64
_LONGEST_NAME = 64

# Python's integers have no end; a field that goes on into C, torch or a database has.
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def decode(body: bytes, type: type[T]) -> T:
    """``body`` as a ``type`` (a msgspec Struct).

    Raises:
      BadRequest: for whatever is wrong with it; see the rules above.
    """
    tree = _parse(_text(body))
    if not isinstance(tree, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    _look_over(tree)
    try:
        return msgspec.convert(tree, type)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


# --- bytes → tree ---------------------------------------------------------------------------------------------------------


class _DuplicateKey(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return value


# NaN and Infinity, which this parser knows and JSON does not, become floats here. The look over the tree refuses them by name.
_parser = json.JSONDecoder(object_pairs_hook=_object)


def _text(body: bytes) -> str:
    if not body:
        raise BadRequest("The request body is empty; a JSON object is expected.", code="invalid_json")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"The request body is not valid UTF-8 (at byte {error.start}).", code="invalid_json") from None
    if text[0] == "\ufeff":
        raise BadRequest("The request body must not begin with a byte order mark.", code="invalid_json")
    return text


def _parse(text: str) -> object:
    try:
        return _parser.decode(text)
    except _DuplicateKey as error:
        name = _shown(error.key)
        raise BadRequest(f"The key '{name}' is given twice in one object.", param=name, code="duplicate_key") from None
    except RecursionError:
        # Where this happens depends on the stack; it is far beyond MAX_DEPTH, and nothing of it is kept.
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"The request body is not valid JSON (at character {error.pos}).", code="invalid_json") from None
    except ValueError:
        # int() refuses what would take it quadratic time.
        raise BadRequest("The request body has a number with too many digits.", code="invalid_json") from None


# --- the look over the tree -----------------------------------------------------------------------------------------------

_SURROGATE = re.compile("[\ud800-\udfff]")

# Where a value stands: its parent's place and its own key or index. Spelt out only when there is something to say about it.
_Place = tuple["_Place | None", "str | int"]


def _look_over(tree: dict[str, Any]) -> None:
    """Level by level, not recursively, so that neither depth nor the caller's stack matters.

    The loop is flat because a body may hold half a million values, and other streams wait meanwhile.
    """
    level: list[tuple[_Place | None, Any]] = [(None, tree)]
    for _ in range(MAX_DEPTH):
        deeper: list[tuple[_Place | None, Any]] = []
        for place, container in level:
            items: Iterable[tuple[str | int, Any]]
            if isinstance(container, dict):
                items = container.items()
                for key in container:
                    if not key.isascii() and _SURROGATE.search(key):
                        raise _half_a_character((place, key))
            else:
                items = enumerate(container)
            for step, value in items:
                kind = value.__class__
                if kind is str:
                    if not value.isascii() and _SURROGATE.search(value):
                        raise _half_a_character((place, step))
                elif kind is list or kind is dict:
                    deeper.append(((place, step), value))
                elif kind is float and not math.isfinite(value):
                    path = _path((place, step))
                    raise BadRequest(f"{path} must be a finite number.", param=path)
        if not deeper:
            return
        level = deeper
    raise _too_deep()


def _half_a_character(place: _Place) -> BadRequest:
    path = _path(place)
    return BadRequest(f"{path} has half of a surrogate pair, which is no character.", param=path)


def _path(place: _Place) -> str:
    steps: list[str] = []
    at: _Place | None = place
    while at is not None:
        at, step = at
        steps.append(f"[{step}]" if isinstance(step, int) else f".{_shown(step)}")
    return "".join(reversed(steps)).removeprefix(".")


def _shown(name: str) -> str:
    """A client's own key, fit to be shown: printable ASCII, and not for ever."""
    clean = "".join(mark if mark.isascii() and mark.isprintable() else "?" for mark in name[:_LONGEST_NAME])
    return clean if len(name) <= _LONGEST_NAME else clean + "..."


def _too_deep() -> BadRequest:
    return BadRequest(f"The request body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")


# --- msgspec's verdict in our words ---------------------------------------------------------------------------------------

_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `([^`]*)`")
_MISFIT = re.compile(r"^Expected `([^`]*)`, got `([^`]*)`")
_LENGTH = re.compile(r"^Expected `(str|array|object)` of length (>=|<=) (\d+)")
_BOUND = re.compile(r"^Expected `(int|float)` (>=|<=|>|<) ([-+.\de]+)")

_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_GOT = {**_TYPES, "bool": "a boolean", "float": "a fraction"}
_UNITS = {"str": "characters", "array": "items", "object": "keys"}
_RELATIONS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def _refusal(text: str) -> BadRequest:
    """The refusal for msgspec's ``text``. What is not recognised still names its field."""
    where = _WHERE.search(text)
    path = where[1].replace("[...]", "") if where else ""  # a dictionary's values have no names of their own
    if missing := _MISSING.match(text):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"{path} is required.", param=path)
    name = path or "The request body"
    return BadRequest(f"{name} {_complaint(text)}.", param=path or None)


def _complaint(text: str) -> str:
    if match := _MISFIT.match(text):
        wanted = [_TYPES.get(kind, "another type") for kind in match[1].split(" | ")]
        return f"must be {' or '.join(wanted)}, not {_GOT.get(match[2], 'this')}"
    if match := _LENGTH.match(text):
        if match[2] == ">=" and match[3] == "1":
            return "must not be empty"
        return f"must have {_RELATIONS[match[2]]} {match[3]} {_UNITS[match[1]]}"
    if match := _BOUND.match(text):
        return f"must be {_RELATIONS[match[2]]} {match[3].removesuffix('.0')}"
    if "out of range" in text:
        return "is out of range"
    return "has a value that is not allowed"
