"""The pump makes the writes that have to wait for nothing, for all responses of a server.

An engine's step hands an event to many streams at the same moment. To wake a task for each of them, only so that it encodes a few bytes
and gives them to a kernel that takes them at once, costs as much as the encoding and half as much as the sending. So a writer that waits
for events leaves a *turn* with its channel, a function that makes one write and does not wait, and one task makes the turns of all::

    engine ──▶ channel, channel, channel ──▶ pump ──▶ turn, turn, turn ──▶ kernel
                                              │
                                              └── the kernel refuses, something fails, the events end: that writer's task is woken

Measured side by side, processor time per event: producers that yield per event 45 → 33 µs, 64 streams fed in one tick 60 → 42 µs.

Rules:

1. A turn never waits and never raises: whatever is out of the ordinary is its own writer's task's business.
2. A turn that comes too late does nothing: its writer may have been cancelled, or have gone on by itself, since it was called for.
3. Without a running pump everything works the same; the writers' own tasks are woken then.
4. Where the turns have taken more events than there were turns, producers go on without waiting for anything: the next turns come one
   round of the scheduler later and take what two rounds have brought, in half the writes. Without this and with it, in alternating runs
   beside uvicorn: producers that yield per event, one connection 0.52 to 0.64 of its events per second → 0.72 to 0.85; 16 and 128
   connections 0.86 to 1.16 → 1.02 to 1.44; paced streams the same.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

__all__ = ["Pump", "Turn"]

Turn = Callable[[float], int]  # is told the time on trio's clock; returns how many events it has taken


class Pump:
    """Runs turns.

    Attributes:
      running: whether there is a task to make them.
    """

    def __init__(self) -> None:
        self.running = False
        self._due: list[Turn] = []
        self._idle: trio.lowlevel.Task | None = None  # the task, while nothing is due

    async def run(self) -> None:
        """Makes turns until it is cancelled.

        Resource handling: owns nothing. What is still due when it ends is dropped; it ends together with the writers it works for.
        """
        self.running = True
        patient = False
        try:
            while True:
                if self._due:
                    await trio.lowlevel.checkpoint()
                else:
                    self._idle = trio.lowlevel.current_task()
                    await trio.lowlevel.wait_task_rescheduled(self._stop_waiting)
                if patient:  # rule 4
                    await trio.lowlevel.checkpoint()
                due, self._due = self._due, []
                now = trio.current_time()
                taken = 0
                for turn in due:
                    taken += turn(now)
                patient = taken > len(due)
        finally:
            self.running = False

    def call(self, turn: Turn) -> None:
        """Has ``turn`` made soon. Synchronous."""
        self._due.append(turn)
        if self._idle is not None:
            trio.lowlevel.reschedule(self._idle)
            self._idle = None

    def _stop_waiting(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._idle = None
        return trio.lowlevel.Abort.SUCCEEDED
