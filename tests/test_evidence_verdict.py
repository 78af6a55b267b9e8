"""What recording 1 found: an event that fell due between the verdict and the cancellation of the work was still produced."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.stage import Stage, get
from trio_sse.trace import Outcome


@pytest.mark.parametrize("cancellation", ["cancellable", "must_drain"])
async def test_nothing_is_produced_after_a_verdict_that_falls_together_with_an_event(
    nursery: trio.Nursery, autojump_clock: MockClock, cancellation: str
) -> None:
    stage = Stage(nursery)
    # trio shuffles the tasks that wake together: over this many rounds the verdict comes before the event and after it.
    for number in range(20):
        peer = stage.connect()
        peer.send(get(f"/events?events=50&interval_ms=125&cancellation={cancellation}", f"X-Request-Id: r{number}"))
        begin = trio.current_time()
        await wait_all_tasks_blocked()
        exchange, _ = stage.server.routes.live[f"r{number}"]
        await trio.sleep_until(begin + 1.25)  # the tenth event is due at this very moment: eighths of a second add up exactly
        exchange.stop(Outcome.CANCELLED, "delete")
        await trio.sleep(10)
        await stage.settled()
    assert stage.outcomes == [Outcome.CANCELLED] * 20
    produced = {(record.events_produced, record.events_after_verdict) for record in stage.records}
    if cancellation == "cancellable":
        assert produced == {(9, 0), (10, 0)}
    else:
        assert produced == {(50, 40), (50, 41)}
    for record in stage.records:
        assert record.events_produced == record.events_sent + record.events_discarded
