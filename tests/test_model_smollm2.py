"""The packaged model: the float32 path is transformers' token for token, the default form is as good, and company changes nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trio_sse.events import Sampling

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [
    "Once upon a time", "The capital of France is", "def fibonacci(n):", "Water boils at", "Dear Sir or Madam,", "In 1969,",
    "🦙 llamas are", "The three laws of robotics are", "2, 3, 5, 7,", "Chapter 1\n\nIt was", "SELECT name FROM", "Ingredients:",
    "To be or not to be", "La capitale de la France est", "The opposite of cold is", "My favourite colour is", "import numpy as np\n",
    "A haiku about rain:\n", "He looked at her and", "The year 2024 was",
]  # fmt: skip
GREEDY = Sampling()
TEXT = Path(__file__).parent / "texts" / "prose.txt"


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def load(dtype: str, threads: int = 1) -> Any:
    """One thread is little slower than two, and two stall on a busy machine."""
    from trio_sse.backends.transformers.model import load_model

    return load_model("smollm2", device="cpu", dtype=dtype, threads=threads, slots=8, progress=lambda _: None)


@pytest.fixture(scope="module")
def reference() -> Any:
    return load("float32")


@pytest.fixture(scope="module")
def default() -> Any:
    return load("auto")


def encode(loaded: Any, text: str) -> list[int]:
    return list(loaded.tokenizer.backend_tokenizer.encode(text).ids)


def run(
    steps: Any, prompts: list[list[int]], samplings: list[Sampling], count: int, choice: random.Random | None = None
) -> list[list[int]]:
    """Generates for all prompts together; with ``choice``, in every round only some of them step."""
    from trio_sse.backends.transformers.steps import Chosen, Work

    caches = [steps.open(len(p) + count, s, p) for p, s in zip(prompts, samplings, strict=True)]
    feeds = [[p[i : i + steps.chunk] for i in range(0, len(p), steps.chunk)] for p in prompts]
    out: list[list[int]] = [[] for _ in prompts]
    while True:
        active = [n for n, ids in enumerate(out) if len(ids) < count and (not ids or ids[-1] not in steps.eos)]
        if not active:
            break
        if choice is not None:
            active = choice.sample(active, choice.randint(1, len(active)))
        work = []
        for n in active:
            piece = feeds[n].pop(0) if feeds[n] else out[n][-1:]
            work.append(Work(caches[n], piece, choose=not feeds[n]))
        for n, item, result in zip(active, work, steps.step(work), strict=True):
            if item.choose:
                assert isinstance(result, Chosen)
                out[n].append(result.id)
    assert sum(steps.close(cache) for cache in caches) > 0
    return out


@pytest.mark.timeout(300)
def test_float32_gives_what_transformers_generates(reference: Any) -> None:
    import gguf
    import torch
    from transformers import LlamaConfig

    from tests.fakes.tiny_models import reference_llama
    from trio_sse.backends.transformers.loading import packaged_model

    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(packaged_model()).tensors}
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    model = reference_llama(config, tensors)
    prompts = [encode(reference, text) for text in PROMPTS]
    ours = run(reference.steps, prompts[:8], [GREEDY] * 8, 20) + run(reference.steps, prompts[8:16], [GREEDY] * 8, 20)
    ours += run(reference.steps, prompts[16:], [GREEDY] * 4, 20)
    for text, prompt, mine in zip(PROMPTS, prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            theirs = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=[2], pad_token_id=2
            )
        assert mine == theirs[0, len(prompt) :].tolist(), text


def losses(steps: Any, ids: list[int]) -> tuple[float, list[int]]:
    """Mean loss per token, and the likeliest token after each, in windows of 512."""
    import torch

    loss, likeliest = 0.0, []
    for begin in range(0, len(ids), 512):
        window = ids[begin : begin + 512]
        cache = steps.open(512, GREEDY, window)
        for at in range(0, len(window), 48):
            logits = steps.logits(cache, window[at : at + 48])
            following = torch.tensor(window[at + 1 : at + 49])
            logprobs = torch.log_softmax(logits[: len(following)], -1)
            loss -= float(logprobs.gather(1, following[:, None]).sum())
            likeliest += logits.argmax(-1).tolist()
        steps.close(cache)
    return loss / len(ids), likeliest


@pytest.fixture(scope="module")
def read(reference: Any) -> tuple[list[int], float, list[int]]:
    """The text's ids, and what float32 makes of them."""
    ids = encode(reference, TEXT.read_text(encoding="utf-8"))[:1200]
    return ids, *losses(reference.steps, ids)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_quality_of_the_quick_forms(read: tuple[list[int], float, list[int]], dtype: str, record_property: Any) -> None:
    """Perplexity within 1 % of float32 on a fixed text. ``scripts/bench_engine.py`` reads all of it; here 1200 tokens must do."""
    ids, expected, best = read
    found, mine = losses(load(dtype).steps, ids)
    ratio = math.exp(found - expected)
    agreement = sum(a == b for a, b in zip(mine, best, strict=True)) / len(ids)
    record_property("perplexity_ratio", ratio)
    record_property("top1_agreement", agreement)
    print(f"{dtype}: perplexity × {ratio:.5f}, the same likeliest token at {agreement:.2%} of {len(ids)} places")
    assert 0.99 < ratio < 1.01
    assert agreement > 0.9


@pytest.mark.timeout(300)
@pytest.mark.parametrize("threads", [1, 2])
def test_company_changes_nothing(threads: int) -> None:
    loaded = load("auto", threads)
    steps = loaded.steps
    assert steps.exact
    long = encode(loaded, TEXT.read_text(encoding="utf-8"))[:100]
    prompts = [*(encode(loaded, text) for text in PROMPTS[:4]), long, long[:49]]
    samplings = [Sampling(temperature=1.0, top_p=0.95, seed=n) if n % 2 else Sampling() for n in range(6)]
    count = 16 if threads == 1 else 6
    alone = [run(steps, [p], [s], count)[0] for p, s in zip(prompts, samplings, strict=True)]
    assert run(steps, prompts, samplings, count) == alone
    assert run(steps, prompts[::-1], samplings[::-1], count, random.Random(2)) == alone[::-1]


def test_unseeded_requests_differ(default: Any) -> None:
    prompt = encode(default, PROMPTS[0])
    first, second = run(default.steps, [prompt] * 2, [Sampling(temperature=1.2)] * 2, 12)
    assert first != second


def test_the_tokenizer_is_the_models_own(default: Any) -> None:
    tokenizer = default.tokenizer.backend_tokenizer
    assert tokenizer.encode("In 1969").tokens == ["In", "Ġ", "1", "9", "6", "9"]
    for text in ("a  b\tc\n\nd", "naïve café 🇫🇷👩‍👩‍👧‍👦 ภาษาไทย 日本語"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    chat = default.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(chat).tokens.count("<|im_end|>") == 2
    assert default.eos == {2}
    assert default.context == 8192
