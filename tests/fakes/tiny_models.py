"""Models of a few thousand random weights: a Llama as a GGUF file, beside the same weights in transformers, and folders for the loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.fakes.small_tokenizers import byte_level

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CONTEXT = 64, 96, 4, 2, 16, 3, 256


def vocabulary() -> int:
    return byte_level().get_vocab_size(with_added_tokens=True)


class TinyLlama:
    """Random weights, quantised as ``kinds`` say; ``tensors`` is what the file then means, in float32 and the file's order of rows."""

    def __init__(
        self, path: Path, *, layer: Kind = Kind.Q4_1, table: Kind = Kind.Q8_0, tied: bool = True, **metadata: Any
    ) -> None:
        self.path, self.tied = path, tied
        self.tensors: dict[str, np.ndarray[Any, Any]] = {}
        random = np.random.default_rng(0)
        writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
        _head(writer, metadata)
        rows = vocabulary()
        self._add(writer, random, "token_embd.weight", (rows, HIDDEN), table, 1.0)
        if not tied:
            self._add(writer, random, "output.weight", (rows, HIDDEN), table, 0.3)
        self._add(writer, random, "output_norm.weight", (HIDDEN,), Kind.F32, 0.2)
        for n in range(LAYERS):
            shapes = {
                "attn_q": (HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
                "attn_output": (HIDDEN, HEADS * HEAD_DIM), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
            }  # fmt: skip
            for name, shape in shapes.items():
                self._add(writer, random, f"blk.{n}.{name}.weight", shape, layer, 0.3)
            for name in ("attn_norm", "ffn_norm"):
                self._add(writer, random, f"blk.{n}.{name}.weight", (HIDDEN,), Kind.F32, 0.2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _add(self, writer: Any, random: Any, name: str, shape: tuple[int, ...], kind: Kind, spread: float) -> None:
        values = (random.standard_normal(shape) * spread + (len(shape) == 1)).astype(np.float32)
        data = values if kind is Kind.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        self.tensors[name] = values if kind is Kind.F32 else gguf.quants.dequantize(data, kind)

    def reference(self) -> Any:
        """The same model in transformers, float32."""
        return reference_llama(
            LlamaConfig(
                vocab_size=vocabulary(), hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
                num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=CONTEXT,
                rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=self.tied,
            ),
            self.tensors,
        )  # fmt: skip


def reference_llama(config: LlamaConfig, tensors: dict[str, np.ndarray[Any, Any]]) -> Any:
    """transformers' Llama over the tensors of a GGUF file, whose rows of q and k lie in another order there."""
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    state = {}
    for name, stored in tensors.items():
        values, parts = stored, name.split(".")
        if parts[0] == "blk":
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(parts[2])
            if heads:
                values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            key = f"model.layers.{parts[1]}.{names[parts[2]]}.weight"
        else:
            key = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[parts[0]] + ".weight"
        state[key] = torch.from_numpy(values.copy())
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(state)
    model.eval()
    return model


def _head(writer: Any, metadata: dict[str, Any]) -> None:
    import json

    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary())
    tokenizer: Tokenizer = byte_level()
    model = json.loads(tokenizer.to_str())["model"]
    size = vocabulary()
    special = tokenizer.token_to_id("<eos>")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(metadata.pop("pre", "default"))
    writer.add_token_list([tokenizer.id_to_token(n) for n in range(size)])
    writer.add_token_types([3 if n == special else 1 for n in range(size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(special)
    writer.add_eos_token_id(special)
    writer.add_add_bos_token(False)
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    writer.add_chat_template(turns + "{% if add_generation_prompt %}[a]{% endif %}")
    for name, value in metadata.items():
        writer.add_string(name.replace("__", "."), value)


def folder(path: Path, kind: str) -> Path:
    """A Hugging Face folder with a tiny random ``llama`` or ``gpt2``."""
    torch.manual_seed(0)
    eos = byte_level().token_to_id("<eos>")
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary(), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=128, bos_token_id=eos, eos_token_id=eos, initializer_range=0.5,
            )
        )  # fmt: skip
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary(), n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=eos, eos_token_id=eos,
                initializer_range=0.5,
            )
        )  # fmt: skip
    model.generation_config.eos_token_id = [eos, 3]
    model.save_pretrained(path)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=byte_level(), eos_token="<eos>").save_pretrained(path)
    return path
