"""ONE REQUEST, TOP TO BOTTOM. Read this file first.

An exchange is one request that makes a backend work, and the response that carries what the work yields. Three tasks serve it::

    monitor    reads the receive side: the only one who can see the peer go while there is nothing to write
    producer   backend.prepare → slot → backend.generate → channel; holds the slot until the work has really ended
    writer     channel → frames → socket; the only one who writes. It is the exchange's own task, not a child; while it waits for
               events, the pump makes those of its writes that need no wait

                     events                  frames
    backend ──▶ [ channel, bounded ] ──▶ writer ──▶ kernel ──▶ peer
       ▲            full: waits            full: waits, under the write timeout
       └─── so a slow reader slows the model, and a stalled one is let go ───┘

Whoever learns that the exchange is over (end of file answered by a reset, a broken write, the write timeout, the deadline, DELETE, a
shutdown, the last frame) calls :meth:`Exchange.stop`. The first one counts: that is the *verdict*. From there on everything goes the
same way: the writer stops, the work is cancelled (or, if it can't be, drained into nothing), a peer that is still there is told, and
the exchange waits for the work to end. Only then does it return.

Rules:

1. The slot is taken inside the nursery, so that a client that waits for one is watched too.
2. A disconnect is a value (:class:`~trio_sse.trace.Outcome`), not an exception. What is expected to fail is turned into one in the
   task where it fails, so that a nursery never has anything to wrap.
3. State changes are synchronous; I/O follows. ``discard`` comes before any cancellation: a must-drain backend never meets a channel
   that nobody empties.
4. The head goes out with the backend's ``Started``; until then a failure is an HTTP status. The last frame goes out when the work has
   ended and the slot is free, so that whoever has read it may count on that.
5. Nothing is shielded without a deadline: a must-drain generation gets one as soon as anything would cancel it from outside.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import trio

from trio_sse.admission import Admission, Slot
from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.config import Config
from trio_sse.dialects.base import Parsed
from trio_sse.errors import (
    BadRequest,
    ConnectionLost,
    DeadlineExceeded,
    HttpError,
    InternalError,
    NotReady,
    PeerStalled,
    RequestCancelled,
    unwrapped,
)
from trio_sse.http11 import Headers, Http11Connection
from trio_sse.pump import Pump
from trio_sse.trace import Outcome, Record
from trio_sse.writer import ResponseWriter

__all__ = ["Exchange"]

log = logging.getLogger("trio_sse")


class Exchange:
    """One request and its response.

    Args:
      connection: in RESPONDING; the request is complete.
      parsed: the request as its dialect understood it, and the encoder of the answer.
      backend, admission: who does the work, and who says when.
      record: the account to keep. ``finished`` is called with it exactly once, when the outcome is final.
      headers: for any response: the request id, CORS.
      pump: makes the writes that have to wait for nothing.
    """

    __slots__ = (
        "_admission", "_answer", "_backend", "_channel", "_config", "_connection", "_drain", "_end", "_ended", "_failure", "_finished",
        "_request", "_serving", "_slot", "_watching", "_work", "_writer", "record",
    )  # fmt: skip

    def __init__(
        self,
        connection: Http11Connection,
        parsed: Parsed,
        backend: Backend,
        admission: Admission,
        record: Record,
        config: Config,
        headers: Headers,
        finished: Callable[[Record], None],
        pump: Pump | None = None,
    ) -> None:
        self.record = record
        self._connection = connection
        self._request = parsed.request
        self._answer = parsed.answer
        self._backend = backend
        self._admission = admission
        self._config = config
        self._finished = finished
        self._channel = EventChannel(config.channel_capacity, record, pump)
        self._writer = ResponseWriter(connection, parsed, self._channel, record, config, headers)
        # One scope per thing that can be told to stop.
        deadline = trio.current_time() + config.request_deadline if config.request_deadline else math.inf
        self._serving = trio.CancelScope(deadline=deadline)  # the writer's
        self._watching = trio.CancelScope()  # the monitor's
        self._work = trio.CancelScope()  # the producer's
        self._drain: trio.CancelScope | None = None  # inside it: the shield around must-drain work
        self._ended = False  # the work has ended and the slot is free
        self._end: trio.Event | None = None  # where somebody waits for that
        self._slot: Slot | None = None
        self._failure: HttpError | None = None

    # ---- The whole story ----

    async def run(self) -> None:
        """Serves the exchange to its end.

        Resource handling: the slot, the channel and three tasks are gone when it returns. The connection is left either reusable, or
        with its response complete and due to be closed, or aborted.

        Error handling: does not raise for anything that the peer or the backend does.

        Cancellation: the outcome is ``shutdown``, no goodbye is said; must-drain work gets ``cancel_grace`` seconds, then is cancelled.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._produce)
                nursery.start_soon(self._monitor)
                try:
                    with self._serving:
                        await self._write()
                    if self._serving.cancelled_caught:
                        self.stop(Outcome.DEADLINE_EXCEEDED, "request_deadline")  # unless there is a verdict already
                    self._let_go()
                    await self._goodbye()
                    await self._see_the_work_end()
                except BaseException:
                    self._let_go()
                    if self._drain is not None:
                        self._drain.deadline = trio.current_time() + self._config.cancel_grace
                    raise
        finally:
            self._report()

    def stop(self, outcome: Outcome, witness: str) -> None:
        """Pronounces the verdict, unless there is one. Synchronous; may be called by any task."""
        if self.record.reach(outcome, witness):
            self._serving.cancel(reason=f"{outcome}: {witness}")
            self._let_go()  # at once, not when the writer wakes: an event that falls due in between would be work for nobody

    # ---- Monitor ----

    async def _monitor(self) -> None:
        with self._watching:
            try:
                await self._connection.read_ahead()
                # End of file: the peer will send nothing more. Whether it still reads, only a probe can tell.
                self.record.mark("eof")
                self._writer.peer_ended()
                await self._connection.transport.wait_gone()
                self.stop(Outcome.CLIENT_DISCONNECTED, "reset_after_eof")
            except ConnectionLost as lost:
                self.stop(Outcome.CLIENT_DISCONNECTED, lost.witness)

    # ---- Producer ----

    async def _produce(self) -> None:
        try:
            with self._work:
                prepared = await self._backend.prepare(self._request)
                self.record.prompt_tokens = prepared.prompt_tokens
                self.record.mark("prepared", prepared.prompt_tokens)
                self._answer.prompt(prepared.prompt_tokens)
                self._check_drain(prepared)
                self.record.mark("waiting", self._admission.waiting)
                self._slot = slot = await self._admission.acquire()  # no checkpoint from here …
                try:  # … to here
                    self.record.mark("admitted", self._admission.running)
                    await self._generate(prepared)
                finally:
                    self.record.mark("backend_ended")
                    slot.release()
                    self.record.released()
        except trio.Cancelled:
            raise
        except HttpError as error:
            self._failure = error
        except BaseExceptionGroup as group:  # a backend's own nursery
            cancelled, errors = group.split(trio.Cancelled)
            if errors is not None:
                self._fail(errors)
            if cancelled is not None:
                raise cancelled from None
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001  (a model library may raise anything: it must not take the server with it)
            self._fail(error)
        finally:
            self._work_ended()

    def _work_ended(self) -> None:
        self._channel.close()
        self._ended = True
        if self._end is not None:
            self._end.set()

    def _check_drain(self, prepared: Prepared) -> None:
        if (prepared.drain_budget or 0) > self._config.cancel_grace:
            raise BadRequest("This work can't be cancelled, and may outlast --cancel-grace.", code="drain_too_long")

    async def _generate(self, prepared: Prepared) -> None:
        try:
            if prepared.drain_budget is None:
                await self._backend.generate(prepared, self._channel)
            else:
                # Must-drain: deaf to the verdict. Its deadline comes with the first cancellation from outside (see run).
                with trio.CancelScope(shield=True) as self._drain:
                    await self._backend.generate(prepared, self._channel)
                if self._drain.cancelled_caught:
                    self.record.mark("cancel_delivered")
        except trio.Cancelled:
            self.record.mark("cancel_delivered")
            raise

    def _fail(self, error: BaseException) -> None:
        """Our own fault, or the backend's: the log has it all, the client learns that it happened."""
        error = unwrapped(error)
        if isinstance(error, HttpError):
            self._failure = error
            return
        log.error("request %s: backend failed", self.record.request_id, exc_info=error)
        self._failure = InternalError()

    # ---- Writer ----

    async def _write(self) -> None:
        """Until the channel has ended and everything is sent, or somebody is gone."""
        try:
            await self._writer.events()
            await self._send_end()
        except ConnectionLost as lost:
            self.stop(Outcome.CLIENT_DISCONNECTED, lost.witness)
        except PeerStalled:
            self.stop(Outcome.CLIENT_STALLED, "write_timeout")
        except Exception as error:  # noqa: BLE001  (the encoder)
            self._fail(error)
            self.stop(Outcome.BACKEND_ERROR, "encoder")

    async def _send_end(self) -> None:
        """The channel has ended: the last frames if all is well; else the verdict, and the goodbye tells why."""
        if self.record.outcome is not None:
            return  # reached while this task was about to run: its cancellation waits for our next checkpoint, and so must the end
        finish = self._writer.finish
        if self._failure is None and finish is None:
            await trio.lowlevel.checkpoint_if_cancelled()  # from outside, and the producer was the first to learn
            self._fail(RuntimeError("the backend returned without Finish"))
        if self._failure is not None:
            refused = (self._failure.status < 500 or self._failure.status == 503) and not self._writer.head_sent
            self.stop(Outcome.REJECTED if refused else Outcome.BACKEND_ERROR, self._failure.code)
        elif finish is not None:
            await self._writer.last_frames(finish)
            self.record.reach(Outcome.COMPLETED, "last_frame")  # nobody is left to be told: neither this task nor the work

    # ---- The end ----

    def _let_go(self) -> None:
        """Nobody serves this any more. Synchronous: first the channel is opened for whoever drains, then the work is told."""
        self.record.reach(Outcome.SHUTDOWN, "cancelled_from_outside")  # only if there is no verdict yet
        self._watching.cancel(reason="the exchange is over")
        self._channel.discard()
        if not self._ended:
            self._work.cancel(reason=str(self.record.outcome))

    async def _goodbye(self) -> None:
        """Tells a peer that is still there why there is no more."""
        outcome = self.record.outcome
        if outcome is Outcome.COMPLETED:
            return
        error = self._error(outcome)
        with trio.move_on_after(self._config.write_timeout):
            try:
                if error is not None and self._writer.can_go_on:
                    await self._writer.last_words(error)
                    return
            except (ConnectionLost, PeerStalled):
                pass
        self._connection.abort()

    def _error(self, outcome: Outcome | None) -> HttpError | None:
        """What the peer is told; None if it is not there."""
        if outcome is Outcome.DEADLINE_EXCEEDED:
            return DeadlineExceeded()
        if outcome is Outcome.CANCELLED:
            return RequestCancelled()
        if outcome is Outcome.SHUTDOWN:
            return NotReady("The server is shutting down.", code="shutting_down")
        if outcome in (Outcome.REJECTED, Outcome.BACKEND_ERROR):
            return self._failure or InternalError()
        return None

    async def _see_the_work_end(self) -> None:
        if self._ended:
            return
        self._end = trio.Event()
        with trio.move_on_after(self._config.cancel_grace):
            await self._end.wait()
        if not self._ended:
            # It can't be stopped and did not end in time. The peer is let go; the slot is not, because it is not free.
            self._connection.abort()
            if self._slot is not None:
                self._slot.lose()
            self.record.outlived()
            self._report()
            await self._end.wait()

    def _report(self) -> None:
        if self.record.t_ended is None:
            self.record.close()
            self._finished(self.record)
