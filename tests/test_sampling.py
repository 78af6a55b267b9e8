"""Sampling: the distributions are those of transformers' logits processors, draws follow them, and a failure stays in its row."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch
from torch import Tensor

from trio_sse.backends.transformers.sampling import Sampler, choose
from trio_sse.backends.transformers.steps import Chosen, StepFailure
from trio_sse.events import Sampling

VOCABULARY = 3000
PROMPT = [5, 5, 17, 2900]

SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=1.7, top_k=40),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=VOCABULARY + 5),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=3.0, top_p=0.95),  # flat: more tokens stay than are sorted at first
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=5.0, min_p=0.02),
    Sampling(temperature=0.9, top_k=300, top_p=0.7, min_p=0.05),
    Sampling(temperature=1.0, repetition_penalty=1.3),
    Sampling(temperature=0.7, top_p=0.9, repetition_penalty=0.8, logit_bias=((3, 5.0), (17, -100.0), (2999, 2.5))),
]


def logits(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2.5


def describe(id: int) -> tuple[str, bytes]:
    return f"t{id}", b"t%d" % id


def sampler(sampling: Sampling) -> Sampler:
    return Sampler(sampling, PROMPT, VOCABULARY)


def ours(sampling: Sampling, row: Tensor) -> Tensor:
    probabilities, ids = sampler(sampling).distribution(row)
    full = torch.zeros(VOCABULARY)
    full[torch.arange(VOCABULARY) if ids is None else ids] = probabilities
    return full


def theirs(sampling: Sampling, row: Tensor) -> Tensor:
    """The same settings through transformers, in the order in which ``generate`` applies them."""
    from transformers import generation as g

    s = sampling
    steps: list[Any] = []
    if s.logit_bias:
        steps.append(g.SequenceBiasLogitsProcessor([[[token], value] for token, value in s.logit_bias]))
    if s.repetition_penalty != 1:
        steps.append(g.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    steps.append(g.TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        steps.append(g.TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        steps.append(g.TopPLogitsWarper(s.top_p))
    if s.min_p:
        steps.append(g.MinPLogitsWarper(s.min_p))
    process: Any = g.LogitsProcessorList(steps)
    scores: Tensor = process(torch.tensor([PROMPT]), row[None].clone())
    return torch.softmax(scores[0], -1)


@pytest.mark.parametrize("sampling", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("seed", range(3))
def test_distributions_are_those_of_transformers(sampling: Sampling, seed: int) -> None:
    row = logits(seed)[0]
    mine, reference = ours(sampling, row), theirs(sampling, row)
    assert torch.equal(mine > 0, reference > 0)
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("sampling", [SETTINGS[5], Sampling(temperature=0.25)], ids=["cut", "whole"])
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    row, draws = logits(1)[0], 6_000
    drawing = Sampler(Sampling(temperature=sampling.temperature, top_p=sampling.top_p, seed=3), PROMPT, VOCABULARY)
    counts = torch.bincount(torch.tensor([drawing.choose(row) for _ in range(draws)]), minlength=VOCABULARY)
    expected = ours(sampling, row) * draws
    likely = expected >= 5  # where the usual approximation holds; the others are taken together
    observed = torch.cat((counts[likely], counts[~likely].sum()[None])).double()
    wanted = torch.cat((expected[likely], expected[~likely].sum()[None])).double().clamp_min(1e-9)
    chi_square = float(((observed - wanted) ** 2 / wanted)[wanted > 1e-6].sum())
    freedom = int(likely.sum())
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_a_seed_gives_the_same_tokens_again_and_none_gives_others() -> None:
    rows = logits(2, 40)

    def draw(seed: int | None) -> list[int]:
        s = Sampler(Sampling(temperature=1.5, seed=seed), PROMPT, VOCABULARY)
        return [s.choose(row) for row in rows]

    assert draw(7) == draw(7)
    assert draw(-1) == draw(-1)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_a_row_is_chosen_alike_alone_and_in_company() -> None:
    rows = logits(4, len(SETTINGS))
    seeded = [Sampling(**{f: getattr(s, f) for f in s.__struct_fields__} | {"seed": 11}) for s in SETTINGS]
    together = choose(rows, [sampler(s) for s in seeded], describe)
    alone = [choose(row[None], [sampler(s)], describe)[0] for row, s in zip(rows, seeded, strict=True)]
    assert together == alone


def test_presence_and_frequency_penalties_look_at_what_was_generated() -> None:
    row = torch.zeros(VOCABULARY)
    row[5], row[6], row[7] = 3.0, 2.9, 0.95  # 5 is in the prompt, which does not count
    frequency = Sampler(Sampling(frequency_penalty=1.0), PROMPT, VOCABULARY)
    assert [frequency.choose(row) for _ in range(6)] == [5, 6, 5, 6, 5, 7]
    presence = Sampler(Sampling(presence_penalty=2.0), PROMPT, VOCABULARY)
    # 5 and 6 fall to 1.0 and 0.9, once; so 5 stays ahead from then on.
    assert [presence.choose(row) for _ in range(5)] == [5, 6, 5, 5, 5]


def test_the_repetition_penalty_looks_at_the_prompt_too() -> None:
    row = torch.zeros(VOCABULARY)
    row[5], row[6] = 3.0, 2.9
    assert Sampler(Sampling(repetition_penalty=1.5), PROMPT, VOCABULARY).choose(row) == 6
    row = torch.full((VOCABULARY,), -9.0)
    row[5], row[6] = -1.0, -1.2
    assert Sampler(Sampling(repetition_penalty=1.5), PROMPT, VOCABULARY).choose(row) == 6


def test_a_bias_bans_and_forces() -> None:
    row = logits(3)[0]
    best = int(row.argmax())
    banned = Sampler(Sampling(logit_bias=((best, -100.0),)), PROMPT, VOCABULARY)
    assert banned.choose(row) == int(row.topk(2).indices[1])
    assert Sampler(Sampling(logit_bias=((9, 100.0),)), PROMPT, VOCABULARY).choose(row) == 9


def test_log_probabilities_are_the_models_own() -> None:
    row = logits(6)[0]
    asked = Sampling(temperature=2.0, top_k=5, seed=1, logprobs=3, logit_bias=((1, 50.0),))
    [chosen] = choose(row[None], [sampler(asked)], describe)
    expected = torch.log_softmax(row, -1)
    assert isinstance(chosen, Chosen)
    assert chosen.logprob is not None
    assert chosen.id == 1
    assert (chosen.logprob.token, chosen.logprob.bytes) == ("t1", b"t1")
    assert chosen.logprob.logprob == pytest.approx(float(expected[1]), abs=1e-5)
    best = expected.topk(3)
    assert [text for text, _, _ in chosen.logprob.top] == [f"t{id}" for id in best.indices.tolist()]
    assert [value for _, _, value in chosen.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    [greedy] = choose(row[None], [sampler(Sampling(logprobs=0))], describe)
    assert isinstance(greedy, Chosen)
    assert greedy.logprob is not None
    assert greedy.logprob.top == ()


@pytest.mark.parametrize("plain", [True, False])
def test_a_failure_stays_in_its_row(plain: bool) -> None:
    rows = logits(8, 3)
    expected = rows.argmax(-1).tolist()
    rows[1, 77] = math.nan
    others = Sampling() if plain else Sampling(logprobs=0)
    first, second, third = choose(rows, [sampler(others), sampler(Sampling()), sampler(others)], describe)
    assert isinstance(first, Chosen)
    assert isinstance(second, StepFailure)
    assert isinstance(second.error, FloatingPointError)
    assert isinstance(third, Chosen)
    assert [first.id, third.id] == [expected[0], expected[2]]


def test_a_bias_for_no_token_fails_its_row_only() -> None:
    rows = logits(9, 2)
    bad = Sampling(logit_bias=((VOCABULARY, 1.0),))
    first, second = choose(rows, [sampler(bad), sampler(Sampling(temperature=1.0))], describe)
    assert isinstance(first, StepFailure)
    assert isinstance(second, Chosen)
