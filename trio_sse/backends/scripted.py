"""Tokens at scripted times: the fake everyone trusts, and the lab's instrument.

It keeps the whole contract of a real backend and does none of the work: it sleeps where a model would think, counts its steps, and
fails where it is told to. ``/events`` brings its own script; ``/generate`` and ``/v1`` use the one from ``--script``, cut to the
tokens they ask for.

Rules:

1. Time is trio's clock, so that a test with a fake clock takes no time. Event *n* is due at begin + prefill + n × interval, whatever
   the earlier ones cost; a reader slower than that makes the rest late, never bunched.
2. ``steps`` counts the events begun, over all requests: a test sees by it whether anything ran after a verdict.
"""

from __future__ import annotations

import trio

from trio_sse.backends.base import Backend, Prepared
from trio_sse.channel import EventChannel
from trio_sse.errors import UpstreamFailed
from trio_sse.events import Event, Finish, GenerationRequest, Started, Token, ToolCall
from trio_sse.script import Script

__all__ = ["ScriptedBackend"]

_BURST = 32  # events sent without a checkpoint when there is no interval


class ScriptedBackend(Backend):
    """Plays a script.

    Args:
      script: what requests without one of their own get.
      slots: requests that may generate at once.

    Attributes:
      steps: events begun since the start.
      active: generations that are running.
    """

    name = "scripted"

    def __init__(self, script: Script | None = None, *, slots: int = 1) -> None:
        self.script = script or Script()
        self.slots = slots
        self.steps = 0
        self.active = 0

    async def prepare(self, request: GenerationRequest) -> Prepared:
        await trio.lowlevel.checkpoint()
        script = request.script or self.script
        if request.prompt is not None:
            tokens = len(request.prompt.split())
        else:
            tokens = sum(len(message.content.split()) for message in request.messages or ())
        return Prepared(request=request, prompt_tokens=tokens, drain_budget=script.duration if script.must_drain else None)

    async def generate(self, prepared: Prepared, events: EventChannel) -> None:
        script = prepared.request.script or self.script
        limit = prepared.request.max_tokens or script.events
        self.active += 1
        try:
            await events.send(Started())
            if script.prefill_ms:
                events.mark("prefill_begin", prepared.prompt_tokens)
                await trio.sleep(script.prefill_ms / 1000)
                events.mark("prefill_end", prepared.prompt_tokens)
            await self._play(script, min(script.events, limit), events)
            await events.send(Finish("length" if script.events > limit else "stop"))
        finally:
            self.active -= 1

    async def _play(self, script: Script, count: int, events: EventChannel) -> None:
        fails = script.fail_at is not None and script.fail_at <= count
        if script.fail_at is not None and fails:
            count = script.fail_at
        due = trio.current_time()
        for number in range(1, count + 1):
            if script.interval_ms:
                # A reader that holds us up moves the rest back: what was missed is not made up for in a burst.
                due = max(due + script.interval_ms / 1000, trio.current_time())
                await trio.sleep_until(due)
            self.steps += 1
            event = _event(script, number)
            if script.interval_ms or number % _BURST == 0:
                await events.send(event)
            else:
                await _send_soon(event, events)
        if fails:
            raise UpstreamFailed("The scripted upstream failed, as it was told to.")


async def _send_soon(event: Event, events: EventChannel) -> None:
    try:
        events.send_nowait(event)
    except trio.WouldBlock:
        await events.send(event)


def _event(script: Script, number: int) -> Event:
    if script.tool_every and number % script.tool_every == 0:
        return ToolCall({"name": "scripted_tool", "arguments": {"text": _text(script.size, number)}})
    return Token(_text(script.size, number))


def _text(size: int, number: int) -> str:
    """``size`` characters that differ from event to event."""
    word = f"w{number} "
    return (word * (size // len(word) + 1))[:size]
