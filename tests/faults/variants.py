"""The server, deliberately broken: each of these bugs has been made by somebody, and the enumeration must find it.

A variant patches a class or two for the length of a run. :data:`VARIANTS` says with which scenario and which faults it is hunted, and
what the finding must say: a variant that is found for another reason is not found.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import trio

from tests.faults import backends
from trio_sse import admission, exchange, routes
from trio_sse.admission import Admission, Slot
from trio_sse.backends.scripted import ScriptedBackend
from trio_sse.channel import EventChannel
from trio_sse.errors import HttpError
from trio_sse.events import Token
from trio_sse.exchange import Exchange
from trio_sse.http11 import Headers
from trio_sse.script import Script
from trio_sse.trace import Outcome
from trio_sse.writer import ResponseWriter

__all__ = ["VARIANTS", "Variant"]


# Slots


class _Held:
    """Stands in for Admission where the slot, or the refusal, is there already."""

    def __init__(self, got: Slot | HttpError) -> None:
        self.running = self.waiting = 0
        self._got = got

    async def acquire(self) -> Slot:
        if isinstance(self._got, HttpError):
            raise self._got
        return self._got


class SlotOutsideNursery(Exchange):
    """A client that waits for a slot is not watched."""

    __slots__ = ()

    async def run(self) -> None:
        got: Slot | HttpError
        try:
            got = await self._admission.acquire()
        except HttpError as error:
            got = error
        self._admission = _Held(got)  # type: ignore[assignment]
        await super().run()


class CheckpointAfterAcquire(Admission):
    """A checkpoint between getting a slot and the ``try`` that gives it back."""

    async def acquire(self) -> Slot:
        slot = await super().acquire()
        await trio.lowlevel.checkpoint()
        return slot


class UnshieldedCleanup(Exchange):
    """An await in the cleanup meets the cancellation again, and what stands behind it never happens."""

    __slots__ = ()

    async def _produce(self) -> None:
        try:
            with self._work:
                prepared = await self._backend.prepare(self._request)
                self._slot = slot = await self._admission.acquire()
                try:
                    self.record.mark("admitted", self._admission.running)
                    await self._generate(prepared)
                finally:
                    await trio.lowlevel.checkpoint()  # noqa: ASYNC102  (that is the bug)
                    slot.release()
                    self.record.released()
        except HttpError as error:
            self._failure = error
        finally:
            self._work_ended()


class DoubleRelease(Exchange):
    """The slot is given back in two places."""

    __slots__ = ()

    async def _see_the_work_end(self) -> None:
        await super()._see_the_work_end()
        if self._slot is not None:
            self._admission._give_back()


class ReleaseOnce(Slot):
    """Forgives a second release, so that the first one may be anywhere."""

    __slots__ = ()

    def release(self) -> None:
        if not self._released:
            super().release()


class SlotReleasedAtVerdict(Exchange):
    """The slot is free as soon as the client has gone, though the work goes on."""

    __slots__ = ()

    def _let_go(self) -> None:
        super()._let_go()
        if self._slot is not None:
            self._slot.release()


# Drain, shields, deadlines


class ChannelClosedBeforeDrain(EventChannel):
    """The serving scope closes the channel as it goes; a drain that begins after that has nothing to drain."""

    __slots__ = ()

    def discard(self) -> None:
        self._queue.clear()
        self._closed = True
        self.take()


class NobodyDrains(EventChannel):
    """The drain never begins: must-drain work waits for a reader who has gone."""

    __slots__ = ()

    def discard(self) -> None:
        pass


class DrainUnshielded(Exchange):
    """Must-drain work is called without its shield, and so it is cancelled."""

    __slots__ = ()

    async def _generate(self, prepared: Any) -> None:
        await self._backend.generate(prepared, self._channel)


class ShieldWithoutDeadline(Exchange):
    """The goodbye is shielded, and waits for a peer who does not read."""

    __slots__ = ()

    async def _goodbye(self) -> None:
        self._config = self._connection._config = replace(self._config, write_timeout=1e9)
        with trio.CancelScope(shield=True):
            await super()._goodbye()


class HeartbeatOutsideDeadline(ResponseWriter):
    """Events are written under the write timeout, heartbeats are not."""

    __slots__ = ()

    async def _send(self, data: bytes) -> None:
        if b": hb" in data:
            self._connection.transport.write(data)
            await self._connection.transport.flush(math.inf)
            await self._flush()
        else:
            await super()._send(data)


# Exceptions and verdicts


class ErrorInAGroup(Exchange):
    """The writer's error leaves through the nursery, in an exception group that nobody outside has an ``except`` for."""

    __slots__ = ()

    async def _write(self) -> None:
        await self._writer.events()
        await self._send_end()


