#!/usr/bin/env python3
"""scripts/bench_engine.py: the engine beside the engines people would pick instead, in one interleaved run.

Every engine is one process with the same model file and as many threads. All are loaded at once and measured one after the other, round
after round, so that whatever else the machine does falls on all alike; what counts are ratios of medians. Writes engine.json, engine.md
and engine.svg into evidence/bench/.

    trio_sse         TransformersBackend with its engine and event channels, --dtype auto
    trio_sse-DTYPE   the same with other forms of weights
    generate         transformers' generate(), bfloat16, one stream
    batching         transformers' continuous batching, bfloat16
    llama.cpp        through llama-cpp-python, one stream; wants an interpreter that has it (--llama)

Rules:

1. A rate is tokens per second between the last stream's first token and the first stream's last one: decoding only.
2. Prompts are pieces of one text, so streams differ; decoding is greedy; no stream is asked for a token that it does not decode.
3. A measurement that fails ends the run; an engine that is not there is left out, and the table says so.

Needs the test extra (the reference model of the peers is built by the tests' own helper); llama.cpp: python -m venv .venv-llama, and
.venv-llama/bin/pip install llama-cpp-python, which compiles it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "tests" / "texts" / "prose.txt"
OUT = ROOT / "evidence" / "bench"
STREAMS = (1, 2, 4, 8, 16)


def prompts(count: int, characters: int = 240) -> list[str]:
    """``count`` pieces of the text, each beginning at a word."""
    text = TEXT.read_text(encoding="utf-8")
    starts = [text.index(" ", n * 700 % (len(text) - characters - 100)) + 1 for n in range(count)]
    return [text[start : start + characters] for start in starts]


def decoding(times: list[list[float]]) -> dict[str, float]:
    """Rule 1, from each stream's token times; and the gaps between tokens."""
    begin, end = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    inside = sum(sum(begin < at <= end for at in stream) for stream in times)
    gaps = sorted(b - a for stream in times for a, b in itertools.pairwise(stream) if begin <= a and b <= end)
    return {
        "tokens_per_s": inside / (end - begin),
        "itl_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "itl_p99_ms": 1e3 * gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))],
    }


def resident_mb() -> float:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return float("nan")


# ---- workers: one engine each, answering one JSON line with another -------------------------------------------------------------------


