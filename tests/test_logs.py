"""The log: one line per request, nothing forged, no prompt, no noise."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.capture import captured_log, check_quiet
from tests.support.stage import Stage, get, peer_answer, post
from trio_sse import logs
from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.events import Started
from trio_sse.script import Script

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d (debug|info|warning|error) \S.*")


class Output:
    """What the configured log writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, form: str, level: str = "info") -> None:
        self._stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", self._stream)
        self._log = logging.getLogger("trio_sse")
        self._before = (self._log.handlers[:], self._log.level, self._log.propagate)
        logs.configure(form, level)

    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()

    def restore(self) -> None:
        self._log.handlers[:], self._log.level, self._log.propagate = self._before


@pytest.fixture(params=["text", "json"])
def output(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    made = Output(monkeypatch, request.param)
    made.form = request.param  # type: ignore[attr-defined]
    yield made
    made.restore()


def fields(output: Output, line: str) -> dict[str, str]:
    if output.form == "json":  # type: ignore[attr-defined]
        return {name: str(value) for name, value in json.loads(line).items()}
    assert LINE.fullmatch(line)
    return dict(part.split("=", 1) for part in line.split(" ")[3:])


async def test_one_line_per_request(output: Output, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, script=Script(events=100, interval_ms=20))
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "one two three", "max_new_tokens": 50}, "X-Request-Id: first"))
    await peer.wait_received(b"w5 ")
    peer.close()
    await trio.sleep(0.5)
    other = stage.connect()
    other.send(post("/generate", {"prompt": 5}, "X-Request-Id: second"))
    await peer_answer(other)
    await wait_all_tasks_blocked()
    first, second = (fields(output, line) for line in output.lines())
    assert (first["id"], first["outcome"], first["route"], first["status"]) == ("first", "client_disconnected", "/generate", "200")
    assert (first["prompt_tokens"], first["tokens_sent"]) == ("3", "5")
    assert first["tokens_generated"] in ("5", "6")
    assert float(first["ttft_ms"]) >= 0
    assert float(first["cancel_ms"]) >= 0
    assert float(first["ms"]) >= 0
    assert (second["id"], second["outcome"], second["status"], second["code"]) == ("second", "rejected", "400", "invalid_request")
    assert "ttft_ms" not in second


FORGERIES = [
    get("/healthz\x1b[31m"),
    get("/nowhere?x=%0a2026-01-01T00:00:00%20info%20request%20id=forged"),
    get("/nowhere", "X-Request-Id: a\\nb id=forged outcome=completed"),
    get("/nowhere", "X-Request-Id: \x85\u00a0"),
    get("/nowhere", "User-Agent: \xff\xfe"),
    get("/nowhere", method="M" * 9000),
    get("/nowhere", method="A'B`C|D"),
    b"GET /\r\n2026-01-01T00:00:00 info request id=forged\r\n\r\n",
    post("/generate", {"prompt": "SECRET PROMPT\n2026-01-01T00:00:00 info request id=forged", "max_new_tokens": "SECRET"}),
    post("/generate", None, raw=b'{"prompt": "SECRET'),
    post("/v1/chat/completions", {"messages": [{"role": "SECRET", "content": "x"}], "SECRET": 1}),
]


async def test_nothing_a_peer_sends_forges_a_line(output: Output, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery)
    for raw in FORGERIES:
        peer = stage.connect()
        peer.send(raw)
        await peer_answer(peer)
        peer.close()
    await wait_all_tasks_blocked()
    lines = output.lines()
    assert len(lines) == len(FORGERIES)
    for line in lines:
        assert line.isascii()
        assert line.isprintable()
        assert "SECRET" not in line
        assert "forged" not in line
        assert len(line) < 500
        assert fields(output, line)["outcome"] == "rejected"


class Talkative(Backend):
    """Fails with what it was given: a library may do that."""

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        await events.send(Started())
        raise ValueError(f"cannot do this: {prepared.request.prompt}")


async def test_an_exception_forges_no_line(output: Output, nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    stage = Stage(nursery, Talkative())
    peer = stage.connect()
    peer.send(post("/generate", {"prompt": "x\n2026-01-01T00:00:00 info request id=forged\x1b[2J"}))
    answer = await peer_answer(peer)
    assert b"cannot do this" not in answer.body
    await wait_all_tasks_blocked()
    lines = output.lines()
    if output.form == "json":  # type: ignore[attr-defined]
        assert len(lines) == 2
        assert "cannot do this" in json.loads(lines[0])["exception"]
    else:
        starts = [line for line in lines if LINE.fullmatch(line)]
        assert len(starts) == 2
        assert all(line.startswith("    ") for line in lines if line not in starts)
        assert any("cannot do this" in line for line in lines)
        assert all(line.isprintable() for line in lines)


async def test_ordinary_ends_are_not_errors(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    """Port scans, health checks, clients that leave: information at most; and no line at all for who has said nothing."""
    stage = Stage(nursery, script=Script(events=100, interval_ms=20), slots=10)
    with captured_log() as log:
        for leave in ("close", "reset", "shutdown_write"):
            for sent in (b"", b"GET /hea", get("/healthz"), post("/generate", {"prompt": "hi"})[:-3], post("/generate", {"prompt": "hi"})):
                peer = stage.connect()
                peer.send(sent)
                await wait_all_tasks_blocked()
                getattr(peer, leave)()
        stalled = stage.connect()
        stalled.stall()
        await trio.sleep(100)
    check_quiet(log)
    assert len(log) == len(stage.records)
    assert stage.connections == 0


def test_probes_are_logged_at_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    for level, lines in (("info", 0), ("debug", 3)):
        output = Output(monkeypatch, "text", level)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                stage = Stage(nursery)
                for path in ("/healthz", "/readyz", "/metrics"):
                    peer = stage.connect()
                    peer.send(get(path))
                    await peer_answer(peer)
                nursery.cancel_scope.cancel()

        trio.run(main, clock=MockClock(autojump_threshold=0))
        assert len(output.lines()) == lines
        output.restore()
