"""The enumeration of faults: the fixed part of it, the tool itself, and the bugs that it must find.

``scripts/enumerate`` plays all of it; any line that a failure here prints can be given to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.faults.faults import FAULTS
from tests.faults.harness import Diverged, Injection, Scene, pairs, play, singles, tasks_below
from tests.faults.scenarios import SCENARIOS
from tests.faults.sweep import FIXED, sweep
from tests.faults.variants import VARIANTS


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario(name: str) -> None:
    """Single faults and pairs of them, sampled evenly over points and faults: the same ones every time."""
    for seed in FIXED.seeds:
        tally = sweep(name, seed, stride=FIXED.stride, pair_sample=FIXED.pairs)
        assert not tally.failures, "\n".join(tally.failures)
        assert tally.pairs == FIXED.pairs
        assert tally.singles == tally.points * len(FAULTS) // FIXED.stride
        assert tally.points >= 8


@pytest.mark.parametrize("name", VARIANTS)
def test_planted_bug_is_found(name: str) -> None:
    """For the reason that it was planted for, and by no more than its own faults."""
    variant = VARIANTS[name]
    tally = sweep(variant.scenario, 0, faults=variant.faults, variant=variant, enough=lambda line: variant.says in line)
    assert any(variant.says in line for line in tally.failures), f"not found; {tally}: {tally.failures[:3]}"
    assert not sweep(variant.scenario, 0, faults=variant.faults, stride=5).failures


def test_a_failure_prints_the_line_that_reproduces_it() -> None:
    """In a process of its own, where hashes and addresses are others."""
    variant = VARIANTS["checkpoint-after-acquire"]
    line = sweep(variant.scenario, 3, faults=variant.faults, variant=variant, enough=bool).failures[0]
    command, _, why = line.partition("   # ")
    arguments = [*command.split()[1:], "--variant", "checkpoint-after-acquire"]
    root = Path(__file__).resolve().parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert why.split(": ", 1)[1][:40] in " ".join(run.stderr.split())


# The tool itself, on a scene of a few lines


class Toy(Scene):
    """Two tasks that hand over a few numbers. ``fault`` cancels; ``leaky`` forgets a lock when it is cancelled at the wrong moment."""

    held = 0

    def __init__(self, leaky: bool = False) -> None:
        self.leaky = leaky
        self.scope = trio.CancelScope()

    async def run(self, watch: Callable[[trio.Nursery], None]) -> None:
        await self.inside(watch)
        assert self.held == 0
        assert len(tasks_below(trio.lowlevel.current_task())) == 0

    async def inside(self, watch: Callable[[trio.Nursery], None]) -> None:
        send, receive = trio.open_memory_channel[int](1)
        with self.scope:
            async with trio.open_nursery() as nursery:
                watch(nursery)
                nursery.start_soon(self.produce, send)
                nursery.start_soon(self.consume, receive)

    async def produce(self, send: trio.MemorySendChannel[int]) -> None:
        async with send:
            for number in range(3):
                self.held += 1
                if self.leaky:
                    await trio.sleep(1)
                try:
                    await trio.sleep(1)
                    await send.send(number)
                finally:
                    self.held -= 1

    async def consume(self, receive: trio.MemoryReceiveChannel[int]) -> None:
        async with receive:
            async for _ in receive:
                pass

    def inject(self, fault: str) -> None:
        if fault == "cancel":
            self.scope.cancel()
        else:
            raise ValueError(fault)


def test_points_are_the_same_each_time_and_differ_by_seed() -> None:
    runs = [play(Toy, seed=1) for _ in range(3)]
    assert runs[0].points == runs[1].points == runs[2].points
    assert runs[0].useful
    assert set(runs[0].useful) < set(range(len(runs[0].points)))
    assert len({tuple(play(Toy, seed=seed).points) for seed in range(10)}) > 1


def test_the_toy_passes_and_its_leak_is_found() -> None:
    for leaky in (False, True):
        base = play(lambda leaky=leaky: Toy(leaky), seed=1)  # type: ignore[misc]
        assert base.error is None
        runs = [play(lambda leaky=leaky: Toy(leaky), seed=1, injections=[each], plan=base) for each in singles(base, ["cancel"])]  # type: ignore[misc]
        assert len(runs) == len(base.useful)
        assert any(run.error is not None for run in runs) == leaky


def test_pairs_in_both_orders() -> None:
    base = play(Toy, seed=1)
    runs = list(pairs(Toy, base, ["cancel", "cancel"]))
    assert {len(run.injections) for run in runs} == {1, 2}
    assert all(first.point <= second.point for first, second in (run.injections for run in runs if len(run.injections) == 2))
    assert all(run.error is None for run in runs)
    assert len(list(pairs(Toy, base, ["cancel"], sample=7))) == 7


def test_an_injection_must_happen() -> None:
    with pytest.raises(Diverged, match="never reached"):
        play(Toy, seed=1, injections=[Injection(10_000, "cancel")])
    with pytest.raises(Diverged, match="failed"):
        play(Toy, seed=1, injections=[Injection(1, "no such thing")])
    other = play(lambda: Toy(leaky=True), seed=1)
    with pytest.raises(Diverged, match="not the run"):
        play(Toy, seed=1, injections=[Injection(8, "cancel")], plan=other)


def test_injection_as_text() -> None:
    assert Injection.parse("rst@57") == Injection(57, "rst")
    assert str(Injection(57, "rst")) == "rst@57"
