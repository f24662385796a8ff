"""Writes tiny GGUF files from tiny Llamas, the way llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# One run of white space must become one token, digits must not hold on to it.
MERGES = ["Ċ Ċ", "Ġ Ġ", "Ġ a", "l l", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def vocabulary() -> list[str]:
    """Control tokens, the 256 bytes, the merged pairs."""
    return [
        *CONTROL,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(pair.replace(" ", "") for pair in MERGES),
    ]


def tiny_llama(seed: int = 0, tied: bool = True) -> LlamaForCausalLM:
    """A random Llama with that vocabulary; sizes suit blocks of 32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_theta=10000.0,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    pre: str = "smollm",
    architecture: str = "llama",
    quantised: bool = False,
    fields: dict[str, Any] | None = None,
) -> Path:
    """Write `model` to `path`; `quantised` stores the matrices as Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(vocabulary()) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (fields or {}).items():
        writer.add_uint32(key, value)
    for name, tensor in _named(model):
        data = tensor.detach().float().numpy()
        if quantised and data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _named(model: LlamaForCausalLM) -> list[tuple[str, torch.Tensor]]:
    config = model.config
    tensors = [
        ("token_embd.weight", model.model.embed_tokens.weight),
        ("output_norm.weight", model.model.norm.weight),
    ]
    if not config.tie_word_embeddings:
        tensors.append(("output.weight", model.lm_head.weight))
    for place, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        tensors += [
            (f"blk.{place}.attn_norm.weight", layer.input_layernorm.weight),
            (f"blk.{place}.ffn_norm.weight", layer.post_attention_layernorm.weight),
            (f"blk.{place}.attn_q.weight", _interleaved(attention.q_proj.weight, config.num_attention_heads)),
            (f"blk.{place}.attn_k.weight", _interleaved(attention.k_proj.weight, config.num_key_value_heads)),
            (f"blk.{place}.attn_v.weight", attention.v_proj.weight),
            (f"blk.{place}.attn_output.weight", attention.o_proj.weight),
            (f"blk.{place}.ffn_gate.weight", mlp.gate_proj.weight),
            (f"blk.{place}.ffn_up.weight", mlp.up_proj.weight),
            (f"blk.{place}.ffn_down.weight", mlp.down_proj.weight),
        ]
    return tensors


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in the order of ggml's rotary embedding."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
