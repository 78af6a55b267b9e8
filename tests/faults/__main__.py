"""``scripts/enumerate``: plays the whole enumeration, or one run of it again."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

from tests.faults.faults import FAULTS
from tests.faults.harness import Injection
from tests.faults.scenarios import SCENARIOS
from tests.faults.sweep import FIXED, Tally, reproduce, sweep
from tests.faults.variants import VARIANTS

Job = tuple[str, int, int, int | None, str | None]  # scenario, seed, stride, pairs, variant


def main() -> int:
    options = parse()
    if options.inject:
        return again(options)
    seeds = options.seed or list(range(1, options.seeds + 1))
    stride, pairs = options.stride, options.pairs
    if options.fixed:
        seeds, stride, pairs = list(FIXED.seeds), FIXED.stride, FIXED.pairs
    jobs: list[Job] = [(name, seed, stride, pairs, options.variant) for seed in seeds for name in options.scenario or SCENARIOS]
    begin = time.monotonic()
    totals = {name: Tally() for name, *_ in jobs}
    with multiprocessing.Pool(options.jobs) as pool:
        for done, (name, tally) in enumerate(pool.imap_unordered(work, jobs), start=1):
            totals[name].add(tally)
            print(f"[{done}/{len(jobs)} after {time.monotonic() - begin:.0f} s] {name}: {tally}", flush=True)
            for line in tally.failures:
                print(line, flush=True)
    return report(options, seeds, totals, time.monotonic() - begin)


def parse() -> argparse.Namespace:
    what = "Injects every fault at every scheduling point of every scenario."
    parser = argparse.ArgumentParser(prog="scripts/enumerate", description=what)
    just = "play just this run (needs --scenario and --seed)"
    parser.add_argument("inject", nargs="*", type=Injection.parse, metavar="FAULT@POINT", help=just)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, metavar="NAME", help="only this one (repeatable; default: all)")
    parser.add_argument("--seed", action="append", type=int, metavar="N", help="this schedule (repeatable)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="so many schedules (default: %(default)s)")
    parser.add_argument("--stride", type=int, default=1, metavar="N", help="one in so many single faults (default: %(default)s, all)")
    how_many = "pairs of faults for each scenario and seed, or all (default: %(default)s)"
    parser.add_argument("--pairs", type=pair_count, default=300, metavar="N", help=how_many)
    parser.add_argument("--fixed", action="store_true", help="the part that the test suite plays")
    parser.add_argument("--variant", choices=VARIANTS, metavar="NAME", help="break the server in this way first")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the counts there as JSON")
    parser.add_argument("--list", action="store_true", help="list scenarios, faults and variants")
    options = parser.parse_args()
    if options.list:
        for title, names in (("scenarios", SCENARIOS), ("faults", FAULTS), ("variants", VARIANTS)):
            print(f"{title}: {', '.join(names)}")
        sys.exit(0)
    if options.inject and (len(options.scenario or []) != 1 or len(options.seed or []) != 1):
        parser.error("FAULT@POINT needs one --scenario and one --seed")
    for injection in options.inject:
        if injection.fault not in FAULTS:
            parser.error(f"no such fault: {injection.fault}")
    return options


def pair_count(text: str) -> int | None:
    return None if text == "all" else int(text)


def work(job: Job) -> tuple[str, Tally]:
    name, seed, stride, pairs, variant = job
    return name, sweep(name, seed, stride=stride, pair_sample=pairs, variant=VARIANTS[variant] if variant else nullcontext)


def again(options: argparse.Namespace) -> int:
    """One run, with its traceback."""
    variant = VARIANTS[options.variant] if options.variant else nullcontext
    run = reproduce(options.scenario[0], options.seed[0], options.inject, variant)
    for injection in options.inject:
        print(f"{injection} is {run.points[injection.point]}")
    if run.error is None:
        print("passed")
        return 0
    traceback.print_exception(run.error)
    return 1


def report(options: argparse.Namespace, seeds: list[int], totals: dict[str, Tally], seconds: float) -> int:
    tally = Tally()
    for each in totals.values():
        tally.add(each)
    print(f"{len(totals)} scenarios × {len(FAULTS)} faults × {len(seeds)} seeds: {tally} in {seconds:.0f} s")
    if options.out is not None:
        numbers = {
            "scenarios": len(totals),
            "faults": len(FAULTS),
            "seeds": seeds,
            "points": tally.points,
            "single_faults": tally.singles,
            "pairs": tally.pairs,
            "failures": tally.failures,
            "seconds": round(seconds),
            "by_scenario": {name: {"points": each.points, "singles": each.singles, "pairs": each.pairs} for name, each in totals.items()},
        }
        options.out.write_text(json.dumps(numbers, indent=1) + "\n")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
