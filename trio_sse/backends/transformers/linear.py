"""Linear layers without bias, over weights in whatever form is quickest to read.

    float32    torch's own; the reference
    bfloat16   torch's own, activations rounded to bfloat16 on the way in
    float16    FBGEMM's packed half-precision weights with float32 activations where torch has it (x86), torch's own elsewhere
    int4       the file's 4-bit groups as they are, multiplied by :data:`_INT4`; what is not 4-bit in the file is bfloat16
    int8       a scale per output; activations in 16 bits, as two bytes, each multiplied in whole numbers (for the head of int4)

A layer takes float32 and gives float32 or what its kernel gives. What is added up over the layers is float32 always.

**A row's result must not depend on the rows beside it**: that is what makes a sequence's tokens the same alone and in company. Kernels
are free to sum in another order for another number of rows, and some do, for a few numbers (one row takes another path than four).
So each kernel is asked once: :func:`row_counts` computes the same rows in batches of every size, and tells which sizes agree
with each other bit for bit. A step's rows are then padded to the next number on which all kernels of the model agree with themselves.

This is the one file that uses kernels torch does not document: the int4 and int8 products and the packed half-precision one.
Each is looked up once; where it is missing the layer falls back to bfloat16, half or float32 weights of the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from trio_sse.backends.transformers.gguf_file import Quantised

__all__ = ["Kernel", "RowCounts", "dense_kernel", "has_packed_half", "int4_kernel", "int8_kernel", "row_counts", "wide_vectors"]

Kernel = Callable[[Tensor], Tensor]  # (rows, K) → (rows, N)

_GROUP = 32
_LARGEST = 48  # rows that one call of a kernel takes: a prompt chunk and some; more are cut into pieces


def _operator(namespace: str, name: str) -> Callable[..., Tensor] | None:
    return getattr(getattr(torch.ops, namespace), name, None)


_INT4_PACK = _operator("aten", "_convert_weight_to_int4pack_for_cpu")
_INT4 = _operator("aten", "_weight_int4pack_mm_for_cpu")
_INT8_PACK = _operator("onednn", "qlinear_prepack")
_INT8 = _operator("onednn", "qlinear_pointwise")
_HALF_PACK = _operator("quantized", "linear_prepack_fp16")
_HALF = _operator("quantized", "linear_dynamic_fp16")


def wide_vectors() -> bool:
    """Whether torch uses AVX-512 here."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def has_packed_half(device: torch.device) -> bool:
    """Whether half-precision weights can be multiplied by float32 activations without unpacking them first."""
    return device.type == "cpu" and _HALF is not None and "fbgemm" in torch.backends.quantized.supported_engines


def dense_kernel(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Kernel:
    """A layer from float32 ``weight`` (N, K), held in ``dtype`` on ``device``."""
    if dtype is torch.float16 and has_packed_half(device):
        assert _HALF_PACK is not None
        assert _HALF is not None
        multiply, packed = _HALF, _HALF_PACK(weight.contiguous(), None)
        return lambda x: multiply(x, packed)
    held = weight.to(device=device, dtype=dtype)
    if dtype is torch.float32:
        return lambda x: linear(x, held)
    return lambda x: linear(x.to(dtype), held)


def int4_kernel(weights: list[Quantised], device: torch.device) -> Kernel | None:
    """A layer whose outputs are those of ``weights``, one after the other; None where the kernel is missing or refuses the shape."""
    rows, columns = sum(w.q.shape[0] for w in weights), weights[0].q.shape[1]
    if _INT4 is None or _INT4_PACK is None or device.type != "cpu" or rows % 16 or columns % _GROUP:
        return None
    multiply = _INT4
    packed = _INT4_PACK(torch.cat([w.q for w in weights]).to(torch.int32), 1)
    scale, zero = torch.cat([w.scale for w in weights]), torch.cat([w.zero for w in weights])
    # The kernel wants (K/32, N, 2). It is quick with bfloat16 activations only.
    groups = torch.stack((scale.t(), zero.t()), dim=-1).to(torch.bfloat16).contiguous()
    return lambda x: multiply(x.to(torch.bfloat16), packed, _GROUP, groups)


def int8_kernel(weight: Tensor, device: torch.device) -> Kernel | None:
    """A layer from float32 ``weight``, rounded to 8 bits with one scale per output; None where its kernel is missing or slow.

    The kernel multiplies unsigned by signed bytes and adds up in whole numbers, which processors with VNNI do four at a time: 16 rows
    of a head of 49152 × 576 in 3.3 ms instead of the 9.3 of torch's int8 kernel for bfloat16 activations. A byte would be too coarse
    for activations (perplexity 1 to 3 % worse), so each is written as 256·high + low, and both halves are rows of one product.
    """
    if device.type != "cpu" or not _multiplies_bytes():
        return None
    assert _INT8_PACK is not None
    scale = (weight.abs().amax(dim=1) / 127).clamp_min_(1e-30)
    packed = _INT8_PACK((weight / scale[:, None]).round_().to(torch.int8), None)
    # The kernel takes both halves less 128. So what it is given is larger by 128·256 + 128; the half rounds to nearest.
    raised = torch.tensor(128 * 256 + 128.5)
    largest = 127 * 256.0
    product = _bytes_product(packed, scale)

    def call(x: Tensor) -> Tensor:
        rows, columns = x.shape
        peak = torch.linalg.vector_norm(x, math.inf, -1, keepdim=True).clamp_min_(1e-30)
        halves = torch.addcmul(raised, x, largest / peak).to(torch.int32).view(torch.uint8).view(rows, columns, 4)[..., :2]
        low, high = product(halves.permute(2, 0, 1).reshape(2 * rows, columns)).view(2, rows, -1)
        return torch.add(low, high, alpha=256).mul_(peak / largest)

    return call


def _bytes_product(packed: Tensor, scale: Tensor) -> Kernel:
    """(x − 128) · weight · scale in float32, for uint8 ``x`` (rows, K) and a packed int8 weight (N, K)."""
    assert _INT8 is not None
    multiply, zero = _INT8, torch.zeros(len(scale), dtype=torch.int32)
    return lambda x: multiply(x, 1.0, 128, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], "")


