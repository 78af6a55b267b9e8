"""The faults: what can happen to a request at any moment, each as one synchronous act on the scene."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trio_sse.errors import Busy, UpstreamFailed
from trio_sse.simulated import SimulatedPeer
from trio_sse.trace import Outcome

if TYPE_CHECKING:
    from tests.faults.scene import ServerScene

__all__ = ["FAULTS", "LOGS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """``outcomes``: what it explains, beside what the scenario's requests come to without it."""

    strike: Callable[[ServerScene], None]
    outcomes: tuple[Outcome, ...] = ()


# Cancellations


def delete(scene: ServerScene) -> None:
    for exchange, _ in list(scene.stage.server.routes.live.values()):
        if scene.mine(exchange.record):
            exchange.stop(Outcome.CANCELLED, "delete")
            scene.must_end()


def cancel_request(scene: ServerScene) -> None:
    if scene.scope is not None:
        scene.scope.cancel()
        scene.must_end()


def cancel_server(scene: ServerScene) -> None:
    scene.house.cancel_scope.cancel()
    scene.must_end()


def shutdown(scene: ServerScene) -> None:
    scene.shutting_down.set()


# The peer


def on_peer(act: Callable[[SimulatedPeer], None], *, ends: bool = False) -> Callable[[ServerScene], None]:
    def strike(scene: ServerScene) -> None:
        if scene.peer is not None and not scene.peer.closed:
            act(scene.peer)
            if ends:
                scene.must_end()

    return strike


def broken_write(peer: SimulatedPeer) -> None:
    """The next write fails, and nothing has said so before."""
    peer.closed = peer.broken = True


def partial_write(peer: SimulatedPeer) -> None:
    """The kernel takes three bytes of the next write; then comes a reset."""
    take = peer.take

    def three(data: bytes) -> int:
        peer.max_write = 3
        taken = take(data)
        if not peer.broken:
            peer.reset()
        return taken

    peer.take = three  # type: ignore[method-assign]


def stall(peer: SimulatedPeer) -> None:
    """The client stops reading, and no window is left."""
    peer.stall()
    peer._window = len(peer._buffer)


def stall_a_while(scene: ServerScene) -> None:
    if scene.peer is not None and not scene.peer.closed:
        stall(scene.peer)
        scene.resuming.set()


# The backend, and what comes before it


def backend_error(scene: ServerScene) -> None:
    scene.backend.error = RuntimeError("planted")


def backend_weird_error(scene: ServerScene) -> None:
    scene.backend.error = BaseExceptionGroup("planted", [Weird("planted"), ExceptionGroup("planted", [OSError("planted")])])


class Weird(BaseException):
    """What no library should raise."""


def backend_refuses(scene: ServerScene) -> None:
    scene.backend.error = UpstreamFailed("planted")


def slow_step(scene: ServerScene) -> None:
    scene.backend.stuck = 2.0


def stuck_step(scene: ServerScene) -> None:
    """Longer than the grace for cancelled work."""
    scene.backend.stuck = 20.0


def busy(scene: ServerScene) -> None:
    """The next one who asks for a slot is refused."""
    admission = scene.stage.server.routes.admission

    def refuse() -> None:
        del admission.check
        raise Busy("planted")

    admission.check = refuse  # type: ignore[method-assign]


GONE = (Outcome.CLIENT_DISCONNECTED,)
FAILED = (Outcome.BACKEND_ERROR,)
MORE = (Outcome.REJECTED, Outcome.CLIENT_DISCONNECTED)

FAULTS: dict[str, Fault] = {
    "delete": Fault(delete, (Outcome.CANCELLED,)),
    "cancel_request": Fault(cancel_request, (Outcome.SHUTDOWN,)),
    "cancel_connection": Fault(lambda scene: scene.cancel_connection(), (Outcome.SHUTDOWN,)),
    "cancel_server": Fault(cancel_server, (Outcome.SHUTDOWN, Outcome.REJECTED, Outcome.BACKEND_ERROR)),  # a stopping engine refuses
    "shutdown": Fault(shutdown, (Outcome.SHUTDOWN, Outcome.REJECTED)),
    "fin": Fault(on_peer(SimulatedPeer.close, ends=True), GONE),
    "half_close": Fault(on_peer(SimulatedPeer.shutdown_write)),
    "rst": Fault(on_peer(SimulatedPeer.reset, ends=True), GONE),
    "broken_write": Fault(on_peer(broken_write), GONE),
    "partial_write": Fault(on_peer(partial_write), GONE),
    "stall": Fault(on_peer(stall), (Outcome.CLIENT_STALLED, Outcome.CLIENT_DISCONNECTED)),
    "stall_a_while": Fault(stall_a_while),
    "junk": Fault(lambda scene: scene.say(b"\0 junk\r\n\r\n"), MORE),
    "flood": Fault(lambda scene: scene.say(b"x" * 70_000), MORE),
    "backend_error": Fault(backend_error, FAILED),
    "backend_weird_error": Fault(backend_weird_error, FAILED),
    "backend_refuses": Fault(backend_refuses, FAILED),
    "slow_step": Fault(slow_step),
    "stuck_step": Fault(stuck_step, (Outcome.DRAIN_TIMED_OUT,)),
    "busy": Fault(busy, (Outcome.REJECTED,)),
}

# What each explains in the log; everything else there is a finding.
LOGS: dict[str, tuple[str, ...]] = {
    "cancel_server": ("request backend_error",),
    "backend_error": ("backend failed", "request backend_error"),
    "backend_weird_error": ("backend failed", "request backend_error"),
    "backend_refuses": ("request backend_error",),
    "slow_step": ("abandoned with the process",),  # by a shutdown, which waits a second
    "stuck_step": ("request drain_timed_out", "abandoned with the process", "still waits for its model step"),
}
