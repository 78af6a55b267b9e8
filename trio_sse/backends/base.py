"""What a backend is: the contract between the work and whoever waits for it.

A backend turns a :class:`~trio_sse.events.GenerationRequest` into events. One file and one line of registration make a new one; the
contract suite in ``tests/`` runs over every backend there is.

Rules:

1. ``run`` owns whatever lives as long as the server (a model, a thread, a client pool). Requests come only after it has called
   ``task_status.started()``, and it ends by being cancelled.
2. ``prepare`` comes before a slot is asked for, so that what is wrong with a request costs nobody a slot. It raises an
   :class:`~trio_sse.errors.HttpError` for what is the client's fault.
3. ``generate`` is called with the slot held. Its first event is ``Started``. It **returns only when the work has ended**: no task,
   thread or upstream call of this request outlives it, because the slot is given back the moment it returns.
4. When it is cancelled, a *cancellable* generation stops at its next checkpoint, gives back what it holds and lets ``Cancelled``
   through. A *must-drain* generation cannot be stopped once begun: it is called inside a shield, runs to its end within the
   budget it has declared, and what it still sends is thrown away.
5. An :class:`~trio_sse.errors.HttpError` raised by ``generate`` is shown to the client, as a status before ``Started`` and in
   band after it. Any other exception is our own fault: it is logged, and the client learns only that it happened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import trio

from trio_sse.channel import EventChannel
from trio_sse.events import GenerationRequest

__all__ = ["Backend", "Prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that has been looked at. Backends may derive from it and carry what they found out.

    Attributes:
      request: what was asked for.
      prompt_tokens: how long the prompt is, in tokens; 0 where there are none.
      drain_budget: None for cancellable work. A number makes it *must-drain*: the seconds within which the work ends by itself,
        counted from the call of ``generate`` with a reader that takes everything at once. More than ``--cancel-grace`` is refused.
    """

    request: GenerationRequest
    prompt_tokens: int = 0
    drain_budget: float | None = None


class Backend(ABC):
    """Derive from it, and override at least :meth:`generate`.

    Attributes:
      name: what ``/v1/models`` and the log call it.
      slots: how many requests may generate at once when ``--slots`` does not say.
      context: the longest prompt and answer together, in tokens; None where there is no such limit.
    """

    name: str = "backend"
    slots: int = 1
    context: int | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Loads and warms, says so by ``task_status.started()``, then lives until it is cancelled."""
        task_status.started()
        await trio.sleep_forever()

    async def prepare(self, request: GenerationRequest) -> Prepared:
        """Checks and translates ``request``. Slow work (tokenising a long prompt) goes off the loop and can be cancelled."""
        await trio.lowlevel.checkpoint()
        return Prepared(request=request)

    @abstractmethod
    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        """Sends ``Started``, the events and ``Finish`` to ``events``. The rules above are its contract."""

    def step_age(self) -> float:
        """Seconds since the step that is running now began; 0.0 when none is. ``/readyz`` looks at it."""
        return 0.0
