"""Tokenizers small enough to build in a test, of the two kinds that matter: byte-level BPE and SentencePiece with byte fallback."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# A little of everything, so that the merges cut characters in odd places.
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all",
    "Thai: ภาษาไทย ไม่มีช่องว่าง; Japanese: 日本語のテキスト; Hebrew: עברית; Czech: ďábelské ódy",
    "emoji 🦙👩‍👩‍👧‍👦🇫🇷🇩🇪 and accents é è ü ñ ő",
    "def f(x):\n\treturn  x  +  1\n",
]


@cache
def byte_level() -> Tokenizer:
    """Id n < 256 is one byte (in the alphabet's order); then merges; ``<eos>`` is special; ``<kept>`` and ``zwei wörter`` are not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens(["<kept>", "zwei wörter"])
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    """Llama's arrangement: ``▁`` for a space, one in front of the text, unknown characters as ``<0xNN>``."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    characters = sorted({c for line in CORPUS for c in line.replace(" ", "▁")} - set("ďภ🦙日"))  # those are left to the bytes
    vocab = {token: n for n, token in enumerate([*words, *(c for c in characters if c != "\n")])}
    merges = [(pair[0], pair[1]) for pair in ("th", "he", "▁t", "do", "▁d", "▁▁", "▁a", "nd", "é▁")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace(prepend_scheme: str = "always") -> Tokenizer:
    """The newer spelling of the same, without bytes."""
    tokenizer = Tokenizer(models.BPE(vocab={"▁a": 0, "▁▁b": 1, "c": 2, "▁": 3, "é": 4}, merges=[], unk_token=None))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return tokenizer


class ChatTokenizer:
    """What the backend uses of a transformers tokenizer, over one of the above. Refuses a role that it does not know."""

    def __init__(self, backend_tokenizer: Tokenizer, chat_template: str | None = "x") -> None:
        self.backend_tokenizer = backend_tokenizer
        self.chat_template = chat_template

    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        if any(turn["role"] not in ("system", "user", "assistant") for turn in conversation):
            raise ValueError("a secret of the template")
        return "".join(f"<{turn['role']}>{turn['content']}<eos>" for turn in conversation) + "<assistant>"
