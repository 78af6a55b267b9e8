"""Llama-type GGUF files as a step model: builds the lean forward from the file, and serves steps from it.

How the weights are held is chosen once, for all layers (``dtype``):

    float32             the reference
    bfloat16, float16   rounded; float16 keeps float32 activations where torch can multiply the two
    int4                the file's own 4-bit groups; the head in 8 bits
    auto                on a processor with AVX-512, int4: it reads least. Without, float16: unpacking 4 bits costs more there than
                        reading 16 does as soon as a few sequences share a step
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trio_sse.backends.transformers.cache import CachePool, LeanCache, rounded, settle
from trio_sse.backends.transformers.gguf_file import GgufTensors
from trio_sse.backends.transformers.linear import (
    Kernel,
    RowCounts,
    dense_kernel,
    has_packed_half,
    int4_kernel,
    int8_kernel,
    row_counts,
    wide_vectors,
)
from trio_sse.backends.transformers.llama import Dimensions, Layer, LlamaForward, Weights
from trio_sse.backends.transformers.sampling import Describe, Sampler, choose
from trio_sse.backends.transformers.steps import Cache, Chosen, StepFailure, Work
from trio_sse.errors import ConfigError
from trio_sse.events import Sampling

__all__ = ["LeanModel", "dimensions", "read_weights", "resolve_dtype"]

_CHUNK = 16  # a chunk at the end of a 4000-token prompt should take no more than 150 ms on two cores, busy ones included
_PROBE = 512  # outputs of a kernel that is only asked how it treats rows


def resolve_dtype(dtype: str, tensors: GgufTensors, device: torch.device) -> str:
    """What ``auto`` means for this file on this machine."""
    if dtype != "auto":
        return dtype
    if device.type != "cpu":
        return "float16"
    if wide_vectors() and tensors.index.tensors["blk.0.ffn_up.weight"].kind in ("Q4_0", "Q4_1"):
        return "int4"
    return "float16" if has_packed_half(device) else "float32"


def dimensions(metadata: dict[str, Any]) -> Dimensions:
    """A GGUF file's sizes.

    Raises:
      ConfigError: a size is missing, or the file needs what this forward does not do (experts, other rotary scalings).
    """
    try:
        heads, hidden = int(metadata["llama.attention.head_count"]), int(metadata["llama.embedding_length"])
        found = Dimensions(
            layers=int(metadata["llama.block_count"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
            head_dim=int(metadata.get("llama.attention.key_length", hidden // heads)),
            context=int(metadata["llama.context_length"]),
            eps=float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--model: the GGUF file does not say its {error}") from error
    if metadata.get("llama.expert_count", 0):
        raise ConfigError("--model: GGUF files with a mixture of experts are not supported")
    if metadata.get("llama.rope.scaling.type", "none") not in ("none", "linear"):
        raise ConfigError(f"--model: rotary scaling of type {metadata['llama.rope.scaling.type']} is not supported")
    if metadata.get("llama.rope.dimension_count", found.head_dim) != found.head_dim:
        raise ConfigError("--model: rotary embedding of a part of each head is not supported")
    return found


def _frequencies(tensors: GgufTensors, head_dim: int) -> Tensor:
    metadata = tensors.index.metadata
    base = float(metadata.get("llama.rope.freq_base", 10000.0))
    frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if "rope_freqs.weight" in tensors:  # Llama 3's scaling, worked out by whoever made the file
        frequencies = frequencies / tensors.dense("rope_freqs.weight")
    if metadata.get("llama.rope.scaling.type") == "linear":
        frequencies = frequencies / float(metadata.get("llama.rope.scaling.factor", 1.0))
    return frequencies


class _Builder:
    """Makes layers of tensors. ``rows`` are the numbers of rows that all of them treat alike; one layer of each kind is asked."""

    def __init__(self, tensors: GgufTensors, dtype: str, device: torch.device) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._counts: dict[tuple[str, int], RowCounts] = {}
        self.rows = RowCounts(tuple(range(1, 1 << 10)))

    def layer(self, *names: str) -> Kernel:
        """A linear layer that gives the outputs of all ``names`` side by side."""
        if self._dtype == "int4":
            quantised = [q for name in names if (q := self._tensors.quantised(name)) is not None]
            kernel = int4_kernel(quantised, self._device) if len(quantised) == len(names) else None
            if kernel is not None:
                return self._counted(kernel, "int4", quantised[0].q.shape[1], lambda: kernel)
        weight = torch.cat([self._tensors.dense(name) for name in names])
        return self._dense(weight, torch.bfloat16 if self._dtype == "int4" else getattr(torch, self._dtype))

    def head(self, name: str) -> Kernel:
        weight = self._tensors.dense(name)
        if self._dtype != "int4":
            return self._dense(weight, getattr(torch, self._dtype))
        kernel = int8_kernel(weight, self._device)
        if kernel is None:
            return self._dense(weight, torch.float16)
        return self._counted(kernel, "int8", weight.shape[1], lambda: int8_kernel(weight[:_PROBE], self._device))

    def _dense(self, weight: Tensor, dtype: torch.dtype) -> Kernel:
        kernel = dense_kernel(weight, dtype, self._device)
        return self._counted(kernel, str(dtype), weight.shape[1], lambda: dense_kernel(weight[:_PROBE], dtype, self._device))

    def _counted(self, kernel: Kernel, kind: str, columns: int, probe: Callable[[], Kernel | None]) -> Kernel:
        """``kernel``, once it is known which numbers of rows suit it. ``probe`` makes a small one of its kind, which is asked."""
        if (kind, columns) not in self._counts and (small := probe()) is not None:
            self._counts[kind, columns] = row_counts(small, columns, self._device)
            self.rows &= self._counts[kind, columns]
        return kernel


def read_weights(tensors: GgufTensors, dtype: str, device: torch.device, progress: Callable[[str], None]) -> Weights:
    """Reads a whole model."""
    build = _Builder(tensors, dtype, device)
    sizes = dimensions(tensors.index.metadata)
    layers = []
    for n in range(sizes.layers):
        if n % 10 == 0:
            progress(f"reading layers, {n} of {sizes.layers}")
        block = f"blk.{n}."
        layers.append(
            Layer(
                tensors.dense(block + "attn_norm.weight").to(device),
                build.layer(*(block + f"attn_{part}.weight" for part in "qkv")),
                build.layer(block + "attn_output.weight"),
                tensors.dense(block + "ffn_norm.weight").to(device),
                build.layer(block + "ffn_gate.weight", block + "ffn_up.weight"),
                build.layer(block + "ffn_down.weight"),
            )
        )
    progress("reading the head")
    table = torch.float32 if dtype == "float32" else torch.float16
    embedding = tensors.dense("token_embd.weight").to(device=device, dtype=table)
    head = build.head("output.weight" if "output.weight" in tensors else "token_embd.weight")
    norm = tensors.dense("output_norm.weight").to(device)
    return Weights(embedding, layers, norm, head, _frequencies(tensors, sizes.head_dim), build.rows)


class LeanModel:
    """A :class:`~…steps.StepModel` over :class:`LlamaForward`.

    Args:
      sizes, weights: the model.
      eos: the ids that end a generation.
      rooms: how many sequences may be open at once.
      budget: cache memory there is, in bytes.
      describe: text and bytes of a token, for log probabilities.
    """

    def __init__(
        self,
        sizes: Dimensions,
        weights: Weights,
        *,
        eos: frozenset[int],
        rooms: int,
        budget: int,
        describe: Describe,
        device: torch.device,
    ) -> None:
        self.context, self.eos, self.chunk = sizes.context, eos, _CHUNK
        self.exact = bool(weights.rows.alike)  # whether results are the same to the bit in any company
        self._device = device
        self._pool = CachePool(sizes.layers, rooms, sizes.kv_heads, sizes.context, sizes.head_dim, device)
        self._forward = LlamaForward(sizes, weights, self._pool, device)
        self._describe = describe
        self._vocabulary = weights.embedding.shape[0]
        self.pool_bytes = min(budget, rooms * self.cache_bytes(sizes.context))

    def cache_bytes(self, capacity: int) -> int:
        return rounded(capacity) * self._pool.token_bytes

    def open(self, capacity: int, sampling: Sampling, prompt: list[int]) -> LeanCache:
        sampler = Sampler(sampling, prompt, self._vocabulary)
        return LeanCache(self._pool.take(), min(capacity, self.context), sampler)

    @torch.inference_mode()
    def step(self, work: list[Work]) -> list[Chosen | StepFailure | None]:
        feeds = [(_lean(item.cache), item.ids) for item in work]
        wanted = [n for n, item in enumerate(work) if item.choose]
        logits = self._forward(feeds, wanted)
        results: list[Chosen | StepFailure | None] = [None] * len(work)
        if logits is not None:
            chosen = choose(logits, [feeds[n][0].sampler for n in wanted], self._describe)
            for n, result in zip(wanted, chosen, strict=True):
                results[n] = result
        return results

    @torch.inference_mode()
    def logits(self, cache: Cache, ids: list[int]) -> Tensor:
        """Feeds ``ids`` and gives the logits after each of them, (len(ids), vocabulary) float32: for measuring quality."""
        return self._forward.every(_lean(cache), ids)

    def close(self, cache: Cache) -> int:
        lean = _lean(cache)
        if lean.closed:
            raise ValueError("this cache was closed before")
        lean.closed = True
        settle(self._device)
        self._pool.give_back(lean.room, lean.length)
        return self.cache_bytes(lean.capacity)

    def warm(self) -> None:
        """One prompt and one decoding step, so that the first request finds memory and kernels ready."""
        cache = self.open(64, Sampling(), [0])
        try:
            self.step([Work(cache, [0] * min(self.chunk, self.context // 2), choose=True)])
            self.step([Work(cache, [0], choose=True)])
        finally:
            self.close(cache)


def _lean(cache: Cache) -> LeanCache:
    assert isinstance(cache, LeanCache)
    return cache


def default_rooms(sizes: Dimensions, budget: int) -> int:
    """As many sequences as have room for half a context each, up to 16: beyond that a step takes too long to be pleasant."""
    full = sizes.context * sizes.layers * sizes.kv_heads * sizes.head_dim * 8
    return max(1, min(16, math.floor(2 * budget / full)))
