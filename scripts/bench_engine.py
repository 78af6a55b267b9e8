#!/usr/bin/env python3
"""scripts/bench_engine.py: the engine beside the engines people would pick instead, in one interleaved run.

Every contender is one process with the same model file and as many threads. All are loaded first and then measured one after the other,
round after round, so that whatever else the machine does falls on all alike; what counts are ratios of medians. Writes engine.json,
engine.md and engine.svg into evidence/bench/.

    trio_sse         TransformersBackend with its engine, event channels and readers, --dtype auto
    trio_sse-DTYPE   the same with another form of weights
    generate         transformers' generate(), bfloat16, one stream
    batching         transformers' continuous batching, bfloat16
    llama.cpp        through llama-cpp-python, one stream; wants an interpreter that has it (--llama)

What is measured, by the names that --only takes:

    decode    tokens per second and their gaps, with 1 to 16 streams; how late the trio loop wakes a task meanwhile
    first     time to first token of a short request beside three streams, alone and while a long prompt is read
    stalled   one healthy stream's gaps, alone and beside three whose readers take nothing
    cancel    from the verdict to the return of generate, in decode and in prefill
    aborts    many aborts at random moments, after which the pool must be empty
    healthz   /healthz of a real server all of whose slots generate
    quality   perplexity and likeliest tokens over a fixed text, against float32 weights of the same file

Rules:

1. A rate is tokens per second between the last stream's first token and the first stream's last one: decoding only.
2. Prompts are pieces of one text, so streams differ; decoding is greedy; no stream is asked for a token that it does not decode.
3. A measurement that fails ends the run; a contender that is not there is left out, and the table says so. Ctrl-C ends the run with
   what has been measured by then, and the table says that too.

Needs the test extra (the reference model of the peers is built by the tests' own helper); llama.cpp: python -m venv .venv-llama, and
.venv-llama/bin/pip install llama-cpp-python, which compiles it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).resolve().parent / "bench"
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from engine_figures import STREAMS, TEXT  # noqa: E402  (its place is known only now)

SCENARIOS = ("decode", "first", "stalled", "cancel", "aborts", "healthz", "quality")
CONTENDERS = ("trio_sse", "generate", "batching", "llama.cpp")
LONG = 4000  # tokens of a long prompt


# ---- A contender's process: one JSON line is a call, another its answer ----


def work(name: str, threads: int, path: str) -> None:
    """Says that it is ready, then answers calls until standard input ends."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    async def answer_later(one: Callable[..., Any]) -> None:
        import trio

        say({"ready": True})
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            say(await one(json.loads(line)))

    def answer_now(one: Callable[..., Any]) -> None:
        say({"ready": True})
        for line in sys.stdin:
            say(one(json.loads(line)))

    if name.startswith("trio_sse"):
        from engine_ours import Ours

        Ours(name.partition("-")[2] or "auto", threads).serve(answer_later)
        return
    from engine_peers import LlamaCpp, Transformers

    contender = LlamaCpp(threads, path) if name == "llama.cpp" else Transformers(threads, batching=name == "batching")
    contender.serve(answer_now)


class Worker:
    """A contender's process, seen from outside.

    Resource handling: the process ends with the ``with`` block.
    """

    def __init__(self, name: str, python: str, threads: int, path: str) -> None:
        self.name = name
        self.ours = name.startswith("trio_sse")
        # Each chooses for itself how its threads wait for one another.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        command = [python, __file__, "--worker", name, "--threads", str(threads), "--path", path]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if error is not None:
            self._process.kill()  # it is in the midst of a scenario
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; what it said stands above")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **call: Any) -> dict[str, Any]:
        """Has one scenario run; returns its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        return self._answer()


# ---- The run ----


class Run:
    """All samples: contender → figure → one value per measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.workers: list[Worker] = []
        self.options = options
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.versions: dict[str, str] = {}

    def note(self, name: str, found: dict[str, Any], prefix: str = "") -> None:
        """Keeps what was found."""
        for figure, value in found.items():
            self.samples.setdefault(name, {}).setdefault(prefix + figure, []).append(value)

    def medians(self) -> dict[str, dict[str, float]]:
        return {name: {key: statistics.median(values) for key, values in found.items()} for name, found in self.samples.items()}

    def decode(self) -> None:
        """A B C, A B C, … for each number of streams."""
        for n in range(self.options.rounds):
            for streams in STREAMS:
                for worker in self.workers:
                    if streams == 1 or worker.ours or worker.name == "batching":
                        quick = worker.ours or worker.name == "llama.cpp"
                        tokens = self.options.tokens if quick else self.options.slow_tokens
                        self.note(worker.name, worker.ask(do="decode", streams=streams, tokens=tokens), f"{streams}_")
                rates = [(w.name, self.samples.get(w.name, {}).get(f"{streams}_tokens_per_s", [math.nan])[-1]) for w in self.workers]
                found = ", ".join(f"{name} {rate:.1f}" for name, rate in rates if not math.isnan(rate))
                print(f"round {n + 1}, {streams} streams: {found}", flush=True)

    def scenarios(self, worker: Worker) -> None:
        """What only our own engine is asked."""
        quick = self.options.quick
        calls: dict[str, list[dict[str, Any]]] = {
            "first": [{"do": "first_token", "long": LONG, "tokens": 1000}],
            "stalled": [{"do": "stalled", "rounds": 1 if quick else self.options.rounds, "tokens": 2 * self.options.tokens}],
            "cancel": [{"do": "cancel", "times": 3 if quick else 12, "long": LONG}],
            "aborts": [{"do": "aborts", "times": 50 if quick else 1000}],
        }
        for name, each in calls.items():
            for call in each if name in self.options.only else []:
                found = worker.ask(**call)
                self.note(worker.name, found)
                print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)

    def memory(self) -> None:
        for worker in self.workers:
            found = worker.ask(do="memory")
            if version := found.pop("version", None):
                self.versions["llama-cpp-python"] = version
            self.note(worker.name, found)


