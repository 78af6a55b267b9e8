"""The lean forward over tiny GGUF files: right in every form of weights, and the same to the bit in any company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import find

if find("model")[1]:
    pytest.skip(find("model")[1], allow_module_level=True)

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.fakes.tiny_models import CONTEXT, LAYERS, TinyLlama, vocabulary
from trio_sse.backends.transformers import linear
from trio_sse.backends.transformers.lean import LeanModel
from trio_sse.backends.transformers.linear import RowCounts, int4_kernel, int8_kernel, row_counts
from trio_sse.backends.transformers.model import load_model
from trio_sse.backends.transformers.steps import Chosen, Work
from trio_sse.events import Sampling

CPU = torch.device("cpu")
DTYPES = ["float32", "bfloat16", "float16", "int4"]


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of our own; and one thread, because on models this small threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("model") / "tiny.gguf")


def load(path: Path, dtype: str, slots: int = 6) -> LeanModel:
    loaded = load_model(str(path), device="cpu", dtype=dtype, threads=None, slots=slots, progress=lambda _: None)
    assert isinstance(loaded.steps, LeanModel)
    return loaded.steps


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(vocabulary()), k=count)


def all_logits(model: LeanModel, tokens: list[int], pieces: list[int]) -> Tensor:
    """Logits after every token, fed in pieces of these sizes (the last size again and again)."""
    cache = model.open(CONTEXT, Sampling(), tokens)
    parts: list[Tensor] = []
    begin = 0
    while begin < len(tokens):
        size = pieces[min(len(parts), len(pieces) - 1)]
        parts.append(model.logits(cache, tokens[begin : begin + size]))
        begin += size
    model.close(cache)
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("layer", "table", "tied"),
    [(Kind.Q4_1, Kind.Q8_0, True), (Kind.Q4_0, Kind.F16, False), (Kind.Q8_0, Kind.F32, True), (Kind.Q5_1, Kind.BF16, True)],
)
def test_float32_equals_transformers(tmp_path: Path, layer: Kind, table: Kind, tied: bool) -> None:
    """The reference runs in float64: in float32 it is further from that than this forward is, and the two errors would add up."""
    tiny = TinyLlama(tmp_path / "m.gguf", layer=layer, table=table, tied=tied)
    tokens = ids(1, 70)
    with torch.inference_mode():
        expected = tiny.reference().double()(torch.tensor([tokens])).logits[0].float()
    model = load(tiny.path, "float32")
    for pieces in ([70], [1], [24], [5, 1, 40, 3]):
        torch.testing.assert_close(all_logits(model, tokens, pieces), expected, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 0.003), ("bfloat16", 0.05), ("int4", 0.05)])
def test_other_forms_stay_close(tiny: TinyLlama, dtype: str, bound: float) -> None:
    tokens = ids(2, 60)
    expected = all_logits(load(tiny.path, "float32"), tokens, [24])
    error = all_logits(load(tiny.path, dtype), tokens, [24]) - expected
    assert float(error.norm() / expected.norm()) < bound


class Company:
    """Sequences that step in random company, each with what it would be fed alone."""

    def __init__(self, model: LeanModel) -> None:
        self.model = model
        self.sampling = [Sampling(temperature=1.0 if n % 2 else 0.0, seed=n, top_p=0.9, logprobs=2) for n in range(6)]
        self.prompts = [ids(n, count) for n, count in enumerate((1, 3, 30, 24, 49, 75))]

    def run(self, members: list[int], choice: random.Random, steps: int = 12) -> dict[int, list[Chosen]]:
        """Generates for ``members``; in every round only some of them step, and a stranger comes and goes."""
        caches = {n: self.model.open(CONTEXT, self.sampling[n], self.prompts[n]) for n in members}
        fed = dict.fromkeys(members, 0)
        out: dict[int, list[Chosen]] = {n: [] for n in members}
        while any(len(chosen) < steps for chosen in out.values()):
            open_ones = [n for n in members if len(out[n]) < steps]
            stepping = choice.sample(open_ones, choice.randint(1, len(open_ones)))
            work = [self._work(n, caches[n], fed, out) for n in stepping]
            stranger = None
            if len(members) < 6 and choice.random() < 0.4 and len(members) > 1:
                stranger = self.model.open(64, Sampling(), [1])
                work.append(Work(stranger, ids(choice.randint(0, 99), choice.randint(1, 24)), choose=True))
            for n, item, result in zip(stepping, work, self.model.step(work), strict=False):
                fed[n] += len(item.ids)
                if item.choose:
                    assert isinstance(result, Chosen)
                    out[n].append(result)
            if stranger is not None:
                self.model.close(stranger)
        for cache in caches.values():
            self.model.close(cache)
        return out

    def _work(self, n: int, cache: object, fed: dict[int, int], out: dict[int, list[Chosen]]) -> Work:
        prompt = self.prompts[n]
        if fed[n] < len(prompt):
            chunk = prompt[fed[n] : fed[n] + self.model.chunk]
            return Work(cache, chunk, choose=fed[n] + len(chunk) == len(prompt))  # type: ignore[arg-type]
        return Work(cache, [out[n][-1].id], choose=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_computes_the_same_alone_and_in_any_company(tiny: TinyLlama, dtype: str) -> None:
    """Not close: equal. Log probabilities are floats, and every bit of them is compared."""
    model = load(tiny.path, dtype)
    assert model.exact
    company = Company(model)
    alone = {n: company.run([n], random.Random(0))[n] for n in range(6)}
    for seed in range(8):
        choice = random.Random(seed)
        members = choice.sample(range(6), choice.randint(2, 5))
        together = company.run(members, choice)
        assert together == {n: alone[n] for n in members}


def test_a_cache_knows_its_bounds(tiny: TinyLlama) -> None:
    model = load(tiny.path, "float32", slots=2)
    cache = model.open(10, Sampling(), [1])
    assert (cache.length, cache.capacity) == (0, 10)
    model.step([Work(cache, ids(0, 8), choose=False)])
    with pytest.raises(ValueError, match="do not fit"):
        model.step([Work(cache, ids(0, 3), choose=False)])
    assert cache.length == 8  # nothing happened
    model.step([Work(cache, ids(0, 2), choose=True)])
    assert cache.length == 10
    assert model.close(cache) == model.cache_bytes(10)
    with pytest.raises(ValueError, match="closed before"):
        model.close(cache)


def test_the_pool_is_bounded_and_comes_back(tiny: TinyLlama) -> None:
    model = load(tiny.path, "float32", slots=3)
    assert model.pool_bytes == 3 * model.cache_bytes(CONTEXT)
    for _ in range(50):
        caches = [model.open(CONTEXT, Sampling(), [1]) for _ in range(3)]
        with pytest.raises(RuntimeError, match="no free room"):
            model.open(1, Sampling(), [1])
        model.step([Work(cache, [1, 2, 3], choose=True) for cache in caches])
        assert sum(model.close(cache) for cache in caches) == model.pool_bytes


def test_what_a_closed_sequence_left_changes_nothing(tiny: TinyLlama) -> None:
    model = load(tiny.path, "float32", slots=1)
    first = all_logits(model, ids(3, 40), [24, 1])
    all_logits(model, ids(4, 200), [24])
    assert torch.equal(all_logits(model, ids(3, 40), [24, 1]), first)


def test_closing_gives_pages_back_to_the_system(tmp_path: Path) -> None:
    """Resident memory falls again when long sequences are closed. Three layers of 2 × 2 × 16 floats are 768 bytes a token."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("counts pages as Linux does")
    tiny = TinyLlama(tmp_path / "m.gguf")
    model = load(tiny.path, "float32", slots=100)
    caches = [model.open(CONTEXT, Sampling(), [1]) for _ in range(100)]
    before = int(statm.read_text().split()[1])
    for cache in caches:
        for begin in range(0, CONTEXT, 128):
            model.step([Work(cache, ids(begin, 128), choose=False)])
    full = int(statm.read_text().split()[1])
    for cache in caches:
        model.close(cache)
    empty = int(statm.read_text().split()[1])
    pool = 100 * CONTEXT * LAYERS * 2 * 2 * 16 * 4 // 4096
    assert full - before > 0.9 * pool
    assert full - empty > 0.9 * pool


