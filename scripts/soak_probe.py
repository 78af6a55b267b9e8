"""What only the inside of the server knows, for the soak: how many tasks there are, once a second.

A backend with a probe beside it: ``--backend scripts.soak_probe:scripted`` (or ``:model``). Its lines go to the file that the environment
names: JSON, with seconds on the monotonic clock, tasks, threads, and objects that the garbage collector keeps.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from pathlib import Path

import trio

from trio_sse.backends.base import Backend
from trio_sse.backends.scripted import ScriptedBackend
from trio_sse.script import Script

FILE = "SOAK_PROBE"
EVERY = 1.0  # seconds
SCRIPT = Script(events=40, interval_ms=4, size=12)


def tasks_below(task: trio.lowlevel.Task) -> int:
    """How many tasks there are below ``task``, through public attributes."""
    return sum(1 + tasks_below(child) for nursery in task.child_nurseries for child in nursery.child_tasks)


async def probe(path: Path) -> None:
    """Writes a line every second, for ever."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    with path.open("w", buffering=1) as file:
        while True:
            sample = {
                "at": time.monotonic(),
                "tasks": tasks_below(root),
                "threads": threading.active_count(),
                "objects": len(gc.get_objects()) if int(time.monotonic()) % 10 == 0 else None,
            }
            file.write(json.dumps(sample) + "\n")
            await trio.sleep(EVERY)


def with_probe(backend: Backend) -> Backend:
    """``backend``, whose ``run`` has the probe beside it."""
    run = backend.run

    async def probed(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # noqa: ASYNC114, ASYNC128
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe, Path(os.environ[FILE]))
            await run(task_status=task_status)

    backend.run = probed  # type: ignore[method-assign]
    return backend


def scripted() -> Backend:
    return with_probe(ScriptedBackend(SCRIPT, slots=32))


def model() -> Backend:
    from trio_sse.backends.transformers import TransformersBackend

    return with_probe(TransformersBackend(slots=4))
