"""Every scheduling point, every fault: SQLite's way of testing, for structured concurrency.

SQLite fails the first allocation, then the second, until a run completes. Here a *scene* is played once and its scheduling points are
counted; then it is played again for each of them, and exactly there one fault is injected: a cancellation, a reset, whatever the scene
knows how to do. Nothing here knows what is tested: trio alone is imported, and the module can be lifted out as it is.

    class MyScene(Scene):
        async def run(self, watch):
            async with trio.open_nursery() as nursery:
                watch(nursery)                      # its tasks' steps are the points
                ...                                 # play, then assert the invariants: whatever is raised is a finding
        def inject(self, fault):                    # synchronous: cancel a scope, set an event, close a stream
            ...

    base = play(MyScene, seed=1)
    for injection in singles(base, faults=["cancel", "reset"]):
        run = play(MyScene, seed=1, injections=[injection])
        assert run.error is None, run

Rules:

1. A point is the moment before a watched task steps, and the moment after a step where the loop goes to sleep next: between two steps
   of one batch these are the same moment. Points are numbered from 0; ``reset@57`` names one.
2. Runs are deterministic: the clock is a MockClock that jumps, and trio's shuffling of each batch is seeded. That seed is the one thing
   here that has no public name; a test tool may reach for it, a program may not.
3. A run is compared with the one it was planned from: up to the injection both must have the same points, or the plan is void and
   :exc:`Diverged` says so. An injection that did not happen is an error too.
4. For a pair of faults the points of the second are counted in the run that already holds the first.
5. Faults are injected from ``before_task_step`` and ``after_task_step``, where cancelling, closing and setting events are safe; never
   from ``before_io_wait``. A hook that raises is dropped by trio and the run goes on, so that hooks here never raise.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import outcome
import trio
import trio._core._run as trio_run
import trio.testing

__all__ = ["Abandoned", "Diverged", "Injection", "Run", "Scene", "dismantle", "pairs", "play", "singles", "tasks_below"]


class Diverged(RuntimeError):
    """A run was not the one that it was planned from, or an injection did not happen."""


class Abandoned(BaseException):
    """Thrown into tasks that nothing else can end, so that a run that has failed comes to its end."""


@dataclass(frozen=True, slots=True)
class Injection:
    point: int
    fault: str

    def __str__(self) -> str:
        return f"{self.fault}@{self.point}"

    @classmethod
    def parse(cls, text: str) -> Injection:
        fault, _, point = text.rpartition("@")
        return cls(int(point), fault)


class Scene(ABC):
    """One run of what is tested. Made anew for every run.

    ``over``: set by the scene when what follows is no longer part of what faults are injected into.
    """

    over = False

    @abstractmethod
    async def run(self, watch: Callable[[trio.Nursery], None]) -> None:
        """Plays the scene, and raises if an invariant is broken. ``watch(nursery)``: its tasks, and all below, have the points."""

    @abstractmethod
    def inject(self, fault: str) -> None:
        """Does ``fault`` now. Synchronous, and always succeeds: a fault that has nothing to act on does nothing."""


@dataclass(slots=True)
class Run:
    """What one run was.

    Attributes:
      points: for each point, whose step it is before or after.
      useful: the points worth an injection (rule 1).
      error: what was raised: a broken invariant, as a rule.
    """

    seed: int
    injections: tuple[Injection, ...]
    points: list[str] = field(default_factory=list)
    useful: list[int] = field(default_factory=list)
    error: BaseException | None = None

    def __str__(self) -> str:
        """The one line that reproduces it, as arguments."""
        return " ".join([f"--seed {self.seed}", *map(str, self.injections)])


class _Instrument(trio.abc.Instrument):
    def __init__(self, scene: Scene, run: Run) -> None:
        self._scene = scene
        self._run = run
        self._due = sorted(run.injections, key=lambda each: each.point)  # at one point: in the order given
        self._nurseries: list[trio.Nursery] = []
        self._watched: dict[trio.lowlevel.Task, bool] = {}
        self._after = False  # the last thing that happened is a watched task's step
        self.error: BaseException | None = None

    def watch(self, nursery: trio.Nursery) -> None:
        self._nurseries.append(nursery)

    @property
    def missed(self) -> list[Injection]:
        return self._due

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._after = False
        if self._is_watched(task) and not self._scene.over:
            self._run.useful.append(len(self._run.points))
            self._point("before", task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._is_watched(task) and not self._scene.over:
            self._after = True
            self._point("after", task)

    def before_io_wait(self, timeout: float) -> None:
        if self._after:
            self._run.useful.append(len(self._run.points) - 1)
            self._after = False

    def _point(self, edge: str, task: trio.lowlevel.Task) -> None:
        number = len(self._run.points)
        self._run.points.append(f"{edge} {task.name}")
        while self._due and self._due[0].point == number:
            injection = self._due.pop(0)
            try:
                self._scene.inject(injection.fault)
            except BaseException as error:  # noqa: BLE001, ASYNC103  (rule 5; play() raises it)
                self.error = error

    def _is_watched(self, task: trio.lowlevel.Task) -> bool:
        known = self._watched.get(task)
        if known is None:
            nursery = task.parent_nursery
            if nursery is None or not self._nurseries:
                return False
            known = self._watched[task] = nursery in self._nurseries or self._is_watched(nursery.parent_task)
        return known


def play(make: Callable[[], Scene], *, seed: int = 0, injections: Iterable[Injection] = (), plan: Run | None = None) -> Run:
    """Plays one run.

    Args:
      make: makes the scene.
      seed: of the order in which tasks that are ready at the same time step.
      injections: what to inject, and where.
      plan: the run in which the last injection's point was counted.
    """
    injections = tuple(injections)
    run = Run(seed, injections)
    scene = make()
    instrument = _Instrument(scene, run)
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    state = trio_run._r.getstate()
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio_run._r.seed(seed)
    try:
        trio.run(scene.run, instrument.watch, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[instrument])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: ASYNC103, BLE001  (a finding, and no trio here)
        run.error = error
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        trio_run._r.setstate(state)
    if instrument.error is not None:
        raise Diverged(f"{run}: the injection failed") from instrument.error
    if instrument.missed:
        raise Diverged(f"{run}: {instrument.missed[0]} was never reached") from run.error
    if plan is not None:
        last = injections[-1].point + 1
        if run.points[:last] != plan.points[:last]:
            raise Diverged(f"{run}: not the run that it was planned from")
    return run


def singles(base: Run, faults: Sequence[str]) -> Iterator[Injection]:
    """Every fault at every point of ``base``."""
    for point in base.useful:
        for fault in faults:
            yield Injection(point, fault)


def pairs(
    make: Callable[[], Scene], base: Run, faults: Sequence[str], *, sample: int | None = None, rng: random.Random | None = None
) -> Iterator[Run]:
    """Plays pairs of faults, in both orders: for every first one, every second one at every later point (or at the same).

    Args:
      sample: so many of all (first fault, point) × (second fault, point), chosen by ``rng``; None is all of them.

    Yields each run, the first fault's own included where ``sample`` is None.
    """
    if sample is None:
        for first in singles(base, faults):
            run = play(make, seed=base.seed, injections=[first], plan=base)
            yield run
            for second in singles(run, faults):
                if second.point >= first.point:
                    yield play(make, seed=base.seed, injections=[first, second], plan=run)
        return
    rng = rng or random.Random(base.seed)
    for _ in range(sample):
        first = Injection(rng.choice(base.useful), rng.choice(faults))
        run = play(make, seed=base.seed, injections=[first], plan=base)
        later = [point for point in run.useful if point >= first.point]
        second = Injection(rng.choice(later), rng.choice(faults))
        yield play(make, seed=base.seed, injections=[first, second], plan=run)


# For scenes


def tasks_below(task: trio.lowlevel.Task | None = None) -> list[trio.lowlevel.Task]:
    """All tasks below ``task``; by default all there are, trio's own and the caller included."""
    task = task or trio.lowlevel.current_root_task()
    assert task is not None
    found: list[trio.lowlevel.Task] = []
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            found += [child, *tasks_below(child)]
    return found


async def dismantle(nursery: trio.Nursery, patience: float = 1000.0) -> None:
    """Ends what is left in ``nursery`` after a failure: cancels it, and throws :exc:`Abandoned` into whatever is deaf to that."""
    nursery.cancel_scope.cancel()
    for _ in range(20):
        with trio.move_on_after(patience):
            while nursery.child_tasks:  # noqa: ASYNC110  (a nursery has no event for it)
                await trio.sleep(patience / 10)
            return
        await trio.testing.wait_all_tasks_blocked()
        for task in [each for child in nursery.child_tasks for each in (child, *tasks_below(child))]:
            if not any(own.child_tasks for own in task.child_nurseries):
                trio.lowlevel.reschedule(task, outcome.Error(Abandoned()))