def test_int4_computes_what_the_file_says(tiny: TinyLlama) -> None:
    from trio_sse.backends.transformers.gguf_file import GgufTensors, read_index

    tensors = GgufTensors(tiny.path, read_index(tiny.path))
    names = ["blk.0.attn_q.weight", "blk.0.attn_k.weight"]
    kernel = int4_kernel([q for name in names if (q := tensors.quantised(name))], CPU)
    if kernel is None:
        pytest.skip("this torch has no int4 kernel")
    x = torch.randn(5, 64)
    weight = torch.cat([torch.from_numpy(tiny.tensors[name]) for name in names])
    expected = x @ weight.t()
    assert float((kernel(x) - expected).norm() / expected.norm()) < 0.01
    assert int4_kernel([q for q in [tensors.quantised("blk.0.attn_q.weight")] if q], torch.device("meta")) is None


def test_int8_rounds_each_output_and_each_row_by_itself() -> None:
    weight = torch.randn(48, 64) * torch.logspace(-3, 3, 48)[:, None]
    kernel = int8_kernel(weight, CPU)
    if kernel is None:
        assert "avx512_vnni" not in Path("/proc/cpuinfo").read_text(encoding="ascii")
        return
    x = torch.randn(40, 64) * torch.logspace(-3, 3, 40)[:, None]
    x[7] = 0
    found, expected = kernel(x), x @ weight.t()
    error = (found - expected).norm(dim=0) / expected.norm(dim=0)
    assert float(error.max()) < 0.03
    assert not found[7].any()
    rounded = (weight / (scale := weight.abs().amax(1) / 127)[:, None]).round() * scale[:, None]
    error = (found - x @ rounded.t()).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
    assert float(error.max()) < 1e-4  # activations lose next to nothing
    for rows in (1, 2, 5, 33):
        assert torch.equal(kernel(x[:rows]), found[:rows])
    x[3, 5] = float("nan")
    worse = kernel(x)
    assert worse[3].isnan().all()
    assert torch.equal(torch.cat((worse[:3], worse[4:])), torch.cat((found[:3], found[4:])))


