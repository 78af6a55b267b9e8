"""``scripts/soak``: hours in minutes. Mixed clients against a server in a process of its own; fails on any drift.

    server process   ◀── real sockets ──   crowd (soak_clients.py): good, slow, stalled, aborting, hostile
        │  /metrics, /proc, probe (soak_probe.py)
        ▼
    samples, once a second ──▶ checks ──▶ DIR/NAME.json, DIR/NAME.png

What is checked, when the crowd has gone and the server has had a moment:

1. Every good and slow client got a whole answer, or a refusal that it may expect.
2. No slot is taken, lost or waited for; tasks, threads and descriptors are as many as before, when a few requests had been served.
3. Memory is flat: the median of the last fifth is not above that of the second fifth by more than 3 % or 4 MiB.
4. At most one token was made after each disconnect (where no work must drain).
5. Nothing is in the log at level warning or above.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.soak_clients import Broken, Crowd  # noqa: E402
from scripts.soak_probe import FILE  # noqa: E402
from trio_sse.evidence.client import ask  # noqa: E402
from trio_sse.evidence.lock import alone  # noqa: E402
from trio_sse.evidence.process import Server  # noqa: E402

# Short deadlines, so that what ends by them ends often.
COMMON = ("--log-level", "warning", "--write-timeout", "2", "--heartbeat", "0.5", "--header-timeout", "2", "--body-timeout", "2", "--lab")
COLUMNS = (("memory_mib", "resident memory, MiB"), ("descriptors", "descriptors"), ("threads", "threads"), ("tasks", "trio tasks"),
           ("running", "slots taken"), ("waiting", "requests waiting"))  # fmt: skip
SETTLE = 12.0  # seconds after which idle worker threads have ended
QUIET = 30.0  # seconds in which everything must be as before


@dataclass
class Kind:
    """A backend to be soaked: how long or how much, and how hard."""

    factory: str
    seconds: float
    requests: int
    workers: int
    tokens: int
    options: tuple[str, ...]
    lab: bool


KINDS = {
    "scripted": Kind("scripted", 300.0, 10**9, 80, 40, ("--queue", "64", "--events-slots", "16"), lab=True),
    "model": Kind("model", 1200.0, 500, 10, 16, ("--queue", "16"), lab=False),
}


@dataclass
class Soak:
    """One soak: its samples, and what is wrong."""

    kind: Kind
    samples: list[dict[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    crowd: Crowd | None = None
    seconds: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)


def read_metrics(address: tuple[str, int]) -> dict[str, float]:
    status, page = ask(address, "GET", "/metrics")
    if status != 200:
        raise RuntimeError(f"/metrics: {status}")
    lines = [line.rsplit(" ", 1) for line in page.decode().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def total(metrics: dict[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


def take_sample(server: Server, probe: Path, begin: float) -> dict[str, float]:
    metrics = read_metrics(server.address)
    lines = probe.read_text().splitlines()
    inside = json.loads(lines[-1]) if lines else {"tasks": 0, "threads": 0}
    return {
        "at": round(time.monotonic() - begin, 2),
        "memory_mib": round((server.memory()[0] or 0) / 2**20, 2),
        "descriptors": len(os.listdir(server._proc("fd"))),  # noqa: PTH208, SLF001
        "threads": len(os.listdir(server._proc("task"))),  # noqa: PTH208, SLF001
        "tasks": inside["tasks"],
        "running": total(metrics, "trio_sse_requests_running"),
        "waiting": total(metrics, "trio_sse_requests_waiting"),
        "lost": total(metrics, "trio_sse_slots_lost"),
    }


async def watch(server: Server, probe: Path, soak: Soak, begin: float) -> None:
    """Takes a sample each second, and says every ten how it goes."""
    while True:
        sample = await trio.to_thread.run_sync(take_sample, server, probe, begin)
        soak.samples.append(sample)
        if soak.crowd is not None and len(soak.samples) % 10 == 0:
            gauges = ", ".join(f"{name} {sample[name]:g}" for name, _ in COLUMNS)
            print(f"{sample['at']:5.0f} s: {soak.crowd.requests} requests; {gauges}", flush=True)
        await trio.sleep(1)


async def warm(server: Server, kind: Kind) -> None:
    """What is made once and kept (thread pools, caches) is made before the first sample."""
    crowd = Crowd(server.address, tokens=kind.tokens, lab=False, seed=0)
    async with trio.open_nursery() as workers:
        for _ in range(kind.workers):
            workers.start_soon(crowd.work, 4 * kind.workers)


async def make_noise(server: Server, probe: Path, soak: Soak, begin: float, seed: int) -> None:
    kind = soak.kind
    soak.crowd = crowd = Crowd(server.address, tokens=kind.tokens, lab=kind.lab, seed=seed)

    async def worker() -> None:
        try:
            await crowd.work(kind.requests)
        except Broken as error:
            soak.problems.append(str(error))

    with trio.move_on_after(kind.seconds):
        async with trio.open_nursery() as watching:
            watching.start_soon(watch, server, probe, soak, begin)
            async with trio.open_nursery() as workers:
                for _ in range(kind.workers):
                    workers.start_soon(worker)
            watching.cancel_scope.cancel()


def quieten(server: Server, probe: Path, begin: float, before: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """Waits until everything is as it was; what is not in the end, is said."""
    until = time.monotonic() + QUIET
    names = ("descriptors", "threads", "tasks", "running", "waiting", "lost")
    while True:
        time.sleep(1)
        sample = take_sample(server, probe, begin)
        different = [f"{name}: {before[name]:g} before, {sample[name]:g} after" for name in names if sample[name] > before[name]]
        if not different or time.monotonic() > until:
            return sample, different


def check_memory(samples: list[dict[str, float]]) -> list[str]:
    fifth = len(samples) // 5
    if fifth < 3:
        return ["too few samples to judge the memory"]
    early = statistics.median(sample["memory_mib"] for sample in samples[fifth : 2 * fifth])
    late = statistics.median(sample["memory_mib"] for sample in samples[-fifth:])
    limit = max(early * 1.03, early + 4)
    return [] if late <= limit else [f"memory: {early:.1f} MiB early, {late:.1f} MiB late"]


def check_log(printed: str) -> list[str]:
    """Only the lines that say that it listens and is ready."""
    expected = re.compile(r"trio_sse: (listening on|ready|shutting down)")
    return [f"log: {line}" for line in printed.splitlines() if line.strip() and not expected.match(line)][:20]


def check_tokens(soak: Soak) -> list[str]:
    late = total(soak.counters, "trio_sse_tokens_after_disconnect_total")
    left = sum(value for key, value in soak.counters.items() if 'outcome="client_' in key)
    return [f"{late:g} tokens after {left:g} disconnects"] if late > left and not soak.kind.lab else []


def run(kind: Kind, seed: int) -> Soak:
    soak = Soak(kind)
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe"
        probe.touch()
        os.environ[FILE] = str(probe)
        with Server(("--backend", f"scripts.soak_probe:{kind.factory}", *COMMON, *kind.options)) as server:
            trio.run(warm, server, kind)
            time.sleep(SETTLE)
            begin = time.monotonic()
            before = take_sample(server, probe, begin)
            soak.samples.append(before)
            trio.run(make_noise, server, probe, soak, begin, seed)
            soak.seconds = time.monotonic() - begin
            after, different = quieten(server, probe, begin, before)
            soak.problems += different + check_memory(soak.samples)
            soak.samples.append(after)
            soak.counters = read_metrics(server.address)
            soak.problems += check_log(server.printed())
            soak.problems += check_tokens(soak)
    return soak


def summary(name: str, soak: Soak, seed: int) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    for key, value in soak.counters.items():
        match = re.fullmatch(r'trio_sse_requests_total\{outcome="(\w+)",route="([^"]+)"\}', key)
        if match:
            outcomes[match[1]] += int(value)
    assert soak.crowd is not None
    return {
        "name": name,
        "seed": seed,
        "seconds": round(soak.seconds),
        "workers": soak.kind.workers,
        "requests": soak.crowd.requests,
        "aborted_by_the_client": soak.crowd.aborted,
        "clients": dict(sorted(soak.crowd.results.items())),
        "outcomes": dict(sorted(outcomes.items())),
        "tokens_generated": total(soak.counters, "trio_sse_generation_tokens_total"),
        "tokens_after_disconnect": total(soak.counters, "trio_sse_tokens_after_disconnect_total"),
        "before": soak.samples[0],
        "after": soak.samples[-1],
        "most": {column: max(sample[column] for sample in soak.samples) for column, _ in COLUMNS},
        "problems": soak.problems,
        "samples": soak.samples,
    }


def plot(numbers: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(COLUMNS), 1, figsize=(9, 11), sharex=True)
    times = [sample["at"] for sample in numbers["samples"]]
    for axis, (column, title) in zip(axes, COLUMNS, strict=True):
        values = [sample[column] for sample in numbers["samples"]]
        axis.plot(times, values, linewidth=0.9)
        axis.set_ylabel(title, fontsize=8)
        axis.set_ylim(0, 1.15 * max(values) or 1)
        axis.grid(alpha=0.3)
    given_up = f"{numbers['aborted_by_the_client']} given up by the client"
    axes[0].set_title(f"{numbers['name']}: {numbers['requests']} requests in {numbers['seconds']} s, {given_up}")
    axes[-1].set_xlabel("seconds; the last sample is after the crowd has gone")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    what = "Mixed clients against a server in its own process; fails on any drift."
    parser = argparse.ArgumentParser(prog="scripts/soak", description=what)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)} (default: both)")
    parser.add_argument("--seconds", type=float, metavar="S", help="longest time for each (default: scripted 300)")
    parser.add_argument("--requests", type=int, metavar="N", help="stop after so many (default: model 500)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path, default=ROOT / "evidence" / "soak", metavar="DIR", help="where plots and numbers go")
    options = parser.parse_args()
    for name in options.kinds:
        if name not in KINDS:
            parser.error(f"{name}: must be {' or '.join(KINDS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in options.kinds or KINDS:
        kind = KINDS[name]
        kind.seconds = options.seconds or kind.seconds
        kind.requests = options.requests or kind.requests
        with alone():
            soak = run(kind, options.seed)
        numbers = summary(name, soak, options.seed)
        (options.out / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
        plot(numbers, options.out / f"{name}.png")
        shown = {key: value for key, value in numbers.items() if key != "samples"}
        print(json.dumps(shown, indent=1), flush=True)
        failed = failed or bool(soak.problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
