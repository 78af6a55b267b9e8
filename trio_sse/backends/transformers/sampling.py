"""How the next token is chosen: one sampler per sequence, one call per step.

    logits ─▶ bias ─▶ penalties ─▶ temperature ─▶ top_k ─▶ top_p ─▶ min_p ─▶ one draw from the sequence's own generator

The order, and what each stage keeps, are those of transformers' logits processors; presence and frequency penalties are OpenAI's and
look at generated tokens only, the repetition penalty at the prompt too. Log probabilities are the model's own, before all of it.

Rules:

1. Greedy sequences that change nothing share one batched argmax. Everything else works on one row at a time: a reduction over
   several rows may be cut differently between threads, and a row's result must not depend on its neighbours.
2. A draw is one uniform number from the sequence's generator and a walk along the cumulated probabilities, likeliest first where
   the distribution was cut. The same seed gives the same tokens again; without a seed the generator starts anywhere.
3. What fails, fails for its own row only: not-a-number in the logits, a bias for a token that does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from trio_sse.backends.transformers.steps import Chosen, StepFailure
from trio_sse.events import Sampling, TokenLogprob

__all__ = ["Describe", "Sampler", "choose"]

Describe = Callable[[int], tuple[str, bytes]]  # a token's text and bytes, for log probabilities

# How many of the likeliest tokens are sorted first. A flatter distribution takes eight times as many, and so on.
_CANDIDATES = 128


class Sampler:
    """The state of one sequence's sampling.

    Args:
      sampling: what was asked for.
      prompt: its ids, for the repetition penalty.
      vocabulary: how many logits the model gives.
    """

    def __init__(self, sampling: Sampling, prompt: list[int], vocabulary: int) -> None:
        self.sampling = s = sampling
        self.penalised = s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1
        self.plain = s.temperature == 0 and not self.penalised and not s.logit_bias and s.logprobs is None
        if self.penalised:
            self._counts = torch.zeros(vocabulary)
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[torch.tensor(prompt, dtype=torch.long)] = True
        self._bias = None
        if s.logit_bias:
            tokens, values = zip(*s.logit_bias, strict=True)
            self._bias = torch.tensor(tokens), torch.tensor(values, dtype=torch.float32)
        if s.temperature > 0:
            self._generator = torch.Generator()
            if s.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(s.seed & 0xFFFF_FFFF_FFFF_FFFF)

    def choose(self, logits: Tensor) -> int:
        """The next token's id for one row of float32 logits, and takes note of it."""
        if not torch.isfinite(logits.max()):
            raise FloatingPointError("the model's logits are not finite")
        if self.sampling.temperature == 0:
            token = int(self._adjusted(logits).argmax())
        else:
            probabilities, ids = self.distribution(logits)
            place = _walk(probabilities, float(torch.rand((), generator=self._generator, dtype=torch.float64)))
            token = place if ids is None else int(ids[place])
        if self.penalised:
            self._counts[token] += 1
            self._seen[token] = True
        return token

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """What a draw is made from: probabilities, and the ids they belong to; None where they are those of all tokens in order."""
        s = self.sampling
        scores = self._adjusted(logits) / s.temperature
        # A top_k of all tokens or more cuts nothing.
        if 0 < s.top_k < scores.numel() or s.top_p < 1 or s.min_p > 0:
            kept, ids = self._kept(scores)
            return torch.softmax(kept, -1), ids
        return torch.softmax(scores, -1), None

    def _adjusted(self, logits: Tensor) -> Tensor:
        """With bias and penalties; ``logits`` itself where there are none."""
        s, scores = self.sampling, logits
        if self._bias is not None:
            scores = scores.index_add(0, *self._bias)
        if self.penalised:
            if s.repetition_penalty != 1:
                penalised = torch.where(scores < 0, scores * s.repetition_penalty, scores / s.repetition_penalty)
                scores = torch.where(self._seen, penalised, scores)
            scores = scores - s.frequency_penalty * self._counts - s.presence_penalty * (self._counts > 0)
        return scores

    def _kept(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The scores that stay, likeliest first, and their ids."""
        size = scores.numel()
        limit = self.sampling.top_k if 0 < self.sampling.top_k < size else size
        everywhere = torch.softmax(scores, -1) if limit == size else None
        taken = limit if limit < size else min(_CANDIDATES, size)
        while True:
            values, ids = torch.topk(scores, taken)
            keep = self._cut(values, torch.softmax(values, -1) if everywhere is None else everywhere[ids])
            if keep < taken or taken == limit:
                return values[:keep], ids[:keep]
            taken = min(8 * taken, size)

    def _cut(self, values: Tensor, mass: Tensor) -> int:
        """How many of ``values`` (likeliest first) top_p and min_p leave; ``mass`` is their share of all that top_k left."""
        s, keep = self.sampling, values.numel()
        if s.top_p < 1:
            # A token stays while the mass in front of it is below top_p: the one that crosses the line is the last to stay.
            keep = int((mass.cumsum(-1) - mass < s.top_p).sum())
        if s.min_p > 0:
            # Relative to the likeliest, which cutting the tail and renormalising leave as it is.
            keep = min(keep, int((values >= values[0] + math.log(s.min_p)).sum()))
        return max(1, keep)


def _walk(probabilities: Tensor, uniform: float) -> int:
    """The index where the cumulated probability passes ``uniform`` of its total."""
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    index = int(torch.searchsorted(cumulated, cumulated[-1] * uniform, right=True))
    return min(index, probabilities.numel() - 1)


def choose(logits: Tensor, samplers: list[Sampler], describe: Describe) -> list[Chosen | StepFailure]:
    """Chooses one token per row of ``logits`` (rows, vocabulary)."""
    logits = logits.float()
    results: list[Chosen | StepFailure] = []
    if all(sampler.plain for sampler in samplers):
        likeliest, ids = logits.max(-1)
        for finite, id in zip(torch.isfinite(likeliest).tolist(), ids.tolist(), strict=True):
            results.append(Chosen(id) if finite else StepFailure(FloatingPointError("the model's logits are not finite")))
        return results
    rows = logits.cpu()  # the generators and penalties live there
    for row, sampler in zip(rows, samplers, strict=True):
        try:
            id = sampler.choose(row)
            count = sampler.sampling.logprobs
            results.append(Chosen(id, None if count is None else _logprob(row, id, count, describe)))
        except Exception as error:  # noqa: BLE001  (rule 3)
            results.append(StepFailure(error))
    return results


def _logprob(logits: Tensor, id: int, count: int, describe: Describe) -> TokenLogprob:
    logprobs = torch.log_softmax(logits, -1)
    top: list[tuple[str, bytes, float]] = []
    if count:
        values, ids = torch.topk(logprobs, min(count, logprobs.numel()))
        top = [(*describe(token), value) for token, value in zip(ids.tolist(), values.tolist(), strict=True)]
    return TokenLogprob(*describe(id), float(logprobs[id]), tuple(top))