@cache
def _multiplies_bytes() -> bool:
    """Whether bytes are multiplied quickly and exactly here. Before VNNI, sums of two products were cut off at 16 bits."""
    if _INT8 is None or _INT8_PACK is None or not wide_vectors():
        return False
    weight, x = torch.full((64, 64), 127, dtype=torch.int8), torch.full((2, 64), 255, dtype=torch.uint8)
    return bool((_bytes_product(_INT8_PACK(weight, None), torch.ones(64))(x) == 127 * 127 * 64).all())


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The numbers of rows that a kernel treats alike, ascending. Empty: none was found, and results may differ in the last bits."""

    alike: tuple[int, ...]

    def __and__(self, other: RowCounts) -> RowCounts:
        """What both treat alike."""
        return RowCounts(tuple(n for n in self.alike if n in other.alike))

    def padded(self, rows: int) -> int:
        """How many rows ``rows`` rows should be computed as: pieces of the largest number, and a last one of some number of ours."""
        if not self.alike:
            return rows
        whole, rest = divmod(rows, self.alike[-1])
        return whole * self.alike[-1] + (next(n for n in self.alike if n >= rest) if rest else 0)

    def wrap(self, kernel: Kernel) -> Kernel:
        """``kernel``, given a padded number of rows, called with pieces that it treats alike."""
        if not self.alike:
            return kernel
        largest = self.alike[-1]

        def call(x: Tensor) -> Tensor:
            if x.shape[0] <= largest:
                return kernel(x)
            return torch.cat([kernel(piece) for piece in x.split(largest)])

        return call


def row_counts(kernel: Kernel, columns: int, device: torch.device, largest: int = _LARGEST) -> RowCounts:
    """Asks ``kernel`` (of ``columns`` inputs) for which numbers of rows, up to ``largest``, it gives every row the same result."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * largest, columns, generator=generator).to(device)
    # The largest size is the measure of the others, unless it happens to be an odd one out.
    best: list[int] = []
    for measure in (largest, largest - 8, largest // 2):
        expected = torch.cat([kernel(piece.contiguous()) for piece in x[: 2 * largest // measure * measure].split(measure)])
        alike = [n for n in range(1, largest + 1) if _agrees(kernel, x, expected, n)]
        if len(alike) > len(best):
            best = alike
        if len(best) > largest // 2:
            break
    return RowCounts(tuple(best) if len(best) > 1 else ())


def _agrees(kernel: Kernel, x: Tensor, expected: Tensor, rows: int) -> bool:
    """Whether ``rows`` rows at a time, from two different places, come out as ``expected``."""
    for begin in (0, expected.shape[0] - rows):
        if not torch.equal(kernel(x[begin : begin + rows].contiguous()), expected[begin : begin + rows]):
            return False
    return True
