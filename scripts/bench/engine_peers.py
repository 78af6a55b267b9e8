"""The engines that trio_sse is measured beside. Each answers one call with one dict; the calls are ``decode`` and ``memory``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from engine_figures import decoding, prompts, resident_mb

__all__ = ["LlamaCpp", "Transformers"]

Call = dict[str, Any]
Found = dict[str, Any]


class Transformers:
    """transformers' generate(), or its continuous batching, in bfloat16."""

    def __init__(self, threads: int, *, batching: bool) -> None:
        import gguf
        import torch
        from transformers import LlamaConfig

        from tests.fakes.tiny_models import reference_llama
        from trio_sse.backends.transformers.loading import converted, packaged_model

        torch.set_num_threads(threads)
        path = packaged_model()
        self.tokenizer = converted(path, lambda line: print(line, file=sys.stderr)).tokenizer.backend_tokenizer
        tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
        configure: Any = LlamaConfig
        config = configure(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            max_position_embeddings=8192, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True, eos_token_id=2, attn_implementation="sdpa",
        )  # fmt: skip
        model: Any = reference_llama(config, tensors)
        self.model = model.to(torch.bfloat16)
        self.batching = batching

    def serve(self, answer_all: Callable[[Callable[[Call], Found]], None]) -> None:
        """Answers calls until there are no more."""
        answer_all(self._one)

    def _one(self, call: Call) -> Found:
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
        with torch.inference_mode(), self.model.continuous_batching_context_manager(generation_config=settings) as manager:
            names = manager.add_requests(ids, max_new_tokens=tokens, streaming=True)
            times: dict[str, list[float]] = {name: [] for name in names}
            running = set(names)
            while running:
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("continuous batching gave nothing for a minute")
                more = len(result.generated_tokens) - len(times[result.request_id])
                times[result.request_id] += [time.perf_counter()] * more
                if result.is_finished():
                    running.discard(result.request_id)
        return list(times.values())


class LlamaCpp:
    """llama.cpp through llama-cpp-python. Runs under another interpreter, so nothing of the project is imported."""

    def __init__(self, threads: int, path: str) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]

        self.model = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def serve(self, answer_all: Callable[[Callable[[Call], Found]], None]) -> None:
        """Answers calls until there are no more."""
        answer_all(self._one)

    def _one(self, call: Call) -> Found:
        if call["do"] == "memory":
            return {"resident_mb": resident_mb(), "version": metadata.version("llama-cpp-python")}
        self.model.reset()
        self.model.eval(self.model.tokenize(prompts(1)[0].encode(), add_bos=False))
        times = []
        for _ in range(call["tokens"]):
            token = self.model.sample(temp=0.0)
            times.append(time.perf_counter())
            self.model.eval([token])
        return decoding([times])
