#!/usr/bin/env python3
"""scripts/bench_transport.py: trio_sse beside the servers people would pick instead, in one interleaved run.

Every server is one process on one core, the client (scripts/bench/load.c) is on another. All of them run at the same time and are
measured one after the other, round after round, so that whatever else the machine does falls on all alike; what counts is the ratio
to uvicorn + Starlette within the same round, and of that the median over the rounds. Writes transport.json, transport.md and
transport.svg into evidence/bench/. With --profile: where trio_sse's own time and memory go, into profile.md there.

Rules:

1. A measurement is a window in the middle of steady work: opening connections and ending them is outside, unless it is what is measured.
2. Processor time counts from the kernel's own account of each thread. Events per second need a machine that has nothing else to do;
   processor time per event is to be trusted on a busy one too, and the table says how long each server was kept from its core.
3. The client checks every answer: its status, and its number of events. A server that fails a case has no figures in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "scripts" / "bench"
PYTHON = ROOT / ".venv" / "bin" / "python"
PEERS = ROOT / ".venv-bench"
SERVERS = ("trio_sse", "uvicorn", "sse-starlette", "uvicorn-h11", "hypercorn-trio", "aiohttp", "granian", "raw")
IDLE = 2000
PROFILED = 8.0  # seconds of a window in which samples are taken
UNPACED = ("stream", "short", "open")  # loads whose work does not come in step with the tick that takes the samples
ANSWER = 301  # events of a whole answer: 300 and [DONE]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
      name: on the command line and in the table.
      mode: what the servers are asked for (workload.py).
      load: how the client goes about it (load.c).
      connections: how many at a time.
      figures: what of a measurement is shown; the first one is the one that is drawn.
      events: what each answer must have; 0: not looked at.
      seconds: length of the window.
      idle: streams that wait meanwhile.
      growth: a point of a curve rather than one of the figures that are aimed at; has one round.
    """

    name: str
    mode: str
    load: str
    connections: int
    figures: tuple[str, ...]
    events: int = 0
    seconds: float = 0.7
    idle: int = 0
    growth: bool = False


_STREAM = ("events_per_second", "cpu_us_per_event")
_PACED = ("cpu_us_per_event", "late_p50", "late_p99", "delivered")
_SHORT = ("answers_per_second", "cpu_us_per_answer")
_IDLE = ("kib_per_stream", "opened_per_second")


def _cases() -> tuple[Case, ...]:
    # A window must be long beside one answer of all connections: some servers make them one after the other.
    window = {1: 0.7, 16: 0.7, 128: 1.2, 512: 2.5, 2000: 6}
    cases = [Case(f"{mode}-{n}", mode, "stream", n, _STREAM, ANSWER, window[n]) for mode in ("drain", "yield") for n in (1, 16, 128)]
    cases += [Case(f"paced-{n}-{mode}", mode, "paced", n, _PACED, seconds=2) for n in (64, 512) for mode in ("aligned", "staggered")]
    cases += [
        Case("short-16", "health", "short", 16, _SHORT),
        Case("open-16", "idle", "open", 16, _SHORT),
        Case("idle-2000", "idle", "hold", IDLE, _IDLE),
        Case("paced-64-crowd", "staggered", "paced", 64, _PACED, seconds=2, idle=IDLE),
        Case("open-16-crowd", "idle", "open", 16, _SHORT, idle=IDLE),
    ]
    cases += [
        Case(f"{mode}-{n}", mode, "stream", n, _STREAM, ANSWER, window[n], growth=True) for mode in ("drain", "yield") for n in (512, 2000)
    ]
    cases += [Case(f"paced-{n}-staggered", "staggered", "paced", n, _PACED, seconds=2, growth=True) for n in (1, 16)]
    cases += [Case(f"paced-{IDLE}-slow", "slow", "paced", IDLE, _PACED, seconds=2, growth=True)]
    cases += [Case(f"short-{n}", "health", "short", n, _SHORT, growth=True) for n in (1, 128, 512, 2000)]
    cases += [Case(f"open-{n}", "idle", "open", n, _SHORT, growth=True) for n in (1, 128)]
    cases += [Case(f"idle-{n}", "idle", "hold", n, _IDLE, growth=True) for n in (128, 512)]
    return tuple(cases)


