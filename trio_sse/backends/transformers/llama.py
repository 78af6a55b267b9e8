"""The lean forward: Llama-type models from a GGUF file, with many sequences in one step.

transformers' forward is general, and pays for it with about 8 ms of Python and small operations per step of a 30-layer model.
This one does the same arithmetic with a dozen operations per layer, reads 4-bit weights as they are, and keeps its cache in place.

Rows are tokens. A step's rows are all decoded tokens first, ordered by room, then each prompt chunk; every layer runs once over
all rows, and only attention looks at which sequence a row belongs to::

    rows:   d d d d | p p p p p p p | p p p        d: one token of a sequence that decodes, p: a prompt chunk
    decode:   neighbouring rooms together, in one batched product over (rooms × kv heads); lengths padded, and masked
    prefill:  one attention per chunk

Rules:

1. A row's arithmetic does not depend on the other rows: their number is padded as linear.py says, decoding pads lengths to multiples
   of ``cache.ROUND``, chunks stand alone. So a sequence's logits are the same, to the bit, alone and in company.
2. Rotary embedding treats neighbouring pairs as complex numbers. GGUF stores the rows of q and k in just that order; transformers
   keeps the halves apart. Scores are the same, because q and k are permuted alike.
3. Only rows from which a token is to be chosen reach the head.
4. A forward that fails leaves every ``length`` as it was, so the same step could be tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, pad, scaled_dot_product_attention, silu

from trio_sse.backends.transformers.cache import CachePool, LeanCache, rounded
from trio_sse.backends.transformers.linear import Kernel, RowCounts

__all__ = ["Dimensions", "Layer", "LlamaForward", "Weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a model; ``context`` in tokens. ``eps`` keeps the norm from dividing by zero."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float

    @property
    def group(self) -> int:
        """How many query heads share one key."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. ``qkv`` gives queries, keys and values side by side; ``gate_up`` the gate, then what it lets through."""

    attention_norm: Tensor
    qkv: Kernel
    out: Kernel
    mlp_norm: Tensor
    gate_up: Kernel
    down: Kernel


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model. ``embedding`` (vocabulary, hidden) in any dtype; ``frequencies`` (head_dim / 2) in radians per position.

    ``rows`` are the numbers of rows that all kernels treat alike.
    """

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Kernel
    frequencies: Tensor
    rows: RowCounts


@dataclass(frozen=True, slots=True)
class _Run:
    """Decoding rows ``begin`` to ``end``, whose sequences lie in the rooms from ``room`` on. ``mask`` (rows × kv heads, 1, length)."""

    begin: int
    end: int
    room: int
    length: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prompt chunk in rows ``begin`` to ``end``; ``mask`` (rows, length) where earlier tokens are cached, else None for a triangle."""

    begin: int
    end: int
    room: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step's layout: where rows are written, how they are rotated, and who attends to what."""

    turns: Tensor  # (rows, heads + 2 kv_heads, head_dim / 2), complex; ones for values
    writes: Tensor  # (rows, 2 kv_heads), row numbers in CachePool.flat
    runs: list[_Run]
    chunks: list[_Chunk]
    rows: int  # of tokens; those behind them are padding


