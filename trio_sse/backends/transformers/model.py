"""Loading a model by name: which files, which forward, which dtype, how many sequences. Must be called in the model thread.

- ``smollm2`` or ``FILE.gguf``, of Llama's architecture: the lean forward (lean.py, llama.py)
- a Hugging Face folder, of any causal LM: transformers' own forward (generic.py)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer

from trio_sse.backends.transformers.gguf_file import GgufTensors
from trio_sse.backends.transformers.lean import LeanModel, default_rooms, dimensions, read_weights, resolve_dtype
from trio_sse.backends.transformers.loading import converted, packaged_model
from trio_sse.backends.transformers.steps import StepModel
from trio_sse.backends.transformers.text import Vocabulary
from trio_sse.errors import ConfigError

__all__ = ["LoadedModel", "describer", "load_model"]

_MEMORY_SHARE = 4  # the caches may fill a quarter of what the machine has


class WarmModel(StepModel, Protocol):
    """A step model that knows how to warm itself."""

    def warm(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to step.

    Attributes:
      name: what clients call it.
      dtype: how its weights are held, spelt as the option is.
      steps: the model behind the engine's seam.
      tokenizer: has ``backend_tokenizer``, ``chat_template`` and ``apply_chat_template``.
      slots: how many sequences may generate at once.
      eos, context: as in :class:`StepModel`.
    """

    name: str
    dtype: str
    steps: WarmModel
    tokenizer: Any
    slots: int

    @property
    def eos(self) -> frozenset[int]:
        return self.steps.eos

    @property
    def context(self) -> int:
        return self.steps.context

    def warm(self) -> None:
        """Runs what is slow only the first time."""
        self.steps.warm()


def load_model(
    model: str, *, device: str, dtype: str, threads: int | None, slots: int | None, progress: Callable[[str], None]
) -> LoadedModel:
    """Loads ``model``; options as on the command line, ``None`` where the choice is left to the loader.

    Args:
      progress: takes a line about each phase. What it raises ends the loading.

    Raises:
      ConfigError: there is no such model, or it cannot be served as asked for.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    where = _device(device)
    name, path = ("smollm2", packaged_model()) if model == "smollm2" else (Path(model).name, Path(model).expanduser())
    if path.is_dir():
        from trio_sse.backends.transformers.generic import load_folder

        steps, held, tokenizer, rooms = load_folder(
            path, device=where, dtype=dtype, slots=slots, budget=_budget(where), describer=describer, progress=progress
        )
        return LoadedModel(name, held, steps, tokenizer, rooms)
    if not path.is_file():
        raise ConfigError(f"--model: {model} is neither smollm2 nor a folder nor a .gguf file")
    return _load_gguf(name.removesuffix(".gguf"), path, where, dtype, slots, progress)


def _load_gguf(
    name: str, path: Path, device: torch.device, dtype: str, slots: int | None, progress: Callable[[str], None]
) -> LoadedModel:
    progress(f"opening {path.name}")
    ready = converted(path, progress)
    tensors = GgufTensors(path, ready.index)
    sizes = dimensions(ready.index.metadata)
    held = resolve_dtype(dtype, tensors, device)
    progress(f"reading the weights as {held}")
    weights = read_weights(tensors, held, device, progress)
    budget = _budget(device)
    rooms = slots or default_rooms(sizes, budget)
    describe = describer(ready.tokenizer.backend_tokenizer)
    try:
        steps = LeanModel(sizes, weights, eos=ready.eos, rooms=rooms, budget=budget, describe=describe, device=device)
    except (OSError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"--slots: there is no room for the caches of {rooms} sequences") from error
    return LoadedModel(name, held, steps, ready.tokenizer, rooms)


def describer(tokenizer: Tokenizer) -> Callable[[int], tuple[str, bytes]]:
    """Gives a token's text and bytes; special tokens, which leave no text in an answer, are spelt out here."""
    vocabulary = Vocabulary(tokenizer)

    def describe(id: int) -> tuple[str, bytes]:
        data = vocabulary.bytes_of(id)
        if data is None:
            data = (tokenizer.id_to_token(id) or "").encode()
        return data.decode(errors="replace"), data

    return describe


def _device(device: str) -> torch.device:
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    missing = (device == "cuda" and not torch.cuda.is_available()) or (device == "mps" and not torch.backends.mps.is_available())
    if missing:
        raise ConfigError(f"--device: torch finds no {device} here")
    return torch.device(device)


def _budget(device: torch.device) -> int:
    """Bytes of cache memory there may be."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory) // _MEMORY_SHARE
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _MEMORY_SHARE
    except (AttributeError, ValueError, OSError):
        return 1 << 30
