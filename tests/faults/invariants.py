"""What must hold after every run, whatever was injected.

1. It ends within LIMIT virtual seconds.
2. One record for each request, closed once, with an outcome that the scenario or a fault explains.
3. No slot is taken, lost or waited for; no exchange, request id, connection, task, thread, descriptor or deadline is left; no channel
   is open.
4. Whoever has gone, or was cancelled, is let go at once: within PROMPT seconds, and what the work is known to need.
5. The backend was told at most once that its work is over, exactly once where it was still at work at the verdict, and has ended;
   at most one token was made after the verdict, and at most one step begun. Must-drain work is not told. No more of them at a time
   than there are slots.
6. The bytes are a prefix of well-formed responses, and what is in them is a prefix of what the run without faults sent. A response
   that claims to be whole belongs to a completed record, and a completed record has one.
7. Nothing follows a response that ends the connection.
8. Nothing unexpected is in the log.
9. The next request on the same server works, unless the server was told to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faults import faults
from tests.faults.backends import EngineBackend
from tests.faults.wire import Reply, read_replies
from trio_sse.trace import Outcome, Record

if TYPE_CHECKING:
    from tests.faults.scene import ServerScene

__all__ = ["check"]

PROMPT = 1.5  # virtual seconds: a half-closed peer is probed once a second
PACED = 20  # milliseconds between two events, from which on at most one more is offered to a client that has gone


def check(scene: ServerScene) -> None:
    """Raises AssertionError if an invariant is broken. Sets ``scene.replies``."""
    stage = scene.stage
    for record in stage.records:
        check_record(scene, record)
    assert len({id(record) for record in stage.records}) == len(stage.records), "a record was closed twice"
    assert len(stage.records) == scene.begun, f"{scene.begun} requests, {len(stage.records)} records"
    stage.check_idle()
    assert not stage.server._connections
    assert not stage.server.routes._names
    assert stage.server._refusing == 0
    check_backend(scene)
    check_channels(scene)
    check_prompt(scene)
    check_bytes(scene)
    for line in scene.log:
        patterns = [pattern for name in explained(scene) for pattern in faults.LOGS.get(name, ())]
        assert any(pattern in line for pattern in patterns), f"unexpected in the log: {line}"


def explained(scene: ServerScene) -> list[str]:
    """The faults that may have left their marks: those injected, and the one that the scenario itself is about."""
    failing = Outcome.BACKEND_ERROR in scene.scenario.outcomes
    return [*scene.injected, *(["backend_refuses"] if failing else [])]


def cancelled_from_outside(scene: ServerScene) -> bool:
    return any(name.startswith("cancel_") for name in scene.injected)


def check_record(scene: ServerScene, record: Record) -> None:
    assert record.outcome is not None
    assert record.t_ended is not None
    assert record.channel_peak <= scene.stage.config.channel_capacity
    assert record.events_sent + record.events_discarded <= record.events_produced
    if record.outcome is Outcome.COMPLETED:
        assert record.events_sent == record.events_produced, f"{record.events_sent} of {record.events_produced} events sent"
        assert record.tokens_after_verdict == 0
    allowed = {*scene.scenario.outcomes, *(each for name in explained(scene) for each in faults.FAULTS[name].outcomes)}
    if record in scene.closed:
        assert record.outcome in allowed, f"{record.outcome} ({record.witness}) is none of {sorted(allowed)}"
    if not record.tracing:
        return  # it was no request
    marks = [str(mark[0]) for mark in record.marks]
    assert marks.count("verdict") == marks.count("outcome") == 1, f"marks: {marks}"
    assert marks.count("admitted") == marks.count("slot_released")
    work = next((each for each in scene.backend.works if each.record is record), None)
    if work is None or not work.must_drain:
        assert record.tokens_after_verdict <= 1, f"{record.tokens_after_verdict} tokens after the verdict"
        after = marks[marks.index("verdict") :]
        assert after.count("step_begin") + after.count("prefill_begin") <= 1, f"steps after the verdict: {after}"


def check_backend(scene: ServerScene) -> None:
    for work in scene.backend.works:
        assert work.ended
        record = work.record
        marks = [str(mark[0]) for mark in record.marks]
        assert not (work.must_drain and work.told) or cancelled_from_outside(scene), "must-drain work was cancelled"
        assert work.told + work.finished == 1, f"told {work.told} times, finished: {work.finished}"
        assert marks.count("cancel_delivered") == work.told
        assert record.outcome is not Outcome.COMPLETED or work.finished
        if work.told and not cancelled_from_outside(scene):
            assert marks.index("verdict") < marks.index("cancel_delivered"), "cancelled without a verdict"
    assert scene.backend.peak <= scene.stage.server.routes.admission.slots, f"{scene.backend.peak} generations at a time"
    assert len({id(work.record) for work in scene.backend.works}) == len(scene.backend.works), "a request was generated twice"
    if isinstance(scene.backend, EngineBackend) and not scene.house.cancel_scope.cancel_called:
        assert scene.backend.model.used == 0
        assert scene.backend.engine.sequences == 0


def check_channels(scene: ServerScene) -> None:
    for exchange in scene.exchanges:
        assert exchange._channel.closed, "an open channel is left"
        assert len(exchange._channel) == 0, "events are left in a channel"


def check_prompt(scene: ServerScene) -> None:
    script = scene.scenario.script
    drains = script is not None and script.must_drain
    patience = PROMPT + (script.duration if script is not None and drains else 0.0)
    patience += 2.0 * scene.injected.count("slow_step") + 20.0 * scene.injected.count("stuck_step")
    if scene.scenario.window < 65536 or any(name.startswith("stall") for name in scene.injected):
        patience += scene.stage.config.write_timeout  # the last words wait for a reader who does not read
    for record, since, tokens in scene.to_end:
        took = scene.closed_at[id(record)] - since
        assert took <= patience, f"{record.outcome} took {took:g} s"
        if script is None or (script.interval_ms >= PACED and not drains):
            more = record.tokens_generated - tokens
            # After a step that took too long the script makes up for it, without a pause in which anyone could be told.
            allowed = 2 if {"slow_step", "stuck_step"} & set(scene.injected) else 1
            assert more <= allowed, f"{more} tokens for a client that had gone"


def check_bytes(scene: ServerScene) -> None:
    peer = scene.peer
    if peer is None:
        return
    raw = scene.plaintext(bytes(peer.received + peer._buffer))
    methods = [*scene.scenario.methods, *("GET" for _ in scene.injected)]
    scene.replies = read_replies(raw, methods, ended=peer.ended and not peer.aborted)
    assert len(scene.replies) <= len(scene.closed), f"{len(scene.replies)} responses to {len(scene.closed)} requests"
    for n, (reply, record) in enumerate(zip(scene.replies, scene.closed, strict=False)):
        name = f"response {n} ({record.outcome}, {record.witness})"
        last = n == len(scene.replies) - 1
        assert last or reply.complete, f"{name} is incomplete, and another one follows"
        # Completed, for the kernel took it all, and yet not with the client: it had gone.
        lost = record.outcome is Outcome.COMPLETED and peer.closed and not reply.whole
        assert lost or reply.whole == (record.outcome is Outcome.COMPLETED), f"{name} is whole: {reply.whole}"
        assert last or not (reply.stream and reply.error), f"{name}: another one follows an error in band"
        if scene.whole is not None and n < len(scene.whole):
            compare(name, reply, scene.whole[n])


def compare(name: str, reply: Reply, good: Reply) -> None:
    """With what the run without faults sent."""
    if reply.status == good.status == 200:
        assert reply.data == good.data[: len(reply.data)], f"{name}: {reply.data} is no prefix of {good.data}"
        assert not reply.whole or reply.data == good.data, f"{name} says that it is whole: {reply.data}"
