"""Properties, for arbitrary examples: the event stream cut anywhere, any interleaving of reader and writer, any bytes for the server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import trio
import trio.testing
from hypothesis import example, given, settings, strategies as st

from tests.faults.wire import read_replies
from tests.support.capture import captured_log
from tests.support.stage import Stage, get, post
from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.events import Finish, Started, Token
from trio_sse.script import Script
from trio_sse.simulated import SimulatedPeer
from trio_sse.sse import Parser, ServerSentEvent, frame
from trio_sse.trace import Outcome

# The same examples every time: a suite that is to be trusted does not roll dice. --hypothesis-seed and another profile do.
steady = settings(deadline=None, derandomize=True, max_examples=80)


# The event stream

one_line = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=8)
any_data = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("\r\n:\u2028\u0085 \ufeff")), max_size=20
)
frames = st.lists(st.tuples(any_data, st.none() | one_line, st.none() | one_line), max_size=5)


def parsed(pieces: list[bytes]) -> tuple[list[ServerSentEvent], int]:
    parser = Parser()
    return [event for piece in pieces for event in parser.feed(piece)], parser.comments


@steady
@given(frames, st.integers(0, 3))
@example([("a\r\nb\rc\nd", None, None)], 1)
def test_round_trip_at_every_split(events: list[tuple[str, str | None, str | None]], comments: int) -> None:
    """What the encoder wrote is what the parser reads, wherever the bytes are cut, and comments between events change nothing."""
    raw = b"".join(b": hb\n" * comments + frame(data, event=event, id=name) for data, event, name in events)
    expected = []
    last_id = ""
    for data, event, name in events:
        last_id = last_id if name is None else name
        expected.append(ServerSentEvent(re.sub(r"\r\n|\r", "\n", data), event or "message", last_id))
    whole = parsed([raw])
    assert whole == (expected, comments * len(events))
    for cut in range(len(raw) + 1):
        assert parsed([raw[:cut], raw[cut:]]) == whole
    assert parsed([bytes([byte]) for byte in raw]) == whole


@steady
@given(st.binary(max_size=60) | st.lists(st.sampled_from([b"data:", b"id", b":", b"\r", b"\n", b"\xef\xbb\xbf", b" ", b"x"])).map(b"".join))
def test_any_bytes_parse_the_same_at_every_split(raw: bytes) -> None:
    whole = parsed([raw])
    for cut in range(len(raw) + 1):
        assert parsed([raw[:cut], raw[cut:]]) == whole


# Reader and writer

Act = tuple[float, str, int]
delays = st.sampled_from([0.0, 0.001, 0.05, 0.3, 2.0])
deeds = st.sampled_from(["read", "read", "read", "stall", "resume", "half_close", "narrow"])
acts = st.lists(st.tuples(delays, deeds, st.integers(1, 3000)), max_size=8)
ends = st.sampled_from(["read to the end", "close", "reset", "delete", "cancel"])


@dataclass
class Pacing(Backend):
    """Sends tokens of the given sizes, each after its delay."""

    plan: list[tuple[float, int]]
    drain: bool = False
    active: int = 0
    texts: list[str] = field(default_factory=list)

    async def prepare(self, request: object) -> Prepared:
        await trio.lowlevel.checkpoint()
        return Prepared(request=request, drain_budget=60.0 if self.drain else None)  # type: ignore[arg-type]

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        self.active += 1
        try:
            await events.send(Started())
            for number, (delay, size) in enumerate(self.plan):
                if delay:
                    await trio.sleep(delay)
                await events.send(Token(text(number, size)))
            await events.send(Finish("stop"))
        finally:
            self.active -= 1


def text(number: int, size: int) -> str:
    return f"{number}:" + "x" * size


@settings(steady, max_examples=200)
@given(
    plan=st.lists(st.tuples(delays, st.sampled_from([0, 1, 10, 1000, 5000])), max_size=12),
    drain=st.booleans(),
    stream=st.booleans(),
    capacity=st.integers(1, 5),
    window=st.sampled_from([1, 50, 4096, 65536]),
    heartbeat=st.sampled_from([0.0, 0.02, 0.5]),
    reader=acts,
    end=ends,
)
def test_any_interleaving(
    plan: list[tuple[float, int]], drain: bool, stream: bool, capacity: int, window: int, heartbeat: float, reader: list[Act], end: str
) -> None:
    """However the client reads and whenever it leaves: a prefix arrives, or all of it; one outcome; nothing is left."""

    async def main() -> None:
        backend = Pacing(plan, drain)
        async with trio.open_nursery() as nursery:
            stage = Stage(
                nursery, backend, window=window, channel_capacity=capacity, heartbeat=heartbeat, write_timeout=3.0, cancel_grace=60.0
            )
            peer = stage.connect()
            peer.send(post("/v1/completions", {"prompt": "hi", "stream": stream}, "X-Request-Id: one"))
            with trio.fail_after(300):
                await play(stage, peer, reader)
                await finish(stage, peer, end)
                await trio.testing.wait_all_tasks_blocked()  # the connection's task has begun
                while stage.connections:  # noqa: ASYNC110
                    await trio.sleep(1)
            await stage.settled()
            assert backend.active == 0
            check(stage, peer, [text(number, size) for number, (_, size) in enumerate(plan)], stream, end)
            nursery.cancel_scope.cancel()

    with captured_log() as log:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert not [entry.getMessage() for entry in log if entry.exc_info]


async def play(stage: Stage, peer: SimulatedPeer, reader: list[Act]) -> None:
    for delay, what, amount in reader:
        await trio.sleep(delay)
        if what == "read":
            peer.read(amount)
        elif what == "stall":
            peer.stall()
        elif what == "resume":
            peer.resume()
        elif what == "half_close":
            peer.shutdown_write()
        else:
            peer.max_write = amount


async def finish(stage: Stage, peer: SimulatedPeer, end: str) -> None:
    live = list(stage.server.routes.live.values())
    if end == "delete":
        for exchange, _ in live:
            exchange.stop(Outcome.CANCELLED, "delete")
    elif end == "cancel":
        for scope in list(stage.scopes.values()):
            scope.cancel()
    elif end != "read to the end":
        {"close": peer.close, "reset": peer.reset}[end]()
        return
    peer.resume()
    await peer.wait_closed()


def check(stage: Stage, peer: SimulatedPeer, texts: list[str], stream: bool, end: str) -> None:
    if not stage.records:
        assert end in ("close", "reset", "cancel")  # before a byte was looked at
        return
    (record,) = stage.records
    assert record.outcome is not None
    assert record.channel_peak <= stage.config.channel_capacity
    assert record.events_sent + record.events_discarded <= record.events_produced
    allowed = {Outcome.COMPLETED, Outcome.CLIENT_STALLED}
    allowed |= {"delete": {Outcome.CANCELLED}, "cancel": {Outcome.SHUTDOWN}}.get(end, set())
    allowed |= {Outcome.CLIENT_DISCONNECTED} if end in ("close", "reset") else set()
    assert record.outcome in allowed
    replies = read_replies(bytes(peer.received + peer._buffer), ["POST"], ended=peer.ended and not peer.aborted)
    assert len(replies) <= 1
    if record.outcome is Outcome.COMPLETED and end == "read to the end":
        assert replies[0].whole
    for reply in replies:
        assert reply.whole <= (record.outcome is Outcome.COMPLETED)
        if reply.stream:
            # data is "id event json"
            got = [json.loads(data.split(" ", 2)[2])["choices"][0]["text"] for data in reply.data]
            assert [each for each in got if each] == texts[: len([each for each in got if each])]
            assert not reply.whole or "".join(got) == "".join(texts)
        elif reply.whole:
            assert json.loads(reply.body)["choices"][0]["text"] == "".join(texts)


# The connection

REQUESTS = [
    post("/generate", {"prompt": "hi", "max_new_tokens": 2}),
    post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    post("/v1/completions", {"prompt": "hi"}, "Expect: 100-continue"),
    get("/healthz"),
    get("/events?events=3", "Last-Event-ID: 2"),
    b'POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n10\r\n{"prompt": "hi"}\r\n0\r\n\r\n',
]
mutations = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "double", "insert", "swap"]), st.integers(0, 10_000), st.binary(min_size=1, max_size=6)),
    max_size=5,
)


def mutated(raw: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    data = bytearray(raw)
    for kind, where, what in changes:
        at = where % (len(data) + 1)
        if kind == "flip":
            data[at : at + 1] = bytes([(data[at] if at < len(data) else 0) ^ (1 << where % 8)])
        elif kind == "cut":
            del data[at : at + len(what)]
        elif kind == "double":
            data[at:at] = data[at : at + 20]
        elif kind == "insert":
            data[at:at] = what
        else:
            data[at : at + 8] = data[at + 4 : at + 8] + data[at : at + 4]
    return bytes(data)


@settings(steady, max_examples=300)
@given(
    requests=st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=3),
    changes=mutations,
    pieces=st.lists(st.integers(1, 400), max_size=4),
    end=st.sampled_from(["half_close", "close", "reset", "wait"]),
)
def test_mutated_requests(requests: list[bytes], changes: list[tuple[str, int, bytes]], pieces: list[int], end: str) -> None:
    drive(mutated(b"".join(requests), changes), pieces, end)


@steady
@given(raw=st.binary(max_size=300), pieces=st.lists(st.integers(1, 60), max_size=4), end=st.sampled_from(["half_close", "close", "wait"]))
def test_random_bytes(raw: bytes, pieces: list[int], end: str) -> None:
    drive(raw, pieces, end)


def drive(raw: bytes, pieces: list[int], end: str) -> None:
    """Sends ``raw`` in pieces: only well-formed responses come back, it ends, nothing is left, nothing is blamed on us."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            stage = Stage(nursery, script=Script(events=3, interval_ms=10))
            peer = stage.connect()
            rest = raw
            for size in pieces:
                peer.send(rest[:size])
                rest = rest[size:]
                await trio.sleep(0.01)
            peer.send(rest)
            await trio.sleep(0.02)
            leave: Callable[[], None] | None = {"half_close": peer.shutdown_write, "close": peer.close, "reset": peer.reset}.get(end)
            if leave is not None:
                leave()
            with trio.fail_after(300):
                await trio.testing.wait_all_tasks_blocked()  # the connection's task has begun
                while stage.connections:  # noqa: ASYNC110
                    await trio.sleep(1)
            await stage.settled()
            assert all(record.t_ended is not None for record in stage.records)
            read_replies(bytes(peer.received), methods(raw), ended=False)
            nursery.cancel_scope.cancel()

    with captured_log() as log:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert not [entry.getMessage() for entry in log if entry.exc_info or entry.levelname == "ERROR"]


def methods(raw: bytes) -> list[str]:
    """A response to HEAD has no body, so that whoever reads it must know. Only a mutation can have made one."""
    return ["HEAD" if found == b"HEAD" else "GET" for found in re.findall(rb"(HEAD|GET|POST) /", raw)]
