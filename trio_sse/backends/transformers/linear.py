"""Linear layers without bias, float32 in and float32 out, over weights in whatever form is quickest to read.

    float32    torch's own; the reference
    bfloat16   torch's own, activations rounded to bfloat16 on the way in
    float16    FBGEMM's packed half-precision weights with float32 activations where torch has it (x86), torch's own elsewhere
    int4       the file's 4-bit groups as they are, multiplied by :data:`_INT4`; what is not 4-bit in the file is bfloat16

Activations stay float32 between layers, so a form costs accuracy only inside its own products.

**A row's result must not depend on the rows beside it**: that is what makes a sequence's tokens the same alone and in company. Kernels
are free to sum in another order for another number of rows, and some do, for a few numbers (one row takes another path than four).
So each kernel is asked once: :func:`row_counts` computes the same rows in batches of every size, and tells which sizes agree
with each other bit for bit. A step's rows are then padded to the next number on which all kernels of the model agree with themselves.

This is the one file that uses kernels torch does not document: the int4 and int8 products and the packed half-precision one.
Each is looked up once; where it is missing the layer falls back to bfloat16, half or float32 weights of the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from trio_sse.backends.transformers.gguf_file import Quantised

__all__ = ["Kernel", "RowCounts", "dense_kernel", "has_packed_half", "int4_kernel", "int8_kernel", "row_counts"]

Kernel = Callable[[Tensor], Tensor]  # (rows, K) float32 → (rows, N) float32

_GROUP = 32
_LARGEST = 48  # rows that one call of a kernel takes: a prompt chunk and some; more are cut into pieces


def _operator(namespace: str, name: str) -> Callable[..., Tensor] | None:
    return getattr(getattr(torch.ops, namespace), name, None)


_INT4_PACK = _operator("aten", "_convert_weight_to_int4pack_for_cpu")
_INT4 = _operator("aten", "_weight_int4pack_mm_for_cpu")
_INT8 = _operator("aten", "_weight_int8pack_mm")
_HALF_PACK = _operator("quantized", "linear_prepack_fp16")
_HALF = _operator("quantized", "linear_dynamic_fp16")


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
    return lambda x: linear(x.to(dtype), held).float()


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
    return lambda x: multiply(x.to(torch.bfloat16), packed, _GROUP, groups).float()


def int8_kernel(weight: Tensor, device: torch.device) -> Kernel | None:
    """A layer from float32 ``weight``, rounded to 8 bits with one scale per output; None where the kernel is missing."""
    if _INT8 is None or device.type != "cpu":
        return None
    multiply = _INT8
    scale = weight.abs().amax(dim=1) / 127
    q = (weight / scale.clamp_min(1e-30)[:, None]).round_().to(torch.int8)
    half = scale.to(torch.bfloat16)
    # One scale for a whole row: rounded to bfloat16 it would be off by up to 0.4 % for all of the row, so the rest is put right after.
    rest = scale / half.float().clamp_min(1e-30)
    return lambda x: multiply(x.to(torch.bfloat16), q, half).float() * rest


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