class LlamaForward:
    """The arithmetic of one step over a :class:`CachePool`."""

    def __init__(self, dimensions: Dimensions, weights: Weights, pool: CachePool, device: torch.device) -> None:
        self.dimensions, self.weights, self.pool, self.device = dimensions, weights, pool, device
        wrap = weights.rows.wrap  # and norms twice over, for _rms_norm
        self._head = wrap(weights.head)
        self._stack = [
            Layer(n.attention_norm.repeat(2), wrap(n.qkv), wrap(n.out), n.mlp_norm.repeat(2), wrap(n.gate_up), wrap(n.down))
            for n in weights.layers
        ]
        self._norm = weights.norm.repeat(2)
        angles = torch.outer(torch.arange(pool.capacity, dtype=torch.float32), weights.frequencies.float())
        self._turns = torch.polar(torch.ones_like(angles), angles).to(device)

    def __call__(self, feeds: list[tuple[LeanCache, list[int]]], wanted: list[int]) -> Tensor | None:
        """Feeds tokens to caches; gives float32 logits (len(wanted), vocabulary) after the last token of each feed in ``wanted``."""
        hidden, last = self._hidden(feeds)
        return self._logits(hidden, [last[n] for n in wanted]) if wanted else None

    def every(self, cache: LeanCache, ids: list[int]) -> Tensor:
        """Feeds ``ids`` and gives the logits after each of them, (len(ids), vocabulary): for measuring quality."""
        hidden, _ = self._hidden([(cache, ids)])
        return self._logits(hidden, list(range(len(ids))))

    def _hidden(self, feeds: list[tuple[LeanCache, list[int]]]) -> tuple[Tensor, list[int]]:
        """One pass over all layers: hidden states by row, and the row of each feed's last token."""
        order = sorted(range(len(feeds)), key=lambda n: (len(feeds[n][1]) > 1, feeds[n][0].room))
        ordered = [feeds[n] for n in order]
        plan = self._plan(ordered)
        ids = torch.zeros(self.weights.rows.padded(plan.rows), dtype=torch.long)
        ids[: plan.rows] = torch.tensor([id for _, fed in ordered for id in fed])
        hidden = self._layers(self.weights.embedding[ids.to(self.device)].float(), plan)
        last, row = [0] * len(feeds), -1
        for n, (cache, fed) in zip(order, ordered, strict=True):
            cache.length += len(fed)
            row += len(fed)
            last[n] = row
        return hidden, last

    def _logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        more = self.weights.rows.padded(len(rows)) - len(rows)
        chosen = hidden[rows + rows[:1] * more]
        return self._head(_rms_norm(chosen, self._norm, self.dimensions.eps))[: len(rows)].float()

    def _layers(self, h: Tensor, plan: _Plan) -> Tensor:
        d = self.dimensions
        rows, width = h.shape[0], d.heads + 2 * d.kv_heads
        for n, layer in enumerate(self._stack):
            x = layer.qkv(_rms_norm(h, layer.attention_norm, d.eps)).float()
            pairs = torch.view_as_complex(x.view(rows, width, -1, 2))
            turned = torch.view_as_real(pairs * plan.turns).view(rows, width, d.head_dim)
            self.pool.flat[n][plan.writes] = turned[: plan.rows, d.heads :]
            h += layer.out(self._attend(n, turned[:, : d.heads], plan))
            gate, up = layer.gate_up(_rms_norm(h, layer.mlp_norm, d.eps)).chunk(2, dim=-1)
            h += layer.down(silu(gate).mul_(up))
        return h

    def _attend(self, n: int, q: Tensor, plan: _Plan) -> Tensor:
        """Attention of layer ``n``: ``q`` (rows, heads, head_dim) → (rows, heads × head_dim)."""
        d, keys, values = self.dimensions, self.pool.keys[n], self.pool.values[n]
        parts = []
        for run in plan.runs:
            rooms = slice(run.room * d.kv_heads, (run.room + run.end - run.begin) * d.kv_heads)
            grouped = q[run.begin : run.end].reshape(-1, d.group, d.head_dim)
            scores = torch.baddbmm(run.mask, grouped, keys[rooms, : run.length].transpose(1, 2), alpha=d.head_dim**-0.5)
            parts.append(torch.bmm(torch.softmax(scores, -1), values[rooms, : run.length]).view(run.end - run.begin, -1))
        for chunk in plan.chunks:
            heads = slice(chunk.room * d.kv_heads, (chunk.room + 1) * d.kv_heads)
            rows = chunk.end - chunk.begin
            grouped = q[chunk.begin : chunk.end].view(rows, d.kv_heads, d.group, d.head_dim).permute(1, 2, 0, 3)
            # A stride of zero lets the query heads of a group share their key without a copy.
            k = keys[heads, : chunk.length][:, None].expand(-1, d.group, -1, -1)
            v = values[heads, : chunk.length][:, None].expand(-1, d.group, -1, -1)
            out = scaled_dot_product_attention(grouped, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None)
            parts.append(out.permute(2, 0, 1, 3).reshape(rows, -1))
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        return together if len(q) == plan.rows else pad(together, (0, 0, 0, len(q) - plan.rows))

    def _plan(self, feeds: list[tuple[LeanCache, list[int]]]) -> _Plan:
        d = self.dimensions
        writes: list[Tensor] = []
        positions: list[int] = []
        chunks: list[_Chunk] = []
        decoding: list[LeanCache] = []
        row = 0
        for cache, fed in feeds:
            end = cache.length + len(fed)
            if not fed or end > min(cache.capacity, self.pool.capacity):
                raise ValueError(f"{len(fed)} tokens after {cache.length} do not fit a cache of {cache.capacity}")
            writes.append(self.pool.rows(cache.room, cache.length, len(fed)))
            positions.extend(range(cache.length, end))
            if len(fed) == 1:
                decoding.append(cache)
            else:
                chunks.append(_Chunk(row, row + len(fed), cache.room, end, self._triangle(cache.length, len(fed))))
            row += len(fed)
        shape = (self.weights.rows.padded(row), d.heads + 2 * d.kv_heads, d.head_dim // 2)
        turns = torch.ones(shape, dtype=torch.complex64, device=self.device)
        turns[:row, : d.heads + d.kv_heads] = self._turns[positions][:, None]
        return _Plan(turns, torch.cat(writes).to(self.device), self._runs(decoding), chunks, row)

    def _triangle(self, before: int, count: int) -> Tensor | None:
        """What hides, from each of ``count`` new tokens, those behind it; None where nothing came before."""
        if before == 0:
            return None
        return torch.full((count, before + count), float("-inf"), device=self.device).triu_(before + 1)

    def _runs(self, decoding: list[LeanCache]) -> list[_Run]:
        """Cuts the decoding rows, ordered by room, where rooms are not neighbours or padding would cost more than a call."""
        runs: list[_Run] = []
        begin = 0
        for end in range(1, len(decoding) + 1):
            if end == len(decoding) or not self._together(decoding[begin:end], decoding[end]):
                lengths = torch.tensor([cache.length + 1 for cache in decoding[begin:end]]).repeat_interleave(
                    self.dimensions.kv_heads
                )
                longest = rounded(int(lengths.max()))
                hidden = torch.arange(longest) >= lengths[:, None, None]
                mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).to(self.device)
                runs.append(_Run(begin, end, decoding[begin].room, longest, mask))
                begin = end
        return runs

    @staticmethod
    def _together(run: list[LeanCache], following: LeanCache) -> bool:
        if following.room != run[-1].room + 1:
            return False
        lengths = [rounded(cache.length + 1) for cache in (*run, following)]
        return len(lengths) * max(lengths) <= 1.5 * sum(lengths) + 64


def _rms_norm(h: Tensor, twice: Tensor, eps: float) -> Tensor:
    """RMS norm of each row of ``h``; ``twice`` is the norm's weight, two times over.

    It is the layer norm of a row beside its negative, whose mean is zero. torch has a kernel for that, and puts ``rms_norm`` together
    from nine on a CPU.
    """
    return layer_norm(torch.cat((h, -h), -1), twice.shape, twice, None, eps)[:, : h.shape[-1]]
