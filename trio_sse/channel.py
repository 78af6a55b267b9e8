"""The bounded channel between a backend and the writer of its response.

This is where back-pressure lives, and nowhere else: a full channel blocks the backend, and that stops the model. It is trio's memory
channel made for one exchange: one writer takes, the account of what was offered is kept here (how long it waited, how full it was), and
there is one more state:

    OPEN ──discard()──▶ DISCARDING ──close()──▶ CLOSED
      └────────────────────close()───────────────▲

Rules:

1. The backend sends, the writer takes, the producer task closes once the backend has returned.
2. :meth:`discard` is synchronous and final. What is queued is thrown away, a blocked sender is let go, and whatever is sent from
   then on is counted and thrown away. A must-drain backend therefore never meets a closed channel: it runs out at its own pace,
   into nothing.
3. While the channel is open, a send is accounted for before its first checkpoint: one that is cancelled has still been offered.
4. While discarding, only :meth:`send` takes events: whoever never waits would never meet the checkpoint at which a cancellation
   arrives, and go on producing for nobody.
5. Whoever waits is woken when there is something for it, and looks again: nothing is handed to a task that may be cancelled meanwhile.

Why not trio's own: it is as fast, but it can't throw away what is sent without a task that receives it, and its statistics, which the
account would need for each event, build an object every time.
"""

from __future__ import annotations

from collections import deque

import trio

from trio_sse.events import Event, Finish, Started, Token
from trio_sse.trace import MARKS, Record

__all__ = ["EventChannel"]


class EventChannel:
    """One exchange's events, from backend to writer.

    Args:
      capacity: how many events may be queued, at least 1.
      record: the account to keep.
    """

    __slots__ = ("_capacity", "_closed", "_discarding", "_queue", "_reader", "_record", "_room")

    def __init__(self, capacity: int, record: Record) -> None:
        self._capacity = capacity
        self._record = record
        self._queue: deque[Event] = deque()
        self._room = trio.lowlevel.ParkingLot()  # senders that wait
        self._reader: trio.lowlevel.Task | None = None  # the writer, if it waits
        self._discarding = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def closed(self) -> bool:
        """Whether nothing more will be sent."""
        return self._closed

    # The backend's side

    async def send(self, event: Event) -> None:
        """Hands over ``event``; waits while the channel is full. Always a checkpoint.

        Cancellation: a cancelled send has not queued its event.
        """
        if self._discarding:
            await trio.lowlevel.checkpoint()  # cancelled work ends here, and has not produced this one
            self._offer(event)
            self._throw_away(event)
            return
        self._offer(event)
        if not self._full():
            await trio.lowlevel.checkpoint_if_cancelled()
            self._put(event, 0)
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        begin = self._record.now()
        while self._full():
            await self._room.park()
        self._put(event, self._record.now() - begin)

    def send_nowait(self, event: Event) -> None:
        """Hands over ``event`` without waiting.

        Raises:
          trio.WouldBlock: the channel is full, or nobody reads it any more; nothing has happened. Follow up with :meth:`send`.
        """
        if len(self._queue) >= self._capacity or self._discarding:  # rule 4
            raise trio.WouldBlock
        self._offer(event)
        self._put(event, 0)

    def late(self, tokens: int) -> None:
        """Accounts for tokens that a step already under way made after the verdict, and that are not worth sending."""
        self._record.produced(tokens)
        self._throw_away(Token("", tokens))

    def mark(self, kind: str, *values: str | int | None) -> None:
        """Adds a mark of the backend's own to the trace (a step's begin and end, the cache's release); see ``trace.MARKS``."""
        if len(values) != len(MARKS[kind][1]):
            raise ValueError(f"the mark {kind} has the values {MARKS[kind][1]}")
        self._record.mark(kind, *values)

    # The producer task's

    def close(self) -> None:
        """Nothing more will be sent: the writer sees the end once it has taken what is queued."""
        self._closed = True
        self._wake_reader()

    # The writer's side

    async def receive(self) -> Event:
        """The next event, when there is one. Raises :exc:`trio.EndOfChannel` after the last. Always a checkpoint.

        Cancellation: a cancelled receive has taken nothing.
        """
        if self._queue or self._closed:
            await trio.lowlevel.checkpoint()
        while True:
            event = self.take()
            if event is not None:
                return event
            if self._closed:
                raise trio.EndOfChannel
            self._reader = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._stop_waiting)

    def take(self) -> Event | None:
        """The next event if it is there. Does not wait."""
        if not self._queue:
            return None
        event = self._queue.popleft()
        if self._room:
            self._room.unpark()
        return event

    def discard(self) -> None:
        """Nobody will read this any more: throw away what is queued and all that follows."""
        self._discarding = True
        while self._queue:
            self._throw_away(self._queue.popleft())
        self._room.unpark_all()

    # Queueing and waking

    def _full(self) -> bool:
        return len(self._queue) >= self._capacity and not self._discarding

    def _put(self, event: Event, wait_ns: int) -> None:
        if self._discarding:  # since the send began to wait
            self._throw_away(event)
            return
        if self._closed:
            raise trio.ClosedResourceError("the generation has ended")
        self._queue.append(event)
        record = self._record
        queued = len(self._queue)
        if queued > record.channel_peak:
            record.channel_peak = queued
        if wait_ns > record.enqueue_wait_ns:
            record.enqueue_wait_ns = wait_ns
        if record.tracing:
            record.mark("enqueued", record.events_produced, wait_ns, queued)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None

    def _stop_waiting(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    # Accounting

    def _offer(self, event: Event) -> None:
        if type(event) is Token:
            self._record.produced(event.count)
        elif type(event) is Started:
            self._record.started()
        elif type(event) is not Finish:
            self._record.produced(0)

    def _throw_away(self, event: Event) -> None:
        if type(event) is not Started and type(event) is not Finish:
            self._record.events_discarded += 1
            self._record.mark("discarded", self._record.events_discarded, event.count if type(event) is Token else 0)