def quality(dtypes: list[str], threads: int) -> dict[str, Any]:
    """Perplexity and likeliest tokens over the whole text, against float32 weights of the same file. In this process, at the end."""
    import torch

    from trio_sse.backends.transformers.model import load_model
    from trio_sse.events import Sampling

    def score(dtype: str) -> tuple[float, list[int]]:
        loaded: Any = load_model("smollm2", device="cpu", dtype=dtype, threads=threads, slots=1, progress=lambda _: None)
        ids = loaded.tokenizer.backend_tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
        loss, likeliest = 0.0, []
        for begin in range(0, len(ids), 1024):
            window = ids[begin : begin + 1024]
            cache = loaded.steps.open(1024, Sampling(), window)
            for at in range(0, len(window), 48):
                logits = loaded.steps.logits(cache, window[at : at + 48])
                following = torch.tensor(window[at + 1 : at + 49])
                logprobs = torch.log_softmax(logits[: len(following)], -1)
                loss -= float(logprobs.gather(1, following[:, None]).sum())
                likeliest += logits.argmax(-1).tolist()
            loaded.steps.close(cache)
        return loss / len(ids), likeliest

    base, best = score("float32")
    found: dict[str, Any] = {"tokens": len(best), "float32": {"perplexity": math.exp(base)}}
    for dtype in dtypes:
        loss, mine = score(dtype)
        agreement = sum(a == b for a, b in zip(mine, best, strict=True)) / len(best)
        found[dtype] = {"perplexity": math.exp(loss), "ratio": math.exp(loss - base), "top1_agreement": agreement}
    return found


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the engine beside others.")
    parser.add_argument("--quick", action="store_true", help="one round of few tokens, few aborts, no quality")
    parser.add_argument("--only", default=",".join(SCENARIOS), metavar="A,B", help="these scenarios (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), metavar="A,B", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="per stream (default: %(default)s)")
    parser.add_argument("--slow-tokens", type=int, default=24, metavar="N", help="the same for transformers (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="(default: all cores)")
    parser.add_argument("--llama", default=str(ROOT / ".venv-llama" / "bin" / "python"), help="an interpreter with llama-cpp-python")
    parser.add_argument("--out", type=Path, default=ROOT / "evidence" / "bench", metavar="DIR", help="(default: evidence/bench)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = options.only.split(",")
    options.contenders = options.contenders.split(",")
    if unknown := set(options.only) - set(SCENARIOS):
        parser.error(f"--only: unknown: {', '.join(sorted(unknown))}")
    if unknown := {name for name in options.contenders if name not in CONTENDERS and not name.startswith("trio_sse-")}:
        parser.error(f"--contenders: unknown: {', '.join(sorted(unknown))}")
    if options.quick:
        options.rounds, options.tokens, options.slow_tokens = 1, min(options.tokens, 24), min(options.slow_tokens, 8)
        options.only = [name for name in options.only if name != "quality"]
    return options


def measure(run: Run, pythons: dict[str, str], path: str) -> None:
    """Loads all contenders, measures them, and ends them."""
    import contextlib

    import engine_server

    options = run.options
    with contextlib.ExitStack() as stack:
        for name, python in pythons.items():
            print(f"loading {name}", flush=True)
            run.workers.append(stack.enter_context(Worker(name, python, options.threads, path)))
        if "decode" in options.only:
            run.decode()
        run.memory()
        for worker in run.workers:
            if worker.name == "trio_sse":
                run.scenarios(worker)
    if "healthz" in options.only:
        run.note("trio_sse", engine_server.healthz(options.threads, 3 if options.quick else 10))


def main() -> None:
    options = options_given()
    if options.worker:
        work(options.worker, options.threads, options.path)
        return
    import engine_report

    from trio_sse.backends.transformers.loading import packaged_model
    from trio_sse.evidence.environment import describe
    from trio_sse.evidence.lock import alone

    pythons = {name: options.llama if name == "llama.cpp" else sys.executable for name in options.contenders}
    missing = [name for name, python in pythons.items() if not Path(python).exists()]
    with alone():
        before = round(os.getloadavg()[0], 1)
        run, complete = Run(options), True
        try:
            measure(run, {name: python for name, python in pythons.items() if name not in missing}, str(packaged_model()))
        except KeyboardInterrupt:
            complete = False
        engines = run.medians()
        facts = describe()
        packages = ("torch", "transformers", "trio")
        report: dict[str, Any] = {
            "machine": facts, "versions": {name: facts[f"package {name}"] for name in packages} | run.versions,
            "load": [before, round(os.getloadavg()[0], 1)], "threads": options.threads, "rounds": options.rounds,
            "tokens": options.tokens, "slow_tokens": options.slow_tokens, "missing": missing, "complete": complete, "engines": engines,
            "ratios": engine_report.ratios(engines), "aims": engine_report.AIMS, "samples": run.samples,
        }  # fmt: skip
        if "quality" in options.only and complete:
            print("quality", flush=True)
            report["quality"] = quality(["int4", "float16", "bfloat16"], options.threads)
    print(engine_report.write(options.out, report))


if __name__ == "__main__":
    main()
