"""What a dialect is: the wire format of one kind of route. Pure; nothing here waits.

``parse`` turns a body or a query into a :class:`~trio_sse.events.GenerationRequest`, or raises an HttpError that names the field.
``answer`` then gives the :class:`Answer` that turns events into bytes: frames of a stream, or one JSON document.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from trio_sse.errors import HttpError
from trio_sse.events import Event, GenerationRequest

__all__ = ["Answer", "AnswerContext", "Parsed"]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request understood: the work, whether it is answered as a stream, and the answer's encoder."""

    request: GenerationRequest
    stream: bool
    answer: Answer


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What a dialect may say about the server: the model's name, the request's id, seconds since 1970."""

    model: str
    request_id: str
    created: int


class Answer(ABC):
    """Encodes the events of one exchange. It is told of every event in order, and keeps whatever state its format needs.

    ``heartbeat`` is a comment that any parser skips; it is also the probe after the peer's end of file.
    """

    heartbeat: bytes = b": hb\n"

    def prompt(self, tokens: int) -> None:  # noqa: B027  (most formats do not say)
        """The prompt has ``tokens`` tokens. Called once, before any event."""

    @abstractmethod
    def frames(self, event: Event) -> bytes:
        """The frames for ``event``, possibly none. After ``Finish`` they include the stream's end."""

    @abstractmethod
    def error(self, error: HttpError) -> bytes:
        """The in-band error, and whatever ends such a stream."""

    def collect(self, event: Event) -> None:
        """For an answer in one piece: takes ``event`` in."""
        raise NotImplementedError

    def document(self) -> bytes:
        """For an answer in one piece: the JSON, once ``Finish`` was collected."""
        raise NotImplementedError
