"""A small recording made up by hand, for the tests of figures, report and replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trio_sse.evidence import manifest, matrix, record

MATRIX = """
schema = 1
runs = 2
walkthrough = "abort"

[[case]]
name = "abort"
title = "A client that closes after two events"
server = "--backend scripted"
request = "GET /events?events=9"
client = { leave = "fin", after_events = 2 }
reference = { produced = 12, received = 5, duration_ms = 4.5 }
must = ["outcome = client_disconnected", "completed_after_verdict = 0", "produced >= 5"]

[[case]]
name = "whole"
title = "A client that reads to the end"
server = "--backend scripted"
request = "GET /events?events=3"
must = ["produced = 3", "received = 4", "seq_gaps = 0"]
"""

MS = 1_000_000  # nanoseconds


def mark(side: str, at: float, kind: str, **values: object) -> dict[str, Any]:
    """A mark at ``at`` milliseconds."""
    return {"side": side, "at": 7_000_000_000 + int(at * MS), "mark": kind, **values}


def abort_marks(shift: float = 0.0) -> list[dict[str, Any]]:
    """Four events produced, two written and read; the client closes at 30 ms, the verdict is 1 ms later."""
    return [
        mark("server", 1, "request", body_bytes=0),
        mark("server", 2, "admitted", slots_in_use=1),
        mark("server", 2, "enqueued", seq=0, wait_ns=0, queued=1),
        mark("server", 3, "frames", events=0, bytes=200),
        mark("server", 3, "write", bytes=200, wait_ns=1000, unsent=0, unacked=200),
        mark("server", 10, "produced", seq=1, tokens=1),
        mark("server", 10, "enqueued", seq=1, wait_ns=0, queued=1),
        mark("server", 10, "produced", seq=2, tokens=1),
        mark("server", 10, "enqueued", seq=2, wait_ns=0, queued=2),
        mark("server", 11, "frames", events=2, bytes=100),
        mark("server", 12, "produced", seq=3, tokens=1),
        mark("server", 14, "enqueued", seq=3, wait_ns=2 * MS, queued=1),
        mark("server", 15, "write", bytes=100, wait_ns=4 * MS, unsent=30, unacked=130),
        mark("server", 30.5 + shift, "eof"),
        mark("server", 30.6 + shift, "probe", bytes=9),
        mark("server", 30.7 + shift, "produced", seq=4, tokens=1),
        mark("server", 31 + shift, "verdict", outcome="client_disconnected", witness="reset_after_eof"),
        mark("server", 31 + shift, "discarded", seq=1, tokens=1),
        mark("server", 31 + shift, "discarded", seq=2, tokens=1),
        mark("server", 32 + shift, "cancel_delivered"),
        mark("server", 33 + shift, "cache_released", bytes=4096),
        mark("server", 33 + shift, "backend_ended"),
        mark("server", 34 + shift, "slot_released"),
        mark("server", 35 + shift, "outcome", outcome="client_disconnected"),
        mark("client", 0, "connected"),
        mark("client", 0.5, "sent", bytes=80),
        mark("client", 4, "received", bytes=200),
        mark("client", 4, "head", status=200),
        mark("client", 16, "received", bytes=100),
        mark("client", 16, "event", name="token", id=1),
        mark("client", 16, "event", name="token", id=2),
        mark("client", 30, "leave", how="fin"),
        mark("client", 30.1, "left", status=None),
    ]


def whole_marks() -> list[dict[str, Any]]:
    marks: list[dict[str, Any]] = [mark("server", 1, "request", body_bytes=0), mark("server", 2, "admitted", slots_in_use=1)]
    for seq in (1, 2, 3):
        marks += [
            mark("server", 5 * seq, "produced", seq=seq, tokens=1),
            mark("server", 5 * seq, "enqueued", seq=seq, wait_ns=0, queued=1),
            mark("server", 5 * seq, "frames", events=1, bytes=50),
            mark("server", 5 * seq, "write", bytes=50, wait_ns=0, unsent=None, unacked=None),
        ]
    marks += [mark("server", 16, "slot_released"), mark("server", 17, "verdict", outcome="completed", witness="last_frame")]
    marks += [mark("client", 0, "sent", bytes=80), mark("client", 4, "head", status=200)]
    marks += [mark("client", 5 * seq + 1, "event", name="token", id=seq) for seq in (1, 2, 3)]
    return [*marks, mark("client", 18, "event", name="done", id=3), mark("client", 18, "end")]


def lines(run: int, marks: list[dict[str, Any]], outcome: str) -> list[str]:
    """One exchange of a trace file."""
    summary = {"outcome": outcome, "bytes_sent": 300, "marks_dropped": 0}
    head = {"memory_before": 50 * 2**20, "memory_peak": 51 * 2**20, "cpu_ns": 3 * MS, "status": 200, "content_type": "text/event-stream"}
    place = {"run": run, "exchange": 1}
    first = {**place, "role": "subject", **head, "record": summary}
    return [json.dumps(first), *(json.dumps({**place, **entry}) for entry in marks)]


def make(folder: Path, name: str = "1") -> Path:
    """A sealed recording ``folder/name`` of both cases, two runs each; the trace of ``whole`` is compressed."""
    partial = folder / f"{name}.partial"
    partial.mkdir(parents=True)
    facts: dict[str, object] = {"python": "CPython 3.11", "cores": 2}
    (partial / "matrix.toml").write_text(MATRIX)
    (partial / "environment.json").write_bytes(manifest.canonical(facts))
    (partial / "sources.json").write_bytes(manifest.canonical(manifest.source_hashes()))
    abort = lines(1, abort_marks(), "client_disconnected") + lines(2, abort_marks(0.25), "client_disconnected")
    manifest.write_trace(partial, "abort", abort)
    whole = lines(1, whole_marks(), "completed") + lines(2, whole_marks(), "completed")
    large, manifest.LARGE = manifest.LARGE, 0
    try:
        manifest.write_trace(partial, "whole", whole)
    finally:
        manifest.LARGE = large
    record.seal(partial, folder / name, matrix.parse(MATRIX), 2, facts)
    return folder / name