CASES = _cases()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures trio_sse beside other servers.")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round, without the curves")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="this case; a prefix will do; repeatable")
    parser.add_argument("--servers", default=",".join(SERVERS), metavar="A,B", help="these servers (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "evidence" / "bench", metavar="DIR", help="(default: evidence/bench)")
    parser.add_argument("--profile", action="store_true", help="where trio_sse's time and memory go instead, into profile.md")
    parser.add_argument("--list", action="store_true", help="name the cases")
    given = parser.parse_args()
    if given.list:
        print("\n".join(case.name for case in CASES))
        return
    names = given.servers.split(",")
    if unknown := set(names) - set(SERVERS):
        parser.error(f"--servers: unknown: {', '.join(sorted(unknown))}")
    cases = [case for case in CASES if any(case.name.startswith(prefix) for prefix in given.only or [""])]
    if given.quick:
        cases = [case for case in cases if given.only or not case.growth]
    versions = _set_up()
    sys.path[:0] = [str(HERE), str(ROOT)]
    import report

    from trio_sse.evidence.environment import describe
    from trio_sse.evidence.lock import alone

    given.out.mkdir(parents=True, exist_ok=True)
    if given.profile:
        with alone():
            times = profile_time([case for case in cases if case.load in UNPACED])
            memory = profile_memory([case for case in cases if case.load == "hold"])
            print(report.write_profile(given.out, versions, describe(), times, memory))
        return
    with alone():
        facts: dict[str, Any] = {"servers": names, "versions": versions, "load": round(os.getloadavg()[0], 1), "machine": describe()}
        runs: Runs = {case.name: {name: [] for name in names} for case in cases}
        # A run that is ended early tells what it has measured by then, and its servers end with it.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            measure_all(names, cases, 1 if given.quick else given.runs, runs)
    cases = [case for case in cases if all(runs[case.name].values())]
    for case in cases:
        whole = min(map(len, runs[case.name].values()))
        runs[case.name] = {name: measured[:whole] for name, measured in runs[case.name].items()}
    print(report.write(given.out, facts, cases, runs))


# ---- Set-up ----


def _set_up() -> dict[str, str]:
    """Goes on in .venv, with the peers in a place of their own; returns what is installed there."""
    if Path(sys.executable) != PYTHON:
        subprocess.run([str(ROOT / "scripts" / "setup"), "test"], check=True)
        os.execv(PYTHON, [str(PYTHON), *sys.argv])  # noqa: S606
    lock, stamp = HERE / "requirements.lock", PEERS / "stamp"
    if not stamp.exists() or stamp.read_bytes() != lock.read_bytes():
        print("installing the peers", flush=True)
        shutil.rmtree(PEERS, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        subprocess.run([str(PEERS / "bin/pip"), "install", "-q", "--no-deps", "-r", str(lock)], check=True)
        stamp.write_bytes(lock.read_bytes())
    wanted = ("uvicorn", "starlette", "sse-starlette", "hypercorn", "aiohttp", "granian", "uvloop", "httptools", "h11", "trio")
    pins = dict(line.lower().split("==") for line in lock.read_text().split())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return {"python": sys.version.split()[0], **{name: pins[name] for name in wanted}}


# ---- Measuring ----

# Case → server → one measurement per round.
Runs = dict[str, dict[str, list[dict[str, float]]]]


def measure_all(names: list[str], cases: list[Case], rounds: int, runs: Runs) -> None:
    """Runs every case on every server, interleaved; adds what it measures to ``runs``."""
    from processes import Client, Failed, Server

    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the server, one for the client")
    os.sched_setaffinity(0, cores[1:])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        client = Client(Path(folder), core=cores[1])
        running = {name: stack.enter_context(Server(name, cores[0])) for name in names}
        for case in cases:
            for number in range(1 if case.growth else rounds):
                for name in names:
                    try:
                        if not all(runs[case.name][name]):
                            result = {}  # it has failed before, and would again
                        elif case.load == "hold":  # memory that was used before would hide what is used now
                            with Server(name, cores[0]) as fresh:
                                result = _hold(fresh, client, case)
                        else:
                            result = _measure(running[name], client, case)
                    except Failed as failure:
                        print(failure, flush=True)
                        result = {}
                    runs[case.name][name].append(result)
                told = ", ".join(f"{name} {runs[case.name][name][-1].get(case.figures[0], float('nan')):.4g}" for name in names)
                print(f"{case.name} {number + 1}: {case.figures[0]}: {told}", flush=True)


def profile_time(cases: list[Case]) -> dict[str, tuple[str, float, dict[str, int]]]:
    """Case → the figure that tells its cost, that figure, and how often which function was running (scripts/bench/sampler.py)."""
    from processes import OURS, Client, Server

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:])
    found = {}
    with tempfile.TemporaryDirectory() as folder, Server(OURS, cores[0], Path(folder) / "profile") as server:
        client = Client(Path(folder), core=cores[-1])
        for case in cases:
            server.profiled()
            cost = next(figure for figure in case.figures if figure.startswith("cpu"))
            measured = _measure(server, client, replace(case, seconds=PROFILED))
            found[case.name] = cost, measured[cost], server.profiled()
            print(f"{case.name}: {cost}: {measured[cost]:.4g}", flush=True)
    return found


