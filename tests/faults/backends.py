"""Backends that can be told to fail at any moment, and that keep account of what was asked of them.

``Saboteur`` is the account and the switches; the scripted backend gets them through its channel, the engine through its model. Both
do the whole work of the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from tests.fakes.small_tokenizers import byte_level
from tests.fakes.step_model import FakeModel, ScriptedRunner
from trio_sse.backends.base import Backend, Prepared
from trio_sse.backends.scripted import ScriptedBackend
from trio_sse.backends.transformers.engine import Engine
from trio_sse.backends.transformers.sequence import Sequence
from trio_sse.backends.transformers.text import TokenStream, Vocabulary
from trio_sse.channel import EventChannel
from trio_sse.events import Event, GenerationRequest, Token
from trio_sse.script import Script
from trio_sse.trace import Record

__all__ = ["EngineBackend", "Saboteur", "ScriptedSaboteur", "Work"]


@dataclass(eq=False)
class Work:
    """One call of ``generate``. ``told``: how often it met Cancelled."""

    record: Record
    must_drain: bool
    told: int = 0
    ended: bool = False
    finished: bool = False  # by itself: it returned, or raised something of its own


class Saboteur(Backend):
    """The account, and the faults that wait for their moment.

    ``error`` is raised, and ``stuck`` seconds are spent deaf to cancellation, by the next step of a request that ``mine`` accepts.
    """

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.error: BaseException | None = None
        self.stuck = 0.0
        self.peak = 0  # most at a time
        self.mine: Callable[[Record], bool] = lambda record: True

    def disarm(self) -> None:
        self.error, self.stuck = None, 0.0

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        work = Work(events._record, prepared.drain_budget is not None)
        self.works.append(work)
        self.peak = max(self.peak, sum(not each.ended for each in self.works))
        try:
            await self.work(prepared, events)
            work.finished = True
        except trio.Cancelled:
            work.told += 1
            raise
        except BaseException:
            work.finished = True
            raise
        finally:
            work.ended = True

    async def work(self, prepared: Prepared, events: EventChannel) -> None:
        raise NotImplementedError


class _Tapped(EventChannel):
    """A channel at which a backend's fault strikes just before an event is offered."""

    __slots__ = ("_inner", "_owner")

    def __init__(self, inner: EventChannel, owner: Saboteur) -> None:
        self._inner = inner
        self._owner = owner

    async def send(self, event: Event) -> None:
        owner = self._owner
        if type(event) is Token:
            self._inner.mark("step_begin", 0)
        if owner.mine(self._inner._record):
            if owner.stuck:
                seconds, owner.stuck = owner.stuck, 0.0
                with trio.CancelScope(shield=True):
                    await trio.sleep(seconds)
            if owner.error is not None:
                error, owner.error = owner.error, None
                raise error
        await self._inner.send(event)

    def send_nowait(self, event: Event) -> None:
        if self._owner.mine(self._inner._record) and (self._owner.stuck or self._owner.error):
            raise trio.WouldBlock
        self._inner.send_nowait(event)
        self._inner.mark("step_begin", 0)

    def late(self, tokens: int) -> None:
        self._inner.late(tokens)

    def mark(self, kind: str, *values: str | int | None) -> None:
        self._inner.mark(kind, *values)


class ScriptedSaboteur(Saboteur):
    name = "scripted"

    def __init__(self, script: Script, *, slots: int = 1) -> None:
        super().__init__()
        self.slots = slots
        self.inner = ScriptedBackend(script, slots=slots)

    async def prepare(self, request: GenerationRequest) -> Prepared:
        return await self.inner.prepare(request)

    async def work(self, prepared: Prepared, events: EventChannel) -> None:
        await self.inner.generate(prepared, _Tapped(events, self))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedIds(Prepared):
    ids: list[int]


_TOKENIZER = byte_level()
_VOCABULARY = Vocabulary(_TOKENIZER)


class EngineBackend(Saboteur):
    """The engine over a model of a few lines and a model thread without a thread. A step takes ``step`` seconds."""

    name = "engine"
    slots = 3

    def __init__(self, step: float = 0.02) -> None:
        super().__init__()
        self.model = FakeModel(chunk=4)
        self.runner = ScriptedRunner(step)
        self.engine = Engine(self.model, self.runner)
        self.model.on_step = self._on_step
        self.runner.seconds = self._seconds

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # noqa: ASYNC128
        await self.engine.run(task_status=task_status)

    async def prepare(self, request: GenerationRequest) -> Prepared:
        await trio.lowlevel.checkpoint()
        text = request.prompt or " ".join(message.content for message in request.messages or ())
        ids = list(_TOKENIZER.encode(text).ids)
        return _PreparedIds(request=request, prompt_tokens=len(ids), ids=ids)

    async def work(self, prepared: Prepared, events: EventChannel) -> None:
        assert isinstance(prepared, _PreparedIds)
        request = prepared.request
        text = TokenStream(_VOCABULARY, request.stop, continues=request.messages is None)
        await self.engine.serve(Sequence(prepared.ids, request.max_tokens or 6, request.sampling, text, events))

    def _seconds(self, job: str) -> float:
        if job != "step":
            return 0.0
        stuck, self.stuck = self.stuck, 0.0
        return stuck or self.runner.step

    def _on_step(self, number: int) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