class Ours:
    """The whole backend on a trio loop of its own; every call runs one scenario."""

    def __init__(self, dtype: str, threads: int) -> None:
        self.dtype, self.threads = dtype, threads

    def serve(self, answer_all: Callable[[Callable[..., Any]], Any]) -> None:
        import trio

        trio.run(self._main, answer_all)

    async def _main(self, answer_all: Callable[[Callable[..., Any]], Any]) -> None:
        import trio

        from trio_sse.backends.transformers import TransformersBackend

        self.backend = TransformersBackend(dtype=self.dtype, threads=self.threads, slots=max(STREAMS))
        async with trio.open_nursery() as nursery:
            await nursery.start(self.backend.run)
            await answer_all(self._one)
            nursery.cancel_scope.cancel(reason="the benchmark is over")

    async def _one(self, call: dict[str, Any]) -> dict[str, Any]:
        scenario = getattr(self, "_" + call.pop("do"))
        found: dict[str, Any] = await scenario(**call)
        return found

    async def _generate(self, prompt: str, count: int, times: list[float]) -> None:
        """One request; ``times`` gets the moment at which each token leaves the channel."""
        import trio

        from trio_sse.channel import EventChannel
        from trio_sse.events import GenerationRequest, Token
        from trio_sse.trace import Record

        channel = EventChannel(16, Record("bench", "/"))

        async def read() -> None:
            while True:  # noqa: ASYNC913
                try:
                    event = await channel.receive()
                except trio.EndOfChannel:
                    return  # noqa: ASYNC910
                if isinstance(event, Token):
                    times.extend([time.perf_counter()] * event.count)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            try:
                prepared = await self.backend.prepare(GenerationRequest(prompt=prompt, max_tokens=count))
                await self.backend.generate(prepared, channel)
            finally:
                channel.close()

    async def _decode(self, streams: int, tokens: int) -> dict[str, Any]:
        import trio

        times: list[list[float]] = [[] for _ in range(streams)]
        async with trio.open_nursery() as nursery:
            for prompt, mine in zip(prompts(streams), times, strict=True):
                nursery.start_soon(self._generate, prompt, tokens, mine)
        return decoding(times)

    async def _first_token(self, long: int, tokens: int) -> dict[str, Any]:
        """Three streams decode; a short request comes, alone and then while a prompt of ``long`` characters is being read."""
        import trio

        times: list[list[float]] = [[] for _ in range(3)]
        quiet: list[float] = []
        beside: list[float] = []
        much: list[float] = []
        async with trio.open_nursery() as nursery:
            for prompt, mine in zip(prompts(3), times, strict=True):
                nursery.start_soon(self._generate, prompt, tokens, mine)
            while not all(times):  # noqa: ASYNC110  (a benchmark may look a hundred times a second)
                await trio.sleep(0.01)
            at_quiet = time.perf_counter()
            await self._generate(prompts(4)[3], 2, quiet)
            at_long = time.perf_counter()
            nursery.start_soon(self._generate, prompts(1, long)[0], 2, much)
            await trio.sleep(0.2)
            at_beside = time.perf_counter()
            await self._generate(prompts(5)[4], 2, beside)
            while not much:  # noqa: ASYNC110
                await trio.sleep(0.01)
            at_end = time.perf_counter()
            nursery.cancel_scope.cancel(reason="seen enough")
        gaps = sorted(b - a for stream in times for a, b in itertools.pairwise(stream) if at_long <= a and b <= at_end)
        return {
            "ttft_short_ms": 1e3 * (quiet[0] - at_quiet),
            "ttft_short_beside_long_ms": 1e3 * (beside[0] - at_beside),
            "ttft_long_ms": 1e3 * (much[0] - at_long),
            "itl_p50_beside_long_ms": 1e3 * gaps[len(gaps) // 2],
            "itl_p99_beside_long_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
        }

    async def _cancel(self, times: int, long: int) -> dict[str, Any]:
        """From the cancellation to the return of ``generate``: one of eight that decode, and during a long prompt."""
        import trio

        choice = random.Random(0)  # noqa: S311  (moments)
        found: dict[str, list[float]] = {"decode": [], "prefill": []}
        for kind, latencies in found.items():
            async with trio.open_nursery() as nursery:
                for prompt in prompts(7) if kind == "decode" else []:
                    nursery.start_soon(self._generate, prompt, 4000, [])
                for _ in range(times):
                    with trio.CancelScope() as scope:
                        async with trio.open_nursery() as inner:
                            prompt = prompts(1, 240 if kind == "decode" else long)[0]
                            inner.start_soon(self._generate, prompt, 500, [])
                            await trio.sleep(choice.uniform(0.5, 1.5))
                            begin = time.perf_counter()
                            scope.cancel(reason="that is what is measured")
                    latencies.append(time.perf_counter() - begin)
                nursery.cancel_scope.cancel(reason="measured")
        assert self.backend.kv_cache_bytes == 0
        medians = {f"cancel_{kind}_p50_ms": 1e3 * statistics.median(latencies) for kind, latencies in found.items()}
        worst = {f"cancel_{kind}_max_ms": 1e3 * max(latencies) for kind, latencies in found.items()}
        return medians | worst  # noqa: ASYNC910

    async def _memory(self) -> dict[str, Any]:
        return {"resident_mb": resident_mb()}  # noqa: ASYNC910


class Generate:
    """transformers' generate(), and its continuous batching."""

    def __init__(self, threads: int, batching: bool) -> None:
        import gguf
        import torch
        from transformers import LlamaConfig

        from tests.fakes.tiny_models import reference_llama
        from trio_sse.backends.transformers.loading import converted, packaged_model

        torch.set_num_threads(threads)
        path = packaged_model()
        self.tokenizer = converted(path, print_error).tokenizer.backend_tokenizer
        tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            max_position_embeddings=8192, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True, eos_token_id=2,
        )  # fmt: skip
        model: Any = reference_llama(config, tensors)
        self.model = model.to(torch.bfloat16)
        self.batching = batching

    def serve(self, answer_all: Callable[[Callable[..., Any]], Any]) -> None:
        answer_all(self._one)

    def _one(self, call: dict[str, Any]) -> dict[str, Any]:
        if call["do"] == "memory":
            return {"resident_mb": resident_mb()}
        ids = [self.tokenizer.encode(prompt).ids for prompt in prompts(call["streams"])]
        return decoding(self._batch(ids, call["tokens"]) if self.batching else [self._stream(ids[0], call["tokens"])])

    def _stream(self, ids: list[int], tokens: int) -> list[float]:
        import torch
        from transformers.generation import BaseStreamer

        class Clock(BaseStreamer):
            def __init__(self) -> None:
                self.times: list[float] = []

            def put(self, value: Any) -> None:  # noqa: ARG002  (the time is all that counts)
                self.times.append(time.perf_counter())

            def end(self) -> None: ...

        clock = Clock()
        fed = torch.tensor([ids])
        with torch.inference_mode():
            self.model.generate(
                fed, attention_mask=torch.ones_like(fed), max_new_tokens=tokens, do_sample=False, streamer=clock, pad_token_id=2
            )
        return clock.times[1:]  # the first one is the prompt

    def _batch(self, ids: list[list[int]], tokens: int) -> list[list[float]]:
        import torch
        from transformers import GenerationConfig

        make: Any = GenerationConfig
        settings = make(max_new_tokens=tokens, do_sample=False, eos_token_id=2, pad_token_id=2)
        times: dict[str, list[float]] = {}
        with torch.inference_mode(), self.model.continuous_batching_context_manager(generation_config=settings) as manager:
            names = manager.add_requests(ids, max_new_tokens=tokens, streaming=True)
            times = {name: [] for name in names}
            open_ones = set(names)
            while open_ones:
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("continuous batching gave nothing for a minute")
                more = len(result.generated_tokens) - len(times[result.request_id])
                times[result.request_id] += [time.perf_counter()] * more
                if result.is_finished():
                    open_ones.discard(result.request_id)
        return list(times.values())


