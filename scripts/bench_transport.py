#!/usr/bin/env python3
"""scripts/bench_transport.py: trio_sse beside the servers people would pick instead, in one interleaved run.

Every server is one process on one core, the client (scripts/bench/load.c) is on another. All of them run at the same time and are
measured one after the other, round after round, so that whatever else the machine does falls on all alike; what counts is the ratio
to uvicorn + Starlette within the same round, and of that the median over the rounds.

The cases:

    drain       300 events per answer, ready faster than the socket takes them, at 1, 16 and 128 connections: events per second
    yield       the same, the producer giving the event loop a turn before each event, at 16
    paced       50 events each, one every 20 ms, 64 and 512 streams fed by one engine task: CPU per event, lateness
    short       small JSON answers on kept-alive connections, at 16: answers per second
    idle        memory of one of 2,000 streams that have had an event and wait
    open        streams opened per second, each left after its first event; at 16, and at 16 beside 2,000 idle ones
    crowd       CPU per event of 64 paced streams beside 2,000 idle ones, over that without them

Writes transport.json, transport.md and transport.svg into evidence/bench/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trio_sse.evidence.lock import alone  # noqa: E402  (the script runs without the package installed)

HERE = ROOT / "scripts" / "bench"
PEERS_VENV = ROOT / ".venv-bench"
OURS = "trio_sse"
BASE = "uvicorn"
SERVERS = (OURS, BASE, "sse-starlette", "uvicorn-h11", "hypercorn-trio", "aiohttp", "granian", "raw")
IDLE = 2000
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """``value``: what of a measurement counts; ``better``: which way. ``idle``: streams that wait meanwhile."""

    name: str
    mode: str
    load: str
    connections: int
    count: int
    value: str
    better: str = "more"
    idle: int = 0


CASES = (
    Case("drain-1", "drain", "stream", 1, 60, "events_per_second"),
    Case("drain-16", "drain", "stream", 16, 6, "events_per_second"),
    Case("drain-128", "drain", "stream", 128, 1, "events_per_second"),
    Case("yield-16", "yield", "stream", 16, 4, "events_per_second"),
    Case("paced-64-aligned", "aligned", "paced", 64, 1, "cpu_us_per_event", "less"),
    Case("paced-64-staggered", "staggered", "paced", 64, 1, "cpu_us_per_event", "less"),
    Case("paced-512-aligned", "aligned", "paced", 512, 1, "cpu_us_per_event", "less"),
    Case("paced-512-staggered", "staggered", "paced", 512, 1, "cpu_us_per_event", "less"),
    Case("short-16", "health", "short", 16, 150, "answers_per_second"),
    Case("open-16", "drain", "open", 16, 800, "answers_per_second"),
    Case("idle-2000", "idle", "hold", IDLE, 1, "kib_per_stream", "less"),
    Case("open-16-crowd", "drain", "open", 16, 800, "answers_per_second", idle=IDLE),
    Case("paced-64-crowd", "staggered", "paced", 64, 1, "cpu_us_per_event", "less", idle=IDLE),
)


class Server:
    """One server process, pinned to a core."""

    def __init__(self, name: str, core: int) -> None:
        self.name = name
        self.port = _free_port()
        self._core = core
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115  (closed in __exit__)
        if name == OURS:
            command = [
                str(ROOT / ".venv/bin/python"), "-m", "trio_sse", "serve", "--backend", "backend:Bench", "--port", str(self.port),
                "--slots", "5000", "--max-connections", "5000", "--log-level", "warning",
            ]  # fmt: skip
        else:
            command = [str(PEERS_VENV / "bin/python"), "peers.py", name, str(self.port)]
        environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}
        self._process = subprocess.Popen(
            ["taskset", "-c", str(core), *command], cwd=HERE, env=environment, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                probe.sendall(_request("health"))
                if b" 200 " in probe.recv(4096):
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        self._log.seek(0)
        raise SystemExit(f"{self.name} did not start:\n{self._log.read()[-3000:]}")

    def _tree(self) -> list[int]:
        """The process and its descendants: some servers put a worker below a watcher."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        found = [self._process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def cpu(self) -> float:
        """Seconds of CPU used so far."""
        total = 0
        for pid in self._tree():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / TICK

    def memory(self) -> int:
        """Resident bytes."""
        total = 0
        for pid in self._tree():
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return total * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _request(mode: str) -> bytes:
    if mode == "health":
        return b"GET /healthz HTTP/1.1\r\nHost: bench\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n"
    body = json.dumps({"prompt": mode, "max_new_tokens": 256}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Load:
    """The compiled client."""

    def __init__(self, folder: Path, core: int) -> None:
        self._folder = folder
        self._core = core
        self._program = folder / "load"
        subprocess.run(["cc", "-O2", "-o", str(self._program), str(HERE / "load.c")], check=True)

    def _command(self, server: Server, mode: str, load: str, connections: int, count: int) -> list[str]:
        request = self._folder / mode
        request.write_bytes(_request(mode))
        return [
            "taskset", "-c", str(self._core), str(self._program), "127.0.0.1", str(server.port), load, str(connections), str(count),
            str(request),
        ]  # fmt: skip

    def run(self, server: Server, case: Case) -> dict[str, float]:
        done = subprocess.run(
            self._command(server, case.mode, case.load, case.connections, case.count), capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{server.name}, {case.name}: {done.stderr}")
        result: dict[str, float] = json.loads(done.stdout)
        return result

    @contextlib.contextmanager
    def hold(self, server: Server, streams: int) -> Iterator[None]:
        """``streams`` idle streams for the length of the block."""
        if not streams:
            yield
            return
        command = self._command(server, "idle", "hold", streams, 1)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if "held" not in process.stdout.readline():
                raise SystemExit(f"{server.name}: could not hold {streams} streams")
            yield
            process.stdin.close()


def measure(server: Server, load: Load, case: Case) -> dict[str, float]:
    """One case, once."""
    if case.load == "hold":
        before = server.memory()
        with load.hold(server, case.connections):
            return {"kib_per_stream": (server.memory() - before) / 1024 / case.connections}
    with load.hold(server, case.idle):
        cpu = server.cpu()
        result = load.run(server, case)
        result["server_cpu"] = server.cpu() - cpu
    result["events_per_second"] = result["events"] / result["seconds"]
    result["answers_per_second"] = result["answers"] / result["seconds"]
    result["cpu_us_per_event"] = result["server_cpu"] / result["events"] * 1e6 if result["events"] else 0.0
    result["client_busy"] = result["client_cpu"] / result["seconds"]
    return result


def run(servers: list[str], cases: list[Case], rounds: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Case → server → one measurement per round."""
    os.sched_setaffinity(0, {1})
    results: dict[str, dict[str, list[dict[str, float]]]] = {case.name: {name: [] for name in servers} for case in cases}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        load = Load(Path(folder), core=1)
        running = {name: stack.enter_context(Server(name, core=0)) for name in servers}
        for server in running.values():
            load.run(server, Case("warm", "drain", "stream", 4, 5, ""))
        for case in cases:
            for number in range(rounds):
                for name in servers:
                    if case.load == "hold":  # memory that was used before would hide what is used now
                        with Server(name, core=0) as fresh:
                            results[case.name][name].append(measure(fresh, load, case))
                    else:
                        results[case.name][name].append(measure(running[name], load, case))
                told = ", ".join(f"{name} {results[case.name][name][-1][case.value]:.4g}" for name in servers)
                print(f"{case.name} {number + 1}/{rounds}: {told}", flush=True)
    return results


def medians(results: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Case → server → the median of every figure, and ``ratio``: the median over the rounds of the figure over uvicorn's."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for case in CASES:
        if case.name not in results:
            continue
        summary[case.name] = {}
        for name, runs in results[case.name].items():
            row = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
            base = results[case.name].get(BASE)
            if base:
                pairs = list(zip(runs, base, strict=True))
                row["ratio"] = statistics.median(ours[case.value] / theirs[case.value] for ours, theirs in pairs)
                if case.load == "paced":
                    for key in ("late_p50", "late_p99"):
                        row[f"{key}_ratio"] = statistics.median(ours[key] / max(1, theirs[key]) for ours, theirs in pairs)
            summary[case.name][name] = row
    return summary


def table(summary: dict[str, dict[str, dict[str, float]]], facts: dict[str, Any]) -> str:
    """The report in Markdown."""
    names = facts["servers"]
    lines = [
        "# Transport benchmark", "",
        f"{facts['rounds']} rounds, interleaved; each figure is the median, in brackets the median ratio to uvicorn + Starlette in the "
        f"same round. One server process on one core, the client on another. Load of the machine at the begin: {facts['load']}.", "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()) + ".", "",
        "| case | figure | " + " | ".join(names) + " |", "| --- | --- |" + " --- |" * len(names),
    ]  # fmt: skip
    for case in CASES:
        if case.name in summary:
            rows = summary[case.name]
            lines.append(_row(case.name, f"{case.value.replace('_', ' ')}, {case.better} is better", case.value, "ratio", names, rows))
            if case.load == "paced":
                for key in ("late_p50", "late_p99"):
                    lines.append(_row("", f"{key.replace('_', ' ')}, µs", key, f"{key}_ratio", names, rows))
    lines += ["", "Most of a core that the client used, in any case but paced ones: "
              f"{max((row['client_busy'] for rows in summary.values() for row in rows.values() if 'client_busy' in row), default=0):.0%}.", ""]
    return "\n".join(lines)


def _row(case: str, figure: str, key: str, ratio: str, names: list[str], rows: dict[str, dict[str, float]]) -> str:
    cells = [f"{rows[name][key]:,.4g} ({rows[name].get(ratio, float('nan')):.2f})" for name in names]
    return f"| {case} | {figure} | " + " | ".join(cells) + " |"


def plot(summary: dict[str, dict[str, dict[str, float]]], names: list[str], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "trio_sse"
    import matplotlib.pyplot as plt

    cases = list(summary)
    figure, axes = plt.subplots(figsize=(12, 0.55 * len(cases) + 1.5))
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        values = [summary[case][name].get("ratio", 0) for case in cases]
        axes.barh([row + index * height for row in range(len(cases))], values, height, label=name)
    axes.set_yticks([row + 0.4 for row in range(len(cases))], cases)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("ratio to uvicorn + Starlette (events and answers per second: more is better; CPU and memory: less is better)")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def set_up() -> dict[str, str]:
    """Makes the peers' environment if need be; returns the versions of all."""
    lock = HERE / "requirements.lock"
    stamp = PEERS_VENV / "stamp"
    if not stamp.exists() or stamp.read_bytes() != lock.read_bytes():
        print("installing the peers", flush=True)
        shutil.rmtree(PEERS_VENV, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEERS_VENV)], check=True)
        subprocess.run([str(PEERS_VENV / "bin/pip"), "install", "-q", "-r", str(lock)], check=True)
        stamp.write_bytes(lock.read_bytes())
    listed = subprocess.run([str(PEERS_VENV / "bin/pip"), "freeze"], capture_output=True, text=True, check=True).stdout
    wanted = ("uvicorn", "starlette", "sse-starlette", "hypercorn", "aiohttp", "granian", "uvloop", "httptools", "h11", "trio")
    pins = dict(line.split("==") for line in listed.split() if "==" in line)
    return {"python": sys.version.split()[0], **{name: pins[name] for name in wanted if name in pins}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures trio_sse beside other servers.")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="this case; a prefix will do; repeatable")
    parser.add_argument("--servers", default=",".join(SERVERS), metavar="A,B", help="these servers (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "evidence" / "bench", metavar="DIR")
    given = parser.parse_args()
    names = given.servers.split(",")
    cases = [case for case in CASES if not given.only or any(case.name.startswith(prefix) for prefix in given.only)]
    rounds = 1 if given.quick else given.runs
    versions = set_up()
    with alone():
        facts = {"rounds": rounds, "servers": names, "versions": versions, "load": f"{os.getloadavg()[0]:.1f}", "cores": os.cpu_count()}
        results = run(names, cases, rounds)
    summary = medians(results)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "transport.json").write_text(json.dumps({"facts": facts, "summary": summary, "runs": results}, indent=1) + "\n")
    report = table(summary, facts)
    (given.out / "transport.md").write_text(report)
    plot(summary, names, given.out / "transport.svg")
    print(report)


if __name__ == "__main__":
    main()
