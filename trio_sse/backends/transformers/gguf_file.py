"""A GGUF file as this package reads it: an index made once, and tensors taken straight from the file afterwards.

The ``gguf`` package needs seconds to walk through the vocabulary, so its result is kept: :func:`read_index` gives a plain,
JSON-ready :class:`GgufIndex` (see ``loading``, which stores it). With the index, a tensor is an offset into a memory map.

Quantised tensors consist of blocks of 32 weights along a row. The three kinds that matter here are unpacked by a few torch
operations; every other kind goes through ``gguf.quants``:

    Q4_0   f16 d, 16 bytes q          weight = (q − 8)·d
    Q4_1   f16 d, f16 m, 16 bytes q   weight = q·d + m            byte i holds weight i (low half) and i + 16 (high half)
    Q8_0   f16 d, 32 int8 q           weight = q·d

Rules:

1. The file is never written to, and never trusted: what does not fit the index raises :class:`~trio_sse.errors.ConfigError`.
2. Rows are rows: a tensor of shape (N, K) maps K inputs to N outputs, as in ``torch.nn.Linear``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from trio_sse.errors import ConfigError

__all__ = ["GgufIndex", "GgufTensors", "Quantised", "read_index"]

_GROUP = 32
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


class TensorInfo(msgspec.Struct, frozen=True):
    """Where one tensor lies: its kind, its shape with the longest stride first, and its bytes in the file."""

    kind: str
    shape: list[int]
    offset: int
    size: int


class GgufIndex(msgspec.Struct, frozen=True):
    """What is kept of a GGUF file's head: the scalar metadata and where the tensors are."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class Quantised(msgspec.Struct, frozen=True):
    """A Q4 tensor in its own form: ``q`` (N, K) uint8 in 0..15, ``scale`` and ``zero`` (N, K/32): weight = (q − 8)·scale + zero."""

    q: Tensor
    scale: Tensor
    zero: Tensor


def read_index(path: Path) -> GgufIndex:
    """Walks through the file's head. Slow (seconds): most of it is the vocabulary, which is not kept."""
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ConfigError(f"--model: {path} is no GGUF file that can be read: {error}") from error
    metadata = {
        name: field.contents()
        for name, field in reader.fields.items()
        if GGUFValueType.ARRAY not in field.types and not name.startswith("GGUF.")
    }
    tensors = {
        tensor.name: TensorInfo(
            tensor.tensor_type.name, [int(n) for n in reversed(tensor.shape)], int(tensor.data_offset), int(tensor.n_bytes)
        )
        for tensor in reader.tensors
    }
    return GgufIndex(metadata, tensors)


class GgufTensors:
    """The tensors of one file, read through a private memory map, so that only what is used is ever in memory."""

    def __init__(self, path: Path, index: GgufIndex) -> None:
        self.index = index
        # Copy-on-write, because torch wants writable memory; nothing is written.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        end = max((info.offset + info.size for info in index.tensors.values()), default=0)
        if end > self._bytes.size:
            raise ConfigError(f"--model: {path} is cut short")

    def __contains__(self, name: str) -> bool:
        return name in self.index.tensors

    def quantised(self, name: str) -> Quantised | None:
        """The tensor in its 4-bit form; None where it is of another kind."""
        info = self._info(name)
        if info.kind not in ("Q4_0", "Q4_1"):
            return None
        blocks = self._blocks(info)
        head = 2 if info.kind == "Q4_0" else 4
        d = blocks[..., 0:2].clone().view(torch.float16)[..., 0].float()
        nibbles = blocks[..., head:]
        q = torch.cat((nibbles & 15, nibbles >> 4), dim=-1).flatten(-2)
        if info.kind == "Q4_0":
            return Quantised(q, d, torch.zeros_like(d))
        m = blocks[..., 2:4].clone().view(torch.float16)[..., 0].float()
        return Quantised(q, d, m + 8 * d)

    def dense(self, name: str) -> Tensor:
        """The tensor as float32."""
        info = self._info(name)
        if (quantised := self.quantised(name)) is not None:
            groups: Tensor = quantised.q.unflatten(-1, (-1, _GROUP)).float() - 8
            return (groups * quantised.scale[..., None] + quantised.zero[..., None]).flatten(-2)
        if info.kind == "Q8_0":
            blocks = self._blocks(info)
            d = blocks[..., 0:2].clone().view(torch.float16).float()
            return (blocks[..., 2:].view(torch.int8).float() * d).flatten(-2)
        raw = self._raw(info)
        if info.kind in ("F32", "F16", "BF16"):
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.kind]
            return torch.from_numpy(raw).view(dtype).view(info.shape).float()
        return self._dense_by_gguf(info, raw)

    def _dense_by_gguf(self, info: TensorInfo, raw: np.ndarray[Any, Any]) -> Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            values = dequantize(raw.reshape(*info.shape[:-1], -1), GGMLQuantizationType[info.kind])
        except (KeyError, NotImplementedError) as error:
            raise ConfigError(f"--model: weights of type {info.kind} cannot be read") from error
        return torch.from_numpy(np.ascontiguousarray(values)).view(info.shape).float()

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.index.tensors[name]
        except KeyError:
            raise ConfigError(f"--model: the GGUF file has no tensor {name}") from None

    def _raw(self, info: TensorInfo) -> np.ndarray[Any, Any]:
        return self._bytes[info.offset : info.offset + info.size]

    def _blocks(self, info: TensorInfo) -> Tensor:
        size = _BLOCK_BYTES[info.kind]
        if info.size * _GROUP != size * int(np.prod(info.shape)):
            raise ConfigError(f"--model: a tensor of type {info.kind} has an impossible size")
        raw = torch.from_numpy(self._raw(info))
        blocks: Tensor = raw.view(*info.shape[:-1], info.shape[-1] // _GROUP, size)
        return blocks