class LlamaCpp:
    """llama.cpp through llama-cpp-python. Runs under another interpreter, so nothing of ours is imported."""

    def __init__(self, threads: int, path: str) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]

        self.model = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def serve(self, answer_all: Callable[[Callable[..., Any]], Any]) -> None:
        answer_all(self._one)

    def _one(self, call: dict[str, Any]) -> dict[str, Any]:
        if call["do"] == "memory":
            return {"resident_mb": resident_mb()}
        self.model.reset()
        self.model.eval(self.model.tokenize(prompts(1)[0].encode(), add_bos=False))
        times = []
        for _ in range(call["tokens"]):
            token = self.model.sample(temp=0.0)
            times.append(time.perf_counter())
            self.model.eval([token])
        return decoding([times])


def print_error(line: str) -> None:
    print(line, file=sys.stderr)


def work(name: str, threads: int, path: str) -> None:
    """A worker's life: says that it is ready, then answers calls until standard input ends."""
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
        Ours(name.partition("-")[2] or "auto", threads).serve(answer_later)
    elif name == "llama.cpp":
        LlamaCpp(threads, path).serve(answer_now)
    else:
        Generate(threads, batching=name == "batching").serve(answer_now)


# ---- the run --------------------------------------------------------------------------------------------------------------------------


class Worker:
    """A worker process, seen from outside."""

    def __init__(self, name: str, python: str, threads: int, path: str) -> None:
        self.name = name
        # Every engine gets the waiting between threads that it would choose itself.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        command = [python, __file__, "--worker", name, "--threads", str(threads), "--path", path]
        log = (OUT / f"engine-{name}.log").open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; see {OUT / f'engine-{self.name}.log'}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **call: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        (OUT / f"engine-{self.name}.log").unlink()


def quality(dtypes: list[str], threads: int) -> dict[str, Any]:
    """Perplexity and likeliest tokens over the whole text, against float32 weights of the same file. In this process, at the end."""
    import math

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


def measure(workers: list[Worker], rounds: int, tokens: int, slow_tokens: int) -> dict[str, Any]:
    samples: dict[str, dict[str, list[float]]] = {worker.name: {} for worker in workers}

    def note(worker: Worker, prefix: str, found: dict[str, Any]) -> None:
        for figure, value in found.items():
            samples[worker.name].setdefault(prefix + figure, []).append(value)

    for n in range(rounds):
        for streams in STREAMS:
            for worker in workers:
                ours = worker.name.startswith("trio_sse")
                if streams == 1 or ours or worker.name == "batching":
                    count = tokens if ours or worker.name == "llama.cpp" else slow_tokens
                    note(worker, f"{streams}_", worker.ask(do="decode", streams=streams, tokens=count))
            print(f"round {n + 1} of {rounds}: {streams} streams", flush=True)
    for worker in workers:
        if worker.name == "trio_sse":
            for _ in range(rounds):
                note(worker, "", worker.ask(do="first_token", long=9000, tokens=400))
            print("first token", flush=True)
            note(worker, "", worker.ask(do="cancel", times=8, long=16000))
            print("cancelling", flush=True)
        note(worker, "", worker.ask(do="memory"))
    return {name: {figure: statistics.median(values) for figure, values in found.items()} for name, found in samples.items()}


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """The comparisons that are aimed at, where both sides are there."""

    def rate(engine: str, streams: int) -> float:
        return float(found.get(engine, {}).get(f"{streams}_tokens_per_s", float("nan")))

    return {
        "1 stream / generate()": rate("trio_sse", 1) / rate("generate", 1),
        "1 stream / llama.cpp": rate("trio_sse", 1) / rate("llama.cpp", 1),
        "8 streams / continuous batching, 8": rate("trio_sse", 8) / rate("batching", 8),
        "8 streams / llama.cpp, 1": rate("trio_sse", 8) / rate("llama.cpp", 1),
        "16 streams / llama.cpp, 1": rate("trio_sse", 16) / rate("llama.cpp", 1),
    }


