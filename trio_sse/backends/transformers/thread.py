"""The model thread: one thread in which all torch work happens, loading included, for as long as the server lives.

Why one: OpenMP keeps a pool of threads per thread that has ever used it, and two pools on the same cores cost a third of the speed.
Why a queue: handing a job to a worker thread by ``trio.to_thread.run_sync`` costs ten times what a queue and ``run_sync_soon`` do,
and gives no promise about *which* thread runs it.

Rules:

1. Jobs run one at a time, in the order of their calls.
2. A call returns only when its job has ended; a job that runs cannot be given up, so neither can the wait for it. This is what
   ``trio.to_thread.run_sync`` does by default, and for the same reason.
3. Whatever a job raises, ``SystemExit`` included, is raised by its call, and the thread lives on.
4. If the thread should die all the same, every call that waits and every later one raises :exc:`ModelThreadDied`.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import outcome
import trio

__all__ = ["ModelThread", "ModelThreadDied", "Runner"]

T = TypeVar("T")

_Job = tuple[trio.lowlevel.Task, Callable[..., Any], tuple[Any, ...]]


class ModelThreadDied(RuntimeError):
    """There is no model thread any more, or it is being stopped."""


class Runner(Protocol):
    """Whoever runs jobs one at a time. The engine's tests have one that takes scripted time and no thread."""

    async def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Runs ``fn(*args)`` and returns or raises what it does. A cancelled call still waits for its job."""


class ModelThread:
    """A :class:`Runner` over one long-lived thread. :meth:`run` is its life."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._waiting: set[trio.lowlevel.Task] = set()
        self._token: trio.lowlevel.TrioToken | None = None
        self._death: ModelThreadDied | None = None
        self._dead = trio.Event()  # of itself
        self.stopping = False  # a long job may look at it, from the thread, and give up

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Starts the thread and lives as long as it does.

        Resource handling: when this returns the thread has ended.
        Error handling: raises :exc:`ModelThreadDied` if the thread ends unasked.
        Cancellation: ends the thread behind the jobs already queued, and waits for that.
        """
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            task_status.started()
            try:
                await self._dead.wait()
            finally:
                self.stopping = True
                self._jobs.put(None)
        if self._death is not None:  # raised here, because out of the nursery it would come as a group
            raise self._death

    async def call(self, fn: Callable[..., T], *args: Any) -> T:
        """Runs ``fn(*args)`` in the model thread.

        Error handling: raises what ``fn`` raises, or :exc:`ModelThreadDied`.
        Cancellation: a caller that is cancelled already submits nothing; after that the call ends when the job does.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._token is None or self.stopping:
            raise ModelThreadDied("the model thread does not run")
        task = trio.lowlevel.current_task()
        self._waiting.add(task)
        self._jobs.put((task, fn, args))
        result: T = await trio.lowlevel.wait_task_rescheduled(_cannot_be_cancelled)
        return result

    async def _watch(self) -> None:
        cause: Exception | None = None
        try:
            await trio.to_thread.run_sync(self._work, limiter=trio.CapacityLimiter(1), thread_name="trio_sse model")
        except Exception as error:  # noqa: BLE001  (it becomes the cause)
            cause = error
        if cause is not None or not self.stopping:
            self._death = ModelThreadDied("the model thread has died")
            self._death.__cause__ = cause
            self.stopping = True
            self._dead.set()
        for task in list(self._waiting):
            self._deliver(task, outcome.Error(ModelThreadDied("the model thread has died")))

    def _work(self) -> None:
        """The thread's own loop."""
        assert self._token is not None
        while True:
            job = self._jobs.get()
            if job is None:
                return
            task, fn, args = job
            result = outcome.capture(fn, *args)
            try:
                self._token.run_sync_soon(self._deliver, task, result)
            except trio.RunFinishedError:
                return  # nobody is left to tell
            del job, fn, args, result  # they may hold a cache, and the next job may be long in coming

    def _deliver(self, task: trio.lowlevel.Task, result: outcome.Outcome[Any]) -> None:
        if task in self._waiting:
            self._waiting.discard(task)
            trio.lowlevel.reschedule(task, result)


def _cannot_be_cancelled(_raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED
