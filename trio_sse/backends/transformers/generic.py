"""Any causal language model transformers can load: its own forward, one sequence at a time.

transformers keeps a cache per call, in whatever form a model likes, so each sequence has one of its own and a step runs one forward per
item. That costs what batching would save, and gives two things for nothing: a sequence cannot notice its neighbours, and a
forward that fails fails for its own item. Llama-type GGUF files have the lean forward instead.

Cache memory is counted by what a token was seen to take (:func:`_token_bytes`), and given back by letting go of the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trio_sse.backends.transformers.cache import settle
from trio_sse.backends.transformers.sampling import Describe, Sampler, choose
from trio_sse.backends.transformers.steps import Cache, Chosen, StepFailure, Work
from trio_sse.errors import ConfigError
from trio_sse.events import Sampling

__all__ = ["GenericModel", "load_folder"]

_CHUNK = 32
_SLOTS = 4
_PROBE = 8  # tokens fed to see what one takes


class GenericCache:
    """One sequence: the model's own cache, made by the first forward, and its sampler."""

    __slots__ = ("capacity", "closed", "length", "past", "sampler")

    def __init__(self, capacity: int, sampler: Sampler) -> None:
        self.capacity = capacity
        self.length = 0
        self.past: Any = None
        self.sampler = sampler
        self.closed = False


class GenericModel:
    """A :class:`~…steps.StepModel` over a transformers model.

    Args:
      model: in evaluation mode, on its device.
      eos: the ids that end a generation.
      rooms: how many sequences the pool is for.
      budget: cache memory there is, in bytes.
      describe: text and bytes of a token, for log probabilities.
    """

    def __init__(self, model: Any, *, eos: frozenset[int], rooms: int, budget: int, describe: Describe) -> None:
        config = model.config.get_text_config()
        self.context = int(getattr(config, "max_position_embeddings", None) or 2048)
        self.eos, self.chunk = eos, min(_CHUNK, self.context)
        self._model, self._describe = model, describe
        self._vocabulary = int(config.vocab_size)
        # Only the last position's logits are looked at, and most models can be told so.
        takes = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._past = "cache" if "cache" in takes else "past_key_values"  # as newer and older versions call it
        self._token_bytes = self._measure()
        self.pool_bytes = min(budget, rooms * self.cache_bytes(self.context))

    def cache_bytes(self, capacity: int) -> int:
        return capacity * self._token_bytes

    def open(self, capacity: int, sampling: Sampling, prompt: list[int]) -> GenericCache:
        return GenericCache(min(capacity, self.context), Sampler(sampling, prompt, self._vocabulary))

    def step(self, work: list[Work]) -> list[Chosen | StepFailure | None]:
        return [self._step_one(item) for item in work]

    @torch.inference_mode()
    def _step_one(self, item: Work) -> Chosen | StepFailure | None:
        cache = _own(item.cache)
        try:
            logits = self._feed(cache, item.ids)
            return choose(logits[None], [cache.sampler], self._describe)[0] if item.choose else None
        except Exception as error:  # noqa: BLE001  (a sequence's own fault; the others go on)
            return StepFailure(error)

    def _feed(self, cache: GenericCache, ids: list[int]) -> Tensor:
        if not ids or cache.length + len(ids) > cache.capacity:
            raise ValueError(f"{len(ids)} tokens after {cache.length} do not fit a cache of {cache.capacity}")
        fed = torch.tensor([ids], device=self._model.device)
        out = self._model(input_ids=fed, use_cache=True, **{self._past: cache.past}, **self._options)
        cache.past = out[self._past]
        cache.length += len(ids)
        logits: Tensor = out.logits[0, -1].float()
        return logits

    def close(self, cache: Cache) -> int:
        own = _own(cache)
        if own.closed:
            raise ValueError("this cache was closed before")
        settle(self._model.device)
        own.past, own.closed = None, True
        return self.cache_bytes(own.capacity)

    def warm(self) -> None:
        """One prompt and one decoding step."""
        cache = self.open(self.context, Sampling(), [0])
        try:
            for ids in ([0] * min(_PROBE, self.context - 1), [0]):
                if isinstance(result := self.step([Work(cache, ids, choose=True)])[0], StepFailure):
                    raise result.error
        finally:
            self.close(cache)

    @torch.inference_mode()
    def _measure(self) -> int:
        """Bytes of cache per token, from a short forward."""
        count = min(_PROBE, self.context)
        fed = torch.zeros(1, count, dtype=torch.long, device=self._model.device)
        out = self._model(input_ids=fed, use_cache=True, **self._options)
        if out.get(self._past) is None:
            raise ConfigError("--model: this kind of model keeps no cache of keys and values, and cannot be streamed here")
        return max(1, sum(tensor.nbytes for tensor in _tensors(out[self._past])) // count)


def _tensors(past: Any) -> Iterator[Tensor]:
    for layer in past.layers:
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if isinstance(tensor, Tensor):
                yield tensor


def _own(cache: Cache) -> GenericCache:
    assert isinstance(cache, GenericCache)
    return cache


def load_folder(
    path: Path,
    *,
    device: torch.device,
    dtype: str,
    slots: int | None,
    budget: int,
    describer: Callable[[Any], Describe],
    progress: Callable[[str], None],
) -> tuple[GenericModel, str, Any, int]:
    """Loads a Hugging Face folder: the model, how its weights are held, its tokenizer, and how many sequences it is for.

    Raises:
      ConfigError: transformers cannot make a causal language model, or a fast tokenizer, of it.
    """
    if dtype == "int4":
        raise ConfigError("--dtype: int4 is for .gguf files with 4-bit weights")
    progress("importing transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        progress("reading the tokenizer")
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        progress("reading the weights")
        wanted = _dtype(dtype, device)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model: {path} cannot be loaded: {str(error).splitlines()[0]}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"--model: {path} has no tokenizer of the fast kind")
    model.eval().to(device)
    rooms = slots or _SLOTS
    describe = describer(tokenizer.backend_tokenizer)
    steps = GenericModel(model, eos=_ends(model, tokenizer), rooms=rooms, budget=budget, describe=describe)
    return steps, str(model.dtype).removeprefix("torch."), tokenizer, rooms


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        found: torch.dtype = getattr(torch, dtype)
        return found
    if device.type != "cpu":
        return torch.float16 if device.type == "mps" else torch.bfloat16
    # Without AVX-512, products in bfloat16 are several times slower than in float32.
    return torch.bfloat16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else torch.float32


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a generation; files give one, a list or none, and not all in the same place."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config):
        found = getattr(source, "eos_token_id", None)
        ids.update([found] if isinstance(found, int) else found or [])
    if not ids and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
