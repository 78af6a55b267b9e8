"""Two small backends that measured cases run against, and a user's first example of one's own: ``--backend MODULE:FACTORY``."""

from __future__ import annotations

from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.events import Finish, Started, Token

__all__ = ["Repeating", "burst", "two_steps"]


class Repeating(Backend):
    """Answers every request with ``steps`` times the same text.

    Args:
      steps: how many tokens an answer has.
      text: what each of them says.
    """

    name = "repeating"

    def __init__(self, steps: int, text: str) -> None:
        self._steps = steps
        self._text = text

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:  # noqa: ARG002  (every request gets the same)
        """Each step is marked in the trace; every send is a checkpoint, so that a cancellation stops it between two steps."""
        await events.send(Started())
        for step in range(1, self._steps + 1):
            events.mark("step_begin", step)
            token = Token(self._text)
            events.mark("step_end", step)
            await events.send(token)
        await events.send(Finish("length"))


def two_steps() -> Repeating:
    """Two steps, with a newline in each token."""
    return Repeating(2, "line one\nline two")


def burst() -> Repeating:
    """3,000 small tokens as fast as they are taken: what a server's own cost per event is measured with."""
    return Repeating(3000, " token")