AIMS = {"1 stream / generate()": 3.0, "1 stream / llama.cpp": 0.9, "8 streams / continuous batching, 8": 2.0,
        "8 streams / llama.cpp, 1": 2.4, "16 streams / llama.cpp, 1": 3.2}  # fmt: skip


def table(report: dict[str, Any]) -> str:
    engines, ours = report["engines"], report["engines"]["trio_sse"]
    streams = [str(n) for n in STREAMS]

    def cells(found: dict[str, Any], text: str, figures: tuple[str, ...]) -> list[str]:
        """One cell for each number of streams; empty where the engine was not asked."""
        known = {n: [found.get(f"{n}_{figure}") for figure in figures] for n in STREAMS}
        return ["" if None in values else text.format(*values) for values in known.values()]

    parts = [
        "# The engine beside others",
        f"{report['machine']}, {report['threads']} threads, medians of {report['rounds']} rounds.",
        "Tokens per second, decoding, by number of streams; and resident memory in MB:",
        _grid(
            ["", *streams, "MB"],
            [[name, *cells(e, "{:.0f}", ("tokens_per_s",)), f"{e['resident_mb']:.0f}"] for name, e in engines.items()],
        ),
        "Milliseconds between tokens, p50 / p99:",
        _grid(
            ["", *streams], [[name, *cells(e, "{:.0f} / {:.0f}", ("itl_p50_ms", "itl_p99_ms"))] for name, e in engines.items()]
        ),
        "Ratios:",
        _grid(
            ["trio_sse to", "found", "aimed at"], [[name, f"{x:.2f}", str(AIMS[name])] for name, x in report["ratios"].items()]
        ),
        "A long prompt beside others, and cancelling, in milliseconds:",
        _grid(
            ["", "ms"],
            [
                [k.removesuffix("_ms").replace("_", " "), f"{v:.0f}"]
                for k, v in ours.items()
                if k.startswith(("ttft", "cancel", "itl"))
            ],
        ),
    ]
    if "quality" in report:
        text = report["quality"]
        forms = [(name, q) for name, q in text.items() if name not in ("tokens", "float32")]
        parts += [
            f"Quality over {text['tokens']} tokens of a fixed text, on which float32 has perplexity {text['float32']['perplexity']:.3f}:",
            _grid(
                ["weights", "perplexity, ratio", "same likeliest token"],
                [[name, f"{q['ratio']:.5f}", f"{q['top1_agreement']:.2%}"] for name, q in forms],
            ),
        ]
    if report["missing"]:
        parts.append("Not there: " + ", ".join(report["missing"]))
    return "\n\n".join(parts) + "\n"


def _grid(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "trio_sse"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, found in report["engines"].items():
        known = [n for n in STREAMS if f"{n}_tokens_per_s" in found]
        axes.plot(known, [found[f"{n}_tokens_per_s"] for n in known], marker="o", label=name)
    axes.set(xlabel="streams", ylabel="tokens per second", xticks=STREAMS, ylim=(0, None), title="decoding, all streams together")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="per stream")
    parser.add_argument("--slow-tokens", type=int, default=24, help="the same for transformers, which takes its time")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--llama", default=str(ROOT / ".venv-llama" / "bin" / "python"), help="an interpreter with llama-cpp-python"
    )
    parser.add_argument("--no-quality", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.threads, options.path)
        return
    sys.path.insert(0, str(ROOT))
    from trio_sse.backends.transformers.loading import packaged_model

    OUT.mkdir(parents=True, exist_ok=True)
    path = str(packaged_model())
    names = ["trio_sse", "trio_sse-int4", "trio_sse-float16", "generate", "batching"]
    pythons = dict.fromkeys(names, sys.executable)
    missing = []
    if Path(options.llama).exists():
        pythons["llama.cpp"] = options.llama
    else:
        missing.append("llama.cpp")
    workers = []
    for name, python in pythons.items():
        print(f"loading {name}", flush=True)
        workers.append(Worker(name, python, options.threads, path))
    engines = measure(workers, options.rounds, options.tokens, options.slow_tokens)
    for worker in workers:
        worker.end()
    import torch

    machine = f"{platform.machine()}, torch {torch.__version__} with {torch.backends.cpu.get_cpu_capability()}"
    report = {
        "machine": machine, "threads": options.threads, "rounds": options.rounds, "missing": missing, "engines": engines,
        "ratios": ratios(engines), "aims": AIMS,
    }  # fmt: skip
    if not options.no_quality:
        print("quality", flush=True)
        report["quality"] = quality(["int4", "float16", "bfloat16"], options.threads)
    (OUT / "engine.json").write_text(json.dumps(report, indent=1) + "\n")
    (OUT / "engine.md").write_text(table(report))
    draw(report, OUT / "engine.svg")
    print(table(report))


if __name__ == "__main__":
    main()
