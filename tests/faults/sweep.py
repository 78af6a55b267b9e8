"""Sweeps: how much of scenarios × seeds × points × faults is played, and what is printed of it."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tests.faults.faults import FAULTS
from tests.faults.harness import Injection, Run, pairs, play, singles
from tests.faults.scenarios import SCENARIOS
from tests.faults.scene import ServerScene
from tests.faults.wire import Reply

__all__ = ["FIXED", "Fixed", "Tally", "reproduce", "sweep"]



@dataclass(frozen=True)
class Fixed:
    """The part that every run of the test suite plays; all of it is always the same."""

    seeds: tuple[int, ...] = (1, 2)
    stride: int = 9
    pairs: int = 45


FIXED = Fixed()
Variant = Callable[[], AbstractContextManager[Any]]


@dataclass
class Tally:
    """What was played, and what was found: one line for each failure, which reproduces it and says why."""

    points: int = 0
    singles: int = 0
    pairs: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.points += other.points
        self.singles += other.singles
        self.pairs += other.pairs
        self.failures += other.failures

    @property
    def runs(self) -> int:
        return self.singles + self.pairs

    def __str__(self) -> str:
        return f"{self.points} points, {self.singles} single faults, {self.pairs} pairs, {len(self.failures)} failures"


class _Maker:
    """Makes scenes of one scenario; keeps what the run without faults sent, for the others to be compared with."""

    def __init__(self, name: str, variant: Variant) -> None:
        self.name = name
        self._variant = variant
        self._whole: list[Reply] | None = None
        self._scene: ServerScene | None = None

    def __call__(self) -> ServerScene:
        self._scene = ServerScene(SCENARIOS[self.name], self._whole, self._variant)
        return self._scene

    def base(self, seed: int) -> Run:
        run = play(self, seed=seed)
        assert self._scene is not None
        self._whole = self._scene.replies
        return run


def sweep(
    name: str,
    seed: int,
    *,
    faults: Sequence[str] = tuple(FAULTS),
    stride: int = 1,
    pair_sample: int | None = 0,
    variant: Variant = nullcontext,
    enough: Callable[[str], bool] = lambda _: False,
) -> Tally:
    """Plays one scenario under one seed.

    Args:
      stride: one in so many of all (point, fault), another choice for every seed; 1 is all.
      pair_sample: so many pairs; None is all.
      enough: asked of each failure's line; says whether to stop there.
    """
    make = _Maker(name, variant)
    tally = Tally()
    base = make.base(seed)
    tally.points = len(base.useful)
    if base.error is not None:
        tally.failures.append(line(name, base))
        return tally
    rng = random.Random(f"{name} {seed}")
    todo = list(singles(base, faults))
    if stride > 1:
        todo = sorted(rng.sample(todo, len(todo) // stride), key=lambda each: each.point)
    for injection in todo:
        run = play(make, seed=seed, injections=[injection], plan=base)
        tally.singles += 1
        if run.error is not None:
            tally.failures.append(line(name, run))
            if enough(tally.failures[-1]):
                return tally
    if pair_sample != 0:
        for run in pairs(make, base, faults, sample=pair_sample, rng=rng):
            tally.pairs += len(run.injections) == 2
            if run.error is not None and len(run.injections) == 2:
                tally.failures.append(line(name, run))
                if enough(tally.failures[-1]):
                    return tally
    return tally


def reproduce(name: str, seed: int, injections: Sequence[Injection], variant: Variant = nullcontext) -> Run:
    """Plays exactly one run again."""
    make = _Maker(name, variant)
    make.base(seed)
    return play(make, seed=seed, injections=injections)


def line(name: str, run: Run) -> str:
    """The one line that reproduces ``run``, and why it failed."""
    assert run.error is not None
    return f"scripts/enumerate --scenario {name} {run}   # {why(run.error)}"


def why(error: BaseException) -> str:
    """The innermost reason, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    where = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text or (where[-1].line if where else '')}"[:300]
