"""Slots, and the line of those who wait for one.

A slot is the right to make the backend work. There are as many as the backend can bear; one is given back only when the work it was
taken for has really ended, however long ago its client left.

Rules:

1. The line is first in, first out, and bounded. When it is full, or its length is 0 and no slot is free, the answer is 429 at once.
2. A freed slot goes straight to the head of the line: a newcomer cannot snatch it in between.
3. Giving back is synchronous, and there is no checkpoint between getting a slot and owning it: no cancellation can lose one.
4. Work that outlives its grace makes its slot *lost*: still taken, but counted apart, so that a full server and a stuck one look
   different from outside.
"""

from __future__ import annotations

from collections import deque

import trio

from trio_sse.errors import Busy

__all__ = ["Admission", "Slot"]


class Slot:
    """One slot, held. :meth:`release` it exactly once."""

    __slots__ = ("_admission", "_lost", "_released")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._lost = False
        self._released = False

    def lose(self) -> None:
        """The work did not end within its grace: the slot stays taken, and counts as lost until it does."""
        if not self._lost and not self._released:
            self._lost = True
            self._admission.lost += 1

    def release(self) -> None:
        """The work has ended."""
        if self._released:
            raise RuntimeError("a slot was released twice")
        self._released = True
        if self._lost:
            self._admission.lost -= 1
        self._admission._give_back()  # noqa: SLF001  (the two are one mechanism)


class _Waiter:
    __slots__ = ("granted", "news")

    def __init__(self) -> None:
        self.granted = False
        self.news = trio.Event()


class Admission:
    """Hands out slots.

    Args:
      slots: how many there are.
      queue: how many requests may wait.
      timeout: seconds that one may wait at the longest.

    Attributes:
      running: slots taken. lost: of these, those held by work past its grace. waiting: requests in line.
    """

    def __init__(self, slots: int, queue: int, timeout: float) -> None:
        self.slots = slots
        self.running = 0
        self.lost = 0
        self._queue = queue
        self._timeout = timeout
        self._line: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def stuck(self) -> bool:
        """Every slot is lost: nothing can be served until some work ends after all."""
        return self.lost >= self.slots

    def check(self) -> None:
        """Raises :exc:`~trio_sse.errors.Busy` if a request that came now could not even wait."""
        if self.running >= self.slots and len(self._line) >= self._queue:
            raise Busy("All slots are taken. Try again in a moment.")

    async def acquire(self) -> Slot:
        """A slot, at once or after waiting in line.

        Raises:
          Busy: no slot is free and the line is full, or the wait was too long.

        Cancellation: takes the waiter out of the line; a slot that was granted in the same instant goes to the next one.
        """
        self.check()
        if self.running < self.slots:
            self.running += 1
            return Slot(self)
        waiter = _Waiter()
        self._line.append(waiter)
        try:
            with trio.move_on_after(self._timeout):
                await waiter.news.wait()
        except BaseException:
            self._leave(waiter)
            raise
        if waiter.granted:
            return Slot(self)
        self._line.remove(waiter)
        raise Busy(f"No slot became free within {self._timeout:g} seconds.")

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.granted:
            self._give_back()
        else:
            self._line.remove(waiter)

    def _give_back(self) -> None:
        if self._line:
            waiter = self._line.popleft()
            waiter.granted = True
            waiter.news.set()
        else:
            self.running -= 1