def test_bytes_are_multiplied_only_where_that_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI sums of two products are cut off at 16 bits; a kernel that does that is found out, and not used."""

    def product(x: Tensor, *_: Any) -> Tensor:
        return torch.full((len(x), 64), 64 / 2 * 32767.0)

    monkeypatch.setattr(linear, "_INT8", product)
    monkeypatch.setattr(linear, "_INT8_PACK", lambda weight, _: weight)
    linear._multiplies_bytes.cache_clear()
    try:
        assert int8_kernel(torch.randn(48, 64), CPU) is None
    finally:
        linear._multiplies_bytes.cache_clear()


def test_row_counts_find_what_a_kernel_treats_alike() -> None:
    def odd(x: Tensor) -> Tensor:  # another result for 1, 2 and 7 rows
        return x + (len(x) in {1, 2, 7}) * 1e-3

    counts = row_counts(odd, 8, CPU, largest=12)
    assert counts.alike == (3, 4, 5, 6, 8, 9, 10, 11, 12)
    assert [counts.padded(n) for n in (0, 1, 2, 3, 7, 12, 13, 24, 31)] == [0, 3, 3, 3, 8, 12, 15, 24, 32]
    sizes: list[int] = []

    def spy(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x

    assert len(counts.wrap(spy)(torch.zeros(counts.padded(31), 8))) == 32
    assert sizes == [12, 12, 8]


def test_a_kernel_that_never_agrees_is_left_alone() -> None:
    counts = row_counts(lambda x: x + len(x), 8, CPU, largest=12)
    assert counts == RowCounts(())
    assert counts.padded(5) == 5