class CancelledIsAnError(Exchange):
    """``except BaseException`` takes a cancellation for a failure."""

    __slots__ = ()

    async def _write(self) -> None:
        try:
            await super()._write()
        except BaseException as error:  # noqa: BLE001, ASYNC103  (that is the bug)
            self._fail(error)
            self.stop(Outcome.BACKEND_ERROR, "encoder")


class CancelledSwallowed(ScriptedBackend):
    """The backend's loop treats a cancelled send like a failed one, and goes on with the next step."""

    async def _play(self, script: Script, count: int, events: EventChannel) -> None:
        for _ in range(count):
            try:
                await trio.sleep(script.interval_ms / 1000)
            except trio.Cancelled:  # noqa: ASYNC103  (that is the bug)
                pass
            try:
                await events.send(Token("w"))
            except trio.Cancelled:  # noqa: ASYNC103
                pass


class LastVerdictWins(Exchange):
    """Whoever comes later overwrites the outcome."""

    __slots__ = ()

    def stop(self, outcome: Outcome, witness: str) -> None:
        if self.record.t_ended is None:
            self.record.outcome = None
        super().stop(outcome, witness)


class RecordedTwice(Exchange):
    """The record of a request is counted where it ends, and once more where its work ends."""

    __slots__ = ()

    async def _see_the_work_end(self) -> None:
        await super()._see_the_work_end()
        self._finished(self.record)


class LastFramesAfterVerdict(Exchange):
    """The writer, about to run when the verdict came, sends the end of an answer that is over. (Found here, in this server.)"""

    __slots__ = ()

    async def _send_end(self) -> None:
        finish = self._writer.finish
        if finish is None or self._failure is not None:
            await super()._send_end()
        else:
            await self._writer.last_frames(finish)
            self.stop(Outcome.COMPLETED, "last_frame")


class CheckpointBeforeAccount(ResponseWriter):
    """The answer is out, and a cancellation can still say that it is not. (Found here, in this server.)"""

    __slots__ = ()

    async def _respond(self, status: int, headers: Headers, body: bytes) -> None:
        await super()._respond(status, headers, body)
        await trio.lowlevel.checkpoint()


# Watching, and what is left behind


class NeverProbes(ResponseWriter):
    """End of file is taken for a half-close, and nobody ever asks."""

    __slots__ = ()

    def peer_ended(self) -> None:
        pass


class EndOfFileIsADisconnect(Exchange):
    """``nc -N`` half-closes and goes on reading: it is cut off."""

    __slots__ = ()

    async def _monitor(self) -> None:
        with self._watching:
            await self._connection.read_ahead()
            self.stop(Outcome.CLIENT_DISCONNECTED, "eof")


class GoesOnAfterAnError(ResponseWriter):
    """After an error in band the connection carries the next response."""

    __slots__ = ()

    async def last_words(self, error: HttpError) -> None:
        if self.head_sent:
            await self._connection.send(self._connection.data(self._answer.error(error)) + self._connection.end())
        else:
            await super().last_words(error)


class TaskLeft(Exchange):
    """A task of the request outlives it."""

    __slots__ = ()

    async def run(self) -> None:
        trio.lowlevel.spawn_system_task(trio.sleep, 1000)
        await super().run()