def profile_memory(cases: list[Case]) -> dict[str, tuple[int, dict[str, int]]]:
    """Case → its streams, and the bytes that each module has taken while they were open (scripts/bench/sampler.py)."""
    from processes import OURS, Client, Server

    cores = sorted(os.sched_getaffinity(0))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        client = Client(Path(folder), core=cores[-1])
        for case in cases:
            with Server(OURS, cores[0], Path(folder) / "profile", "MEMORY") as server:
                _warm(server, client, case)
                before = server.profiled()
                with client.running(server, case.mode, "hold", case.connections, 0, 0) as measuring:
                    measuring.result()
                    after = server.profiled()
            found[case.name] = case.connections, {module: held - before.get(module, 0) for module, held in after.items()}
            print(f"{case.name}: {sum(found[case.name][1].values()) / 1024 / case.connections:.4g} KiB a stream", flush=True)
    return found


def _measure(server: Any, client: Any, case: Case) -> dict[str, float]:
    server.settle()
    idle = client.running(server, "idle", "hold", case.idle, 0, 0) if case.idle else contextlib.nullcontext()
    with idle, client.running(server, case.mode, case.load, case.connections, case.seconds, case.events) as measuring:
        used, waited = server.cpu()
        result: dict[str, float] = measuring.result()
        used_after, waited_after = server.cpu()
    used, waited = used_after - used, waited_after - waited
    seconds = result["seconds"]
    result |= {"server_busy": used / seconds, "server_waited": waited / seconds, "client_busy": result["client_cpu"] / seconds}
    for what in ("event", "answer"):
        result[f"{what}s_per_second"] = result[f"{what}s"] / seconds
        result[f"cpu_us_per_{what}"] = used / result[f"{what}s"] * 1e6 if result[f"{what}s"] else float("nan")
    if case.load == "paced":
        from workload import INTERVALS

        result["delivered"] = result["events_per_second"] * INTERVALS[case.mode][0] / case.connections
    return result


def _hold(server: Any, client: Any, case: Case) -> dict[str, float]:
    _warm(server, client, case)
    before = server.memory()
    with client.running(server, case.mode, "hold", case.connections, 0, 0) as measuring:
        result: dict[str, float] = measuring.result()
        result["kib_per_stream"] = (server.memory() - before) / 1024 / case.connections
    result["opened_per_second"] = case.connections / result["seconds"]
    return result


def _warm(server: Any, client: Any, case: Case) -> None:
    """The first streams load what is loaded once."""
    with client.running(server, case.mode, "stream", 4, 0.1, 0) as measuring:
        measuring.result()
    server.settle()


if __name__ == "__main__":
    main()
