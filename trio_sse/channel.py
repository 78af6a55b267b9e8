"""The bounded channel between a backend and the writer of its response.

This is where back-pressure lives, and nowhere else: a full channel blocks the backend, and that stops the model. trio's memory
channel does the work; what is added is the account (what was offered, how long it waited, how full it was) and one more state:

    OPEN ──discard()──▶ DISCARDING ──close()──▶ CLOSED
      └────────────────────close()───────────────▲

Rules:

1. The backend sends, the writer receives, the producer task closes once the backend has returned.
2. :meth:`discard` is synchronous and final. What is queued is thrown away, a blocked sender is let go, and whatever is sent from
   then on is counted and thrown away. A must-drain backend therefore never meets a closed channel: it runs out at its own pace,
   into nothing.
3. While the channel is open, a send is accounted for before its first checkpoint: one that is cancelled has still been offered.
4. While discarding, only :meth:`send` takes events: whoever never waits would never meet the checkpoint at which a cancellation
   arrives, and go on producing for nobody.
"""

from __future__ import annotations

import trio

from trio_sse.events import Event, Finish, Started, Token
from trio_sse.trace import Record

__all__ = ["EventChannel"]


class EventChannel:
    """One exchange's events, from backend to writer.

    Args:
      capacity: how many events may be queued, at least 1.
      record: the account to keep.
    """

    __slots__ = ("_capacity", "_discarding", "_queued", "_receive", "_record", "_send", "_seq")

    def __init__(self, capacity: int, record: Record) -> None:
        self._send, self._receive = trio.open_memory_channel[Event](capacity)
        self._capacity = capacity
        self._record = record
        self._discarding = False
        self._queued = 0  # kept by hand: statistics() builds an object for every event

    # The backend's side

    async def send(self, event: Event) -> None:
        """Hands over ``event``; waits while the channel is full. Always a checkpoint.

        Cancellation: a cancelled send has not queued its event.
        """
        if self._discarding:
            await trio.lowlevel.checkpoint()  # cancelled work ends here, and has not produced this one
            self._offer(event)
            self._throw_away(event)
        else:
            self._offer(event)
            await self._enqueue(event)

    def send_nowait(self, event: Event) -> None:
        """Hands over ``event`` without waiting.

        Raises:
          trio.WouldBlock: the channel is full, or nobody reads it any more; nothing has happened. Follow up with :meth:`send`.
        """
        if self._discarding:
            raise trio.WouldBlock  # rule 4
        self._send.send_nowait(event)
        self._offer(event)
        self._account(0)

    def late(self, tokens: int) -> None:
        """Accounts for tokens that a step already under way made after the verdict, and that are not worth sending."""
        self._record.produced(tokens)
        self._throw_away(Token("", tokens))

    def mark(self, kind: str, *values: str | int | None) -> None:
        """Adds a mark of the backend's own to the trace (a step's begin and end, the cache's release)."""
        self._record.mark(kind, *values)

    # The producer task's

    def close(self) -> None:
        """Nothing more will be sent: the writer sees the end once it has taken what is queued."""
        self._send.close()

    # The writer's side

    async def receive(self) -> Event:
        """The next event, when there is one. Raises :exc:`trio.EndOfChannel` after the last."""
        event = await self._receive.receive()
        self._queued -= 1
        return event

    def receive_nowait(self) -> Event:
        """The next event, if it is there; else :exc:`trio.WouldBlock`, or :exc:`trio.EndOfChannel` after the last."""
        event = self._receive.receive_nowait()
        self._queued -= 1
        return event

    def discard(self) -> None:
        """Nobody will read this any more: throw away what is queued and all that follows."""
        self._discarding = True
        while True:
            try:
                # Taking one also moves in the value of a sender that waits, and lets that sender go.
                event = self._receive.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel):
                return
            self._throw_away(event)

    # Accounting

    def _offer(self, event: Event) -> None:
        record = self._record
        if type(event) is Token:
            record.produced(event.count)
        elif type(event) is Started:
            record.started()
        elif type(event) is not Finish:
            record.produced(0)

    async def _enqueue(self, event: Event) -> None:
        try:
            self._send.send_nowait(event)
        except trio.WouldBlock:
            begin = self._record.now()
            await self._send.send(event)
            if not self._discarding:
                self._account(self._record.now() - begin)
        else:
            self._account(0)
            await trio.lowlevel.checkpoint()

    def _account(self, wait_ns: int) -> None:
        record = self._record
        self._queued += 1
        # A sender that waited is counted while the reader's own decrement may still be on its way.
        queued = min(self._queued, self._capacity)
        if queued > record.channel_peak:
            record.channel_peak = queued
        if wait_ns > record.enqueue_wait_ns:
            record.enqueue_wait_ns = wait_ns
        if record.marks is not None:
            record.mark("enqueued", record.events_produced, wait_ns, queued)

    def _throw_away(self, event: Event) -> None:
        if type(event) is Token:
            self._record.events_discarded += 1
            self._record.mark("discarded", self._record.events_discarded, event.count)
        elif type(event) is not Started and type(event) is not Finish:
            self._record.events_discarded += 1
            self._record.mark("discarded", self._record.events_discarded, 0)
