"""json_in: what is refused, how the field is named, and that nothing but BadRequest ever comes out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, strategies as st

from trio_sse.errors import BadRequest
from trio_sse.json_in import MAX_DEPTH, Int64, decode


class Item(msgspec.Struct):
    role: str
    content: str | None = None


class Body(msgspec.Struct):
    items: Annotated[list[Item], msgspec.Meta(min_length=1)] = []
    count: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    wide: Int64 | None = None
    heat: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    free: float | None = None
    flag: bool = False
    stop: str | Annotated[list[str], msgspec.Meta(max_length=4)] | None = None
    bias: dict[str, Annotated[float, msgspec.Meta(le=100)]] | None = None
    kind: Literal["a", "b"] = "a"
    short: Annotated[str, msgspec.Meta(min_length=1, max_length=3)] = "a"


class Anything(msgspec.Struct):
    x: Any = None


def refusal(body: bytes, type: type[Any] = Body) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode(body, type)
    error = caught.value
    assert error.status == 400
    assert error.message.isascii()
    assert error.message.endswith(".")
    assert error.__suppress_context__ or error.__context__ is None, "the library's text must not hang on to it"
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        # numbers
        (b'{"heat":NaN}', "heat"),
        (b'{"heat":Infinity}', "heat"),
        (b'{"heat":-Infinity}', "heat"),
        (b'{"heat":1e999}', "heat"),
        (b'{"unknown":{"deep":[1,NaN]}}', "unknown.deep[1]"),
        (b'{"unknown":-1e999}', "unknown"),
        (b'{"count":5.0}', "count"),
        (b'{"count":5.5}', "count"),
        (b'{"count":1e2}', "count"),
        (b'{"count":true}', "count"),
        (b'{"count":"5"}', "count"),
        (b'{"count":[5]}', "count"),
        (b'{"count":0}', "count"),
        (b'{"count":257}', "count"),
        (b'{"heat":true}', "heat"),
        (b'{"heat":"1"}', "heat"),
        (b'{"heat":2.0000001}', "heat"),
        (b'{"wide":9223372036854775808}', "wide"),
        (b'{"wide":-9223372036854775809}', "wide"),
        (b'{"wide":1000000000000000000000000000000}', "wide"),
        (b'{"free":1' + b"0" * 400 + b"}", "free"),
        (b'{"bias":{"7":101}}', "bias"),
        (b'{"bias":{"7":"1"}}', "bias"),
        # booleans
        (b'{"flag":1}', "flag"),
        (b'{"flag":"true"}', "flag"),
        (b'{"flag":null}', "flag"),
        # strings and shapes
        (b'{"items":[]}', "items"),
        (b'{"items":{}}', "items"),
        (b'{"items":null}', "items"),
        (b'{"items":[null]}', "items[0]"),
        (b'{"items":[{}]}', "items[0].role"),
        (b'{"items":[{"role":"a"},{"role":1}]}', "items[1].role"),
        (b'{"stop":5}', "stop"),
        (b'{"stop":[5]}', "stop[0]"),
        (b'{"stop":["a","b","c","d","e"]}', "stop"),
        (b'{"kind":"secret"}', "kind"),
        (b'{"short":""}', "short"),
        (b'{"short":"abcd"}', "short"),
        # half a surrogate pair
        (b'{"kind":"\\ud83d"}', "kind"),
        (b'{"items":[{"role":"a","content":"x \\udc00"}]}', "items[0].content"),
        (b'{"unknown":["a","\\ud83d\\ud83d\\ude00"]}', "unknown[1]"),
        (b'{"\\ud83d":1}', "?"),
        # a key twice
        (b'{"count":1,"count":1}', "count"),
        (b'{"unknown":[{"y":1,"z":2,"\\u0079":1}]}', "y"),
    ],
)
def test_refusal_names_the_field(body: bytes, param: str) -> None:
    error = refusal(body)
    assert error.param == param
    assert param.strip("?") in error.message
    assert "secret" not in error.message, "a client's own values are not echoed"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"x"',
        b"1",
        b"NaN",
        b"{",
        b"{}{}",
        b"{} x",
        b"{}\x00",
        b'{"a":1,}',
        b"{'a':1}",
        b'{"a":01}',
        b'{"a":+1}',
        b'{"a":.5}',
        b'{"a":1.}',
        b'{"a":0x10}',
        b'{"a":"\n"}',
        b'{"a":"\x00"}',
        b'{"a":"\\x41"}',
        b'{"a":"\\ud83"}',
        b"// c\n{}",
        b'\x0b{"a":1}',
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        "{}".encode("utf-16-le"),
        "{}".encode("utf-32"),
        b'{"count":1,"unknown":"a\x97b"}',
        b'{"a\xff":1}',
        b'{"a":"\xc0\x80"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\xf5\x80\x80\x80"}',
        b"{}\xff",
        b'{"wide":' + b"1" * 5000 + b"}",
        b'{"unknown":' + b"1" * 5000 + b"}",
    ],
)
def test_refusal_of_a_body_that_is_no_json_object(body: bytes) -> None:
    assert refusal(body).param is None


def test_a_byte_order_mark_is_named() -> None:
    assert "byte order mark" in refusal(b"\xef\xbb\xbf{}").message


def test_what_is_accepted() -> None:
    body = decode(
        b' {"items":[{"role":"a","content":null,"extra":{}}],"count":256,"wide":-9223372036854775808,"heat":1,"free":-0.0,'
        b'"stop":[],"bias":{"7":-100},"foo":{"bar":[1,1e300,"\\ud83d\\ude00",null]},"\\u0066lag":true}\r\n',
        Body,
    )
    assert body == Body(items=[Item("a")], count=256, wide=-(2**63), heat=1.0, free=0.0, stop=[], bias={"7": -100.0}, flag=True)
    assert isinstance(body.heat, float), "an integer is a number where fractions are allowed"
    assert decode(b'{"x":"\\ud83d\\ude00"}', Anything).x == "\N{GRINNING FACE}"
    assert decode(b'{"x":"\xf0\x9f\x98\x80\\u2028"}', Anything).x == "\N{GRINNING FACE}\u2028"


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"x":', b"}")])
def test_nesting_is_bounded_at_any_stack_depth(opening: bytes, closing: bytes) -> None:
    def body(levels: int) -> bytes:
        # The outermost object is the first level.
        return b'{"x":' + opening * (levels - 1) + b"1" + closing * (levels - 1) + b"}"

    assert decode(body(MAX_DEPTH), Anything).x is not None
    began = time.perf_counter()
    for levels in (MAX_DEPTH + 1, 500, 1000, 5000, 100_000):
        assert "64" in refusal(body(levels), Anything).message
    assert time.perf_counter() - began < 1

    def at_depth(frames: int, then: Callable[[], object]) -> object:
        return at_depth(frames - 1, then) if frames else then()

    here = len(__import__("inspect").stack())
    for left in (600, 300, 150, 100, 60):
        at_depth(sys.getrecursionlimit() - here - left, lambda: refusal(body(1000), Anything))
        at_depth(sys.getrecursionlimit() - here - left, lambda: refusal(body(100_000), Anything))


def test_a_clients_key_is_shown_clean_and_short() -> None:
    error = refusal(json.dumps({"é\r\n" + "k" * 1000: float("nan")}).encode())
    assert error.param is not None
    assert error.param.startswith("???kkk")
    assert len(error.param) < 80
    # The error's body is what goes on the wire.
    assert json.loads(error.body())["error"]["param"] == error.param


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=_values, ascii=st.booleans())
def test_any_json_value_comes_through_unchanged(value: object, ascii: bool) -> None:
    assert decode(json.dumps({"x": value}, ensure_ascii=ascii).encode(), Anything).x == value


@given(value=_values, cut=st.integers(0), flip=st.binary(max_size=3))
def test_any_bytes_are_read_as_json_or_refused(value: object, cut: int, flip: bytes) -> None:
    body = json.dumps({"x": value}).encode()
    at = cut % (len(body) + 1)
    body = body[:at] + flip + body[at + len(flip) :]
    try:
        read = decode(body, Anything)
    except BadRequest:
        return
    # Whatever is accepted is what another strict parser reads too.
    assert msgspec.json.decode(body, type=Anything) == read
