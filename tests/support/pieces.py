"""One conversation in many cuts: the same bytes, sent in pieces, must be answered the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from trio.testing import wait_all_tasks_blocked

from tests.support.stage import Answer, Stage, answers

__all__ = ["Transcript", "bytewise", "converse", "halves", "in_pieces"]

# What differs from one run to the next for good reasons. Whether the body is asked for depends on whether it has come.
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CHANGING = [
    (re.compile(rb"\r\ndate: [^\r]*", re.IGNORECASE), b""),
    (re.compile(rb"\r\nx-request-id: [0-9a-f]{32}(?=\r\n)", re.IGNORECASE), b"\r\nx-request-id: NEW"),
    (re.compile(rb'"created":\d+'), b'"created":0'),
    (re.compile(re.escape(_CONTINUE)), b""),
]


@dataclass(frozen=True)
class Transcript:
    """All that the client saw: ``received`` (without what always differs), and how the connection ended. ``raw`` is not compared."""

    received: bytes
    aborted: bool
    raw: bytes = field(compare=False)

    def answers(self, *methods: str) -> list[Answer]:
        return answers(self.raw.replace(_CONTINUE, b""), *methods)

    @property
    def responses(self) -> int:
        return len(re.findall(rb"HTTP/1\.1 \d{3} ", self.received))


async def converse(stage: Stage, pieces: Iterable[bytes], *, fin: bool = False) -> Transcript:
    """Sends ``pieces``, letting the server take in each before the next comes, and waits for the connection's end.

    ``fin``: says end of file behind the last one. The fake clock makes the wait for the idle timeout free.
    """
    peer = stage.connect()
    for piece in pieces:
        peer.send(piece)
        await wait_all_tasks_blocked()
    if fin:
        peer.shutdown_write()
    await peer.wait_closed()
    if not peer.closed:
        peer.close()  # a client does, once it has seen the end: the server's lingering is over
    await wait_all_tasks_blocked()
    raw = received = bytes(peer.received)
    for pattern, instead in _CHANGING:
        received = pattern.sub(instead, received)
    return Transcript(received, peer.aborted, raw)


def halves(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Cut in two, at every offset."""
    for offset in range(1, len(raw)):
        yield raw[:offset], raw[offset:]


def bytewise(raw: bytes) -> list[bytes]:
    return [raw[offset : offset + 1] for offset in range(len(raw))]


def in_pieces(raw: bytes, size: int) -> list[bytes]:
    return [raw[offset : offset + size] for offset in range(0, len(raw), size)]
