"""The engine: many sequences share each step of one model, and a slow reader pauses only itself.

One task, :meth:`Engine.run`, owns the model and decides; one task per request, :meth:`Engine.serve`, waits. All decisions are
synchronous; only the jobs for the model thread are waited for, and only one runs at a time::

        ┌──▶ close the caches of those that ended ──▶ admit who waits, in order, while the pool has room
        │                                                        │
        └── hand out the tokens ◀── ONE STEP of the model ◀── choose who steps

Rules:

1. A sequence steps only when everything it has produced has entered its channel. The engine tries without waiting; where the
   channel is full the sequence is *paused*, and its own task waits for the reader. Nobody else notices.
2. A step takes one token of every sequence that decodes, and prompt chunks of at most ``model.chunk`` tokens together, in turn.
   So neither prefill nor decode can starve the other, and a step has a longest time.
3. Chunks are cut at the same places in any company. What a sequence computes does not depend on who else is there.
4. N tokens cost one prefill and N − 1 decode steps. The last token is never fed.
5. A cancelled sequence is out of every step that begins afterwards. One that is inside a step leaves when the step returns.
6. ``serve`` returns when the memory is back in the pool, never before, whatever else happens.
7. A step that raises fails the sequences in it, an item that fails fails its sequence, and the engine goes on.

Two checkpoints between handing out and choosing are what makes "at most one step after the verdict" exact: a verdict reached before
a token was handed out has by then reached the sequence's task, and that has told the engine.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import trio

from trio_sse.backends.transformers.sequence import Sequence, State
from trio_sse.backends.transformers.steps import Chosen, StepFailure, StepModel, Work
from trio_sse.backends.transformers.thread import Runner
from trio_sse.errors import HttpError, NotReady
from trio_sse.events import Event, Finish, Started

__all__ = ["Engine", "ModelFailed", "longest_sequence"]

T = TypeVar("T")
log = logging.getLogger(__name__)

# A cancelled sequence waits for its step to end, however long that takes: its slot is taken, because it is. This is how often the
# wait says so, in seconds.
_STILL_WAITING = 30.0


class ModelFailed(RuntimeError):
    """The model raised while it worked on this sequence; the cause is attached."""


class Engine:
    """The scheduler. ``runner`` runs the model's methods, one at a time; see :class:`~.thread.Runner`."""

    def __init__(self, model: StepModel, runner: Runner) -> None:
        self._model = model
        self._runner = runner
        self._running = False
        self._waiting: deque[Sequence] = deque()
        self._open: dict[Sequence, None] = {}  # in turn: who has had a prompt chunk goes to the end
        self._closing: deque[Sequence] = deque()
        self._wake = trio.Event()
        self._step_began: float | None = None
        self.kv_cache_bytes = 0
        self.steps = 0

    @property
    def paused_sequences(self) -> int:
        """Sequences that wait for their reader."""
        return sum(1 for seq in self._open if seq.outbox)

    @property
    def sequences(self) -> int:
        """Sequences that have not been released yet."""
        return len(self._waiting) + len(self._open) + len(self._closing)

    def step_age(self) -> float:
        """Seconds since the running step began; 0.0 when none runs."""
        return 0.0 if self._step_began is None else trio.current_time() - self._step_began

    # A request's side

    async def serve(self, seq: Sequence) -> None:
        """Generates ``seq``: ``Started``, tokens and ``Finish`` go to its channel.

        Resource handling: cache memory is taken at admission, and is back in the pool when this returns or raises.
        Error handling: raises :exc:`ModelFailed`, or the HttpError that the model raised; held-back text is delivered first.
        Cancellation: marks the sequence at once, then waits for the step it may be in. That wait is shielded; it has no other end,
        since work that cannot end must keep its slot, but it reports itself from time to time.
        """
        self._submit(seq)
        try:
            while seq.state is not State.RELEASED or seq.outbox:
                await seq.wake.wait()
                seq.wake = trio.Event()
                while seq.outbox:
                    await seq.events.send(seq.outbox[0])
                    seq.outbox.popleft()
                if seq.state is State.OPEN:
                    self._wake.set()  # it may step again
        finally:
            if seq.state is not State.RELEASED:
                self._cancel(seq)
                await self._released(seq)  # noqa: ASYNC102  (its shield has a limit, and starts anew)
        if seq.error is not None:
            raise seq.error

    def _submit(self, seq: Sequence) -> None:
        if not self._running:
            raise NotReady("The model is not ready.")
        seq.reserved = self._model.cache_bytes(seq.capacity)
        if seq.reserved > self._model.pool_bytes:
            raise ValueError("this sequence would wait for ever: it is longer than the cache pool")
        self._waiting.append(seq)
        self._wake.set()

    def _cancel(self, seq: Sequence) -> None:
        seq.leaving = True
        if seq.state is State.WAITING:
            self._waiting.remove(seq)
            self._release(seq)
            self._wake.set()  # whoever stood behind it may fit
        elif seq.state is State.OPEN and not seq.busy:
            self._end(seq)
        # else the step that it is in will see to it, or the close that is under way

    async def _released(self, seq: Sequence) -> None:
        while not seq.done.is_set():
            with trio.move_on_after(_STILL_WAITING, shield=True):
                await seq.done.wait()
            if not seq.done.is_set():
                log.warning("a cancelled sequence still waits for its model step to end (%.0f s)", self.step_age())

    # The engine's side

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until it is cancelled.

        Error handling: raises only if the runner itself fails. Whoever is still there then, or at a cancellation, fails.
        Cancellation: a step that runs is waited for.
        """
        self._running = True
        task_status.started()
        try:
            while True:
                self._wake = trio.Event()  # before looking, so that nothing said from here on is missed
                await self._close()
                await self._admit()
                if self._closing:
                    continue  # somebody left meanwhile, and need not wait for a step
                batch = self._choose()
                if batch:
                    await self._step(batch)
                    await trio.lowlevel.checkpoint()
                    await trio.lowlevel.checkpoint()
                else:
                    await self._wake.wait()
        finally:
            self._running = False
            for seq in (*self._waiting, *self._open, *self._closing):
                if seq.state is not State.CLOSING:
                    seq.error = NotReady("The model has been stopped.")
                self._release(seq)
            self._waiting.clear()
            self._open.clear()
            self._closing.clear()

    async def _close(self) -> None:
        while self._closing:
            seq = self._closing[0]
            freed: int | BaseException = 0
            if seq.cache is not None:
                freed = await self._runner.call(_attempt, self._model.close, seq.cache)
            self._closing.popleft()
            if isinstance(freed, BaseException):
                log.error("closing a sequence's cache failed", exc_info=freed)
            elif seq.cache is not None:
                seq.events.mark("cache_released", freed)
            self._release(seq)

    async def _admit(self) -> None:
        """In order: whoever does not fit yet holds up those behind, or it would wait for ever."""
        while self._waiting and self.kv_cache_bytes + self._waiting[0].reserved <= self._model.pool_bytes:
            seq = self._waiting.popleft()
            seq.state = State.OPEN
            self._open[seq] = None
            self.kv_cache_bytes += seq.reserved
            seq.busy = True
            opened = await self._runner.call(_attempt, self._model.open, seq.capacity, seq.sampling, seq.ids)
            seq.busy = False
            if isinstance(opened, BaseException):
                self._fail(seq, opened)
                continue
            seq.cache = opened
            seq.fed = opened.length
            if seq.leaving:
                self._end(seq)
            else:
                self._offer(seq, Started())

    def _choose(self) -> list[tuple[Sequence, Work]]:
        """Who takes part in the next step."""
        batch = []
        budget = chunk = self._model.chunk
        for seq in self._open:
            if seq.outbox:
                continue  # paused
            work = seq.next_work(chunk)
            if seq.prefilling:
                if len(work.ids) > budget:
                    continue  # its turn comes: those that were fed stand behind it from now on
                budget -= len(work.ids)
            batch.append((seq, work))
        return batch

    async def _step(self, batch: list[tuple[Sequence, Work]]) -> None:
        for seq, work in batch:
            seq.busy = True
            seq.steps += 1
            self._mark(seq, work, "begin")
        self.steps += 1
        self._step_began = trio.current_time()
        try:
            results = await self._runner.call(_attempt, self._model.step, [work for _, work in batch])
        finally:
            self._step_began = None
        if not isinstance(results, BaseException) and len(results) != len(batch):
            results = RuntimeError("the model returned the wrong number of results")
        for n, (seq, work) in enumerate(batch):
            self._mark(seq, work, "end")
            seq.busy = False
            try:
                self._settle(seq, work, results if isinstance(results, BaseException) else results[n])
            except Exception as error:  # noqa: BLE001  (a fault in one sequence's affairs must not stop the others)
                seq.error = error
                if seq.state is State.OPEN:
                    self._end(seq)

    def _mark(self, seq: Sequence, work: Work, edge: str) -> None:
        if seq.prefilling:
            seq.events.mark("prefill_" + edge, len(work.ids))
        else:
            seq.events.mark("step_" + edge, seq.generated)

    def _settle(self, seq: Sequence, work: Work, result: Chosen | StepFailure | BaseException | None) -> None:
        """One sequence's part of a step's result."""
        if seq.leaving:
            if isinstance(result, Chosen) and result.id not in self._model.eos:
                seq.events.late(1)  # work for nobody is counted too
            self._end(seq)
        elif isinstance(result, BaseException):
            self._fail(seq, result)
        elif isinstance(result, StepFailure):
            self._fail(seq, result.error)
        else:
            if seq.prefilling:
                seq.fed += len(work.ids)
                del self._open[seq]
                self._open[seq] = None  # to the end of the line
            if isinstance(result, Chosen):
                self._take(seq, result)
            elif work.choose:
                self._fail(seq, RuntimeError("the model chose no token"))

    def _take(self, seq: Sequence, chosen: Chosen) -> None:
        """A token has been chosen. Where it is the last one, the end is in the channel before the memory is back in the pool."""
        if chosen.id in self._model.eos:
            self._finish(seq, "stop")
            return
        seq.last = chosen.id
        seq.generated += 1
        token = seq.text.feed(chosen.id, chosen.logprob)
        if token is not None:
            self._offer(seq, token)
        if seq.text.stopped:
            self._finish(seq, "stop")
        elif seq.generated == seq.max_tokens:
            self._finish(seq, "length")

    def _finish(self, seq: Sequence, reason: str) -> None:
        tail = seq.text.finish()
        if seq.text.stopped:
            reason = "stop"  # completed by what was held back
        if tail is not None:
            self._offer(seq, tail)
        self._offer(seq, Finish(reason))
        self._end(seq)

    def _fail(self, seq: Sequence, error: BaseException) -> None:
        if isinstance(error, HttpError):
            seq.error = error
        else:
            seq.error = ModelFailed("the model failed on this sequence")
            seq.error.__cause__ = error
        tail = seq.text.finish()
        if tail is not None:
            self._offer(seq, tail)
        self._end(seq)

    def _offer(self, seq: Sequence, event: Event) -> None:
        """Hands ``event`` out: into the channel, or, if that is full or others wait, to the sequence's own task."""
        if not seq.outbox:
            try:
                seq.events.send_nowait(event)
                return
            except trio.WouldBlock:
                pass
        seq.outbox.append(event)
        seq.wake.set()

    def _end(self, seq: Sequence) -> None:
        """It steps no more; its cache goes back as soon as the model thread is free."""
        del self._open[seq]
        seq.state = State.CLOSING
        self._closing.append(seq)
        self._wake.set()

    def _release(self, seq: Sequence) -> None:
        if seq.state is not State.WAITING:
            self.kv_cache_bytes -= seq.reserved
        seq.cache = None
        seq.state = State.RELEASED
        seq.done.set()
        seq.wake.set()


def longest_sequence(model: StepModel) -> int:
    """The longest prompt and answer, in tokens, that both the model's context and the whole cache pool have room for."""
    return bisect_right(range(1, model.context + 1), model.pool_bytes, key=model.cache_bytes)


def _attempt(fn: Callable[..., T], *args: Any) -> T | BaseException:
    """Runs in the model thread. What a job raises comes back as a value, so that what ``call`` raises is the runner's own trouble."""
    try:
        return fn(*args)
    except BaseException as error:  # noqa: BLE001, ASYNC103  (no trio here: it is not in a trio thread)
        return error  # noqa: ASYNC104