@dataclass(frozen=True)
class Variant:
    """``patches``: (module, name of the class there, what takes its place). ``says``: what the finding must contain."""

    patches: tuple[tuple[Any, str, Any], ...]
    scenario: str
    faults: tuple[str, ...]
    says: str

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, name, broken in self.patches:
                stack.enter_context(mock.patch.object(module, name, broken))
            yield


def _exchange(broken: type[Exchange]) -> tuple[tuple[Any, str, Any], ...]:
    return ((routes, "Exchange", broken),)


def _writer(broken: type[ResponseWriter]) -> tuple[tuple[Any, str, Any], ...]:
    return ((exchange, "ResponseWriter", broken),)


def _channel(broken: type[EventChannel]) -> tuple[tuple[Any, str, Any], ...]:
    return ((exchange, "EventChannel", broken),)


HANGS = "did not end within"

VARIANTS: dict[str, Variant] = {
    "slot-outside-nursery": Variant(_exchange(SlotOutsideNursery), "waiting", ("fin", "rst"), "took"),
    "checkpoint-after-acquire": Variant(((routes, "Admission", CheckpointAfterAcquire),), "stream", ("rst", "delete"), "running == 0"),
    "unshielded-cleanup": Variant(_exchange(UnshieldedCleanup), "stream", ("rst", "delete"), "slot_released"),
    "double-release": Variant(_exchange(DoubleRelease), "stream", ("rst",), "running == 0"),
    "slot-released-at-verdict": Variant(
        (*_exchange(SlotReleasedAtVerdict), (admission, "Slot", ReleaseOnce)), "waiting-must-drain", ("rst", "delete"), "at a time"
    ),
    "channel-closed-before-drain": Variant(_channel(ChannelClosedBeforeDrain), "must-drain", ("rst",), "backend failed"),
    "nobody-drains": Variant(_channel(NobodyDrains), "must-drain", ("rst",), HANGS),
    "drain-unshielded": Variant(_exchange(DrainUnshielded), "must-drain", ("rst",), "must-drain work was cancelled"),
    "shield-without-deadline": Variant(_exchange(ShieldWithoutDeadline), "deadline-in-stream", ("stall",), HANGS),
    "heartbeat-outside-deadline": Variant(_writer(HeartbeatOutsideDeadline), "heartbeat-in-prefill", ("stall",), HANGS),
    "error-in-a-group": Variant(
        _exchange(ErrorInAGroup), "stream", ("broken_write", "partial_write"), "shutdown (cancelled_from_outside) is none of"
    ),
    "cancelled-is-an-error": Variant(_exchange(CancelledIsAnError), "stream", ("delete", "cancel_connection"), "backend failed"),
    "cancelled-swallowed": Variant(((backends, "ScriptedBackend", CancelledSwallowed),), "stream", ("delete", "rst"), "steps after"),
    "last-verdict-wins": Variant(_exchange(LastVerdictWins), "must-drain", ("rst", "delete"), "verdict"),
    "recorded-twice": Variant(_exchange(RecordedTwice), "stream", ("fin",), "closed twice"),
    "last-frames-after-verdict": Variant(_exchange(LastFramesAfterVerdict), "json", ("delete", "rst"), "is whole: True"),
    "checkpoint-before-account": Variant(_writer(CheckpointBeforeAccount), "json", ("delete", "cancel_request"), "is whole: True"),
    "never-probes": Variant(_writer(NeverProbes), "prefill-half-closed-json", ("fin",), "took"),
    "end-of-file-is-a-disconnect": Variant(
        _exchange(EndOfFileIsADisconnect), "stream", ("half_close",), "client_disconnected (eof) is none of"
    ),
    "goes-on-after-an-error": Variant(_writer(GoesOnAfterAnError), "pipelined", ("backend_error",), "another one follows"),
    "task-left": Variant(_exchange(TaskLeft), "stream", ("rst",), "a task is left"),
}
