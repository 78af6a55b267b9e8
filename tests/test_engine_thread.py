"""The model thread, with a real thread and the real clock: one thread, in order, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import trio

from trio_sse.backends.transformers.thread import ModelThread, ModelThreadDied


@asynccontextmanager
async def running() -> AsyncIterator[ModelThread]:
    thread = ModelThread()
    async with trio.open_nursery() as nursery:
        await nursery.start(thread.run)
        yield thread
        nursery.cancel_scope.cancel()


async def test_all_jobs_run_in_one_thread_in_order() -> None:
    seen: list[tuple[int, int]] = []

    def job(n: int) -> int:
        seen.append((n, threading.get_ident()))
        return n * n

    async with running() as thread:
        for n in range(20):
            assert await thread.call(job, n) == n * n
        async with trio.open_nursery() as nursery:
            for n in range(20, 40):
                nursery.start_soon(thread.call, job, n)
    assert sorted(n for n, _ in seen) == list(range(40))
    assert {ident for _, ident in seen} != {threading.get_ident()}
    assert len({ident for _, ident in seen}) == 1


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_whatever_a_job_raises_is_its_callers(error: type[BaseException]) -> None:
    def job() -> None:
        raise error("text")

    async with running() as thread:
        with pytest.raises(error, match="text"):
            await thread.call(job)
        assert await thread.call(int, "7") == 7


async def test_a_cancelled_call_waits_for_its_job() -> None:
    ended = False

    def job() -> None:
        nonlocal ended
        time.sleep(0.05)
        ended = True

    async with running() as thread:
        with trio.move_on_after(0.01) as scope:
            await thread.call(job)
            assert ended
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            await thread.call(pytest.fail, "was submitted though its caller was cancelled")
        assert scope.cancelled_caught


async def test_shutdown_waits_for_what_runs_and_ends_the_thread() -> None:
    before = threading.active_count()
    log: list[str] = []

    def job(name: str) -> None:
        time.sleep(0.02)
        log.append(name)

    thread = ModelThread()
    async with trio.open_nursery() as callers, trio.open_nursery() as life:
        await life.start(thread.run)
        callers.start_soon(thread.call, job, "first")
        callers.start_soon(thread.call, job, "second")
        await trio.testing.wait_all_tasks_blocked()
        life.cancel_scope.cancel()
    assert sorted(log) == ["first", "second"]
    with pytest.raises(ModelThreadDied):
        await thread.call(job, "late")
    # trio keeps its worker threads for a while, but none of ours is in one.
    assert threading.active_count() <= before + 1
    assert thread._jobs.empty()


async def test_call_before_run() -> None:
    with pytest.raises(ModelThreadDied):
        await ModelThread().call(int)


async def test_death_of_the_thread_fails_everybody() -> None:
    """It takes a fault in the thread's own loop. Whoever waits then, and whoever comes later, is told."""
    thread = ModelThread()
    gate = threading.Event()
    failures: list[BaseException] = []

    async def call() -> None:
        try:
            await thread.call(gate.wait)
        except ModelThreadDied as error:
            failures.append(error)

    jobs: SimpleQueue[Any] = thread._jobs
    with pytest.RaisesGroup(ModelThreadDied):
        async with trio.open_nursery() as nursery:
            await nursery.start(thread.run)
            jobs.put("no job")
            nursery.start_soon(call)
            nursery.start_soon(call)
            await trio.sleep(1)
    assert len(failures) == 2
    with pytest.raises(ModelThreadDied):
        await thread.call(int)


def test_the_run_may_end_while_a_job_runs() -> None:
    """L19: a thread that comes back to a run that has ended says nothing. (Only a crash of trio itself gets there.)"""
    thread = ModelThread()

    async def main() -> None:
        await trio.lowlevel.checkpoint()
        thread._token = trio.lowlevel.current_trio_token()

    trio.run(main)
    thread._jobs.put((None, int, ()))  # type: ignore[arg-type]
    thread._work()
