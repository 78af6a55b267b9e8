"""Recording: runs the measured cases over real sockets and writes a recording that ``replay`` can check.

    for each case:   start the server ─▶ run 1 … N ─▶ stop it
    for each run:    companion (if any) takes the slot ─▶ the clients do what the case says ─▶ the server's traces are fetched

Rules:

1. The server is a process of its own, the clients are threads here, and both read one clock.
2. A recording appears under its name only once it is complete; one that broke off leaves a folder ``N.partial`` behind.
3. The sources must be the same at the end as at the beginning: a recording that mixes two programs proves nothing.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from trio_sse.evidence import environment, manifest, matrix, report, timelines
from trio_sse.evidence.client import Client, ask
from trio_sse.evidence.figures import summarise, verdicts
from trio_sse.evidence.lock import alone
from trio_sse.evidence.matrix import Behaviour, Case, Matrix, MatrixError
from trio_sse.evidence.process import Server, ServerFailed
from trio_sse.evidence.traces import Exchange, load
from trio_sse.trace import MARKS

__all__ = ["RecordingFailed", "main", "seal"]

ENDED = 30.0  # seconds within which the server must have closed the trace of an exchange whose client is done
SETTLE = 0.2  # seconds between two runs, so that no run meets the end of the one before


class RecordingFailed(RuntimeError):
    """A run could not be measured. The message names the case and the run."""


def main(cases: Sequence[str] = (), runs: int | None = None, out: Path | str | None = None) -> int:
    """Records cases and prints what it does.

    Args:
      cases: names of cases in the matrix; none stands for all of them.
      runs: how often each case is run; None is the matrix's own number.
      out: the recording's folder, which must not exist; None is ``evidence/N`` with the next free number.

    Returns:
      0 if every rule of the matrix held; 1 if one did not (the recording is written all the same), or if a run could not be measured
      (what there is lies in ``OUT.partial``); 2 if there is no such case or ``out`` exists, and nothing has been done.

    Resource handling: holds the machine-wide measurement lock; every server process has ended when this returns.
    """
    try:
        text = matrix.MATRIX.read_text("utf-8")
        chosen = matrix.parse(text).chosen(tuple(cases))
        target = Path(out) if out is not None else _next(Path("evidence"))
    except MatrixError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    partial = target.with_name(target.name + ".partial")
    if target.exists() or partial.exists():
        print(f"record: {target} or {partial} exists; nothing is ever overwritten", file=sys.stderr)
        return 2
    partial.mkdir(parents=True)
    try:
        failed = _record(chosen, runs or chosen.runs, text, partial, target)
    except (RecordingFailed, ServerFailed) as error:
        print(f"record: {error}", file=sys.stderr)
        return 1
    for rule in failed:
        print(f"does not hold: {rule}")
    print(f"{target}: {len(chosen.cases)} cases recorded; read {target}/report.md")
    return 1 if failed else 0


def _record(chosen: Matrix, runs: int, text: str, partial: Path, target: Path) -> list[str]:
    """Measures every case and seals the recording; the rules that did not hold."""
    with alone():
        sources = manifest.source_hashes()
        facts = environment.describe()
        for number, case in enumerate(chosen.cases, 1):
            print(f"[{number}/{len(chosen.cases)}] {case.name}: {case.title}", flush=True)
            manifest.write_trace(partial, case.name, _run_case(case, runs))
        if manifest.source_hashes() != sources:
            raise RecordingFailed(f"the sources changed while they were measured; see {partial}")
    (partial / "matrix.toml").write_bytes(text.encode("utf-8"))
    (partial / "environment.json").write_bytes(manifest.canonical(facts))
    (partial / "sources.json").write_bytes(manifest.canonical(sources))
    return seal(partial, target, chosen, runs, facts)


def _next(folder: Path) -> Path:
    taken = [int(path.name.partition(".")[0]) for path in folder.glob("*") if path.name.partition(".")[0].isdigit()]
    return folder / str(max(taken, default=0) + 1)


def seal(recording: Path, target: Path, chosen: Matrix, runs: int, facts: dict[str, object]) -> list[str]:
    """Writes what follows from the traces in ``recording`` (figures, report, timelines, manifest) and gives it its name.

    Returns the rules that did not hold.
    """
    traces: dict[str, list[Exchange]] = {}
    for path in sorted((recording / "traces").iterdir()):
        traces[path.name.partition(".")[0]] = load(manifest.read_text(path).splitlines())
    summaries = {case: summarise(exchanges) for case, exchanges in traces.items()}
    stored = {"format": report.FORMAT, "runs": runs, "cases": summaries}
    (recording / "figures.json").write_bytes(manifest.canonical(stored))
    text = report.render(target.name, chosen, runs, facts, summaries, traces)
    (recording / "report.md").write_bytes(text.encode("utf-8"))
    (recording / "timelines").mkdir()
    failed = []
    for case in chosen.cases:
        if case.timeline:
            timelines.draw(recording / "timelines" / f"{case.name}.svg", case, traces[case.name])
        results = verdicts(case, summaries[case.name])
        failed += [f"{case.name}: {rule} (measured: {report.told(values)})" for rule, held, values in results if not held]
    manifest.bind(recording)
    recording.rename(target)
    manifest.write_sums(target.parent, target.name)
    return failed


def _run_case(case: Case, runs: int) -> list[str]:
    """All runs of one case against one server; the lines of its trace file."""
    lines: list[str] = []
    with Server(case.server) as server:
        # One exchange that nobody measures: the first one pays for imports and first-time set-up.
        warm = Client(server.address, case.request, case.body, f"{case.name}-warm", Behaviour())
        if not case.client.companion and case.client.leave != "stall":
            warm.run()
            _raise(warm, case, 0)
        for run in range(1, runs + 1):
            time.sleep(SETTLE)
            try:
                lines += _run(server, case, run)
            except Exception as error:
                raise RecordingFailed(f"{case.name}, run {run}: {error}\nThe server's last words:\n{server.printed()[-2000:]}") from error
    return lines


def _run(server: Server, case: Case, run: int) -> list[str]:
    server.forget_peak()
    memory, _ = server.memory()
    cpu = server.cpu_ns()
    clients: list[tuple[str, Client]] = []
    threads: list[threading.Thread] = []

    def start(role: str, request: str, body: str, behaviour: Behaviour, later: float = 0.0) -> Client:
        client = Client(server.address, request, body, f"{case.name}-r{run}-{len(clients) + 1}", behaviour, later)
        clients.append((role, client))
        threads.append(threading.Thread(target=client.run, daemon=True))
        threads[-1].start()
        return client

    if case.client.companion:
        start("companion", case.client.companion, "", Behaviour()).begun.wait(ENDED)
    for index in range(case.client.clients):
        start("subject", case.request, case.body, case.client, index * case.client.stagger_ms / 1000)
    for thread in threads:
        thread.join()
    for _, client in clients:
        _raise(client, case, run)
    _, peak = server.memory()
    now = server.cpu_ns()  # before the traces are fetched: making JSON of them is no part of the run
    spent = None if now is None or cpu is None else now - cpu
    records = [_trace(server, client.request_id) if case.traced else None for _, client in clients]
    lines = []
    for number, ((role, client), record) in enumerate(zip(clients, records, strict=True), 1):
        head = {"memory_before": memory, "memory_peak": peak, "cpu_ns": spent, **client.head}
        lines += _lines(run, number, role, head, record, client)
    return lines


def _raise(client: Client, case: Case, run: int) -> None:
    if client.error is not None:
        raise RecordingFailed(f"{case.name}, run {run}: the client failed: {client.error!r}") from client.error


def _trace(server: Server, request_id: str) -> dict[str, object]:
    """The server's trace of one exchange, once it is closed and the work behind it has ended."""
    until = time.monotonic() + ENDED
    while time.monotonic() < until:
        status, body = ask(server.address, "GET", f"/traces/{request_id}")
        if status == 200:
            record: dict[str, object] = json.loads(body)
            return record
        time.sleep(0.1)
    raise RecordingFailed(f"no trace of {request_id} within {ENDED} s")


def _lines(run: int, number: int, role: str, head: dict[str, object], record: dict[str, object] | None, client: Client) -> list[str]:
    """One exchange as lines: its head, the server's marks with their values named, the client's marks."""
    marks = []
    if record is not None:
        listed = record.pop("marks")
        if not isinstance(listed, list):
            raise RecordingFailed(f"the trace of {client.request_id} has no marks")
        for kind, at, *values in listed:
            names = MARKS[kind][1]
            marks.append({"side": "server", "at": at, "mark": kind, **dict(zip(names, values, strict=True))})
    marks += [{"side": "client", **mark} for mark in client.marks]
    place = {"run": run, "exchange": number}
    return [json.dumps(entry) for entry in ({**place, "role": role, **head, "record": record}, *({**place, **mark} for mark in marks))]

