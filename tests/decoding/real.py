"""The methods on tiny random models with real weights: what both files of such tests share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.methods.dsbd import Run
from dsbd_cli.decoding.methods.setup import decode, draft_processor, start, top_n_needed
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.events import Layer
from dsbd_cli.decoding.tree.sequences import Node, Trie
from dsbd_cli.settings import Settings

KINDS = ("llama", "opt", "gpt2", "qwen2")


@cache
def tiny(kind: str, vocab: int, seed: int) -> Any:
    """A random model whose logits spread like a real one's (fresh weights are nearly uniform)."""
    torch.manual_seed(seed)
    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
        "opt": {
            "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 64,
        },
    }  # fmt: skip
    llama = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    config = AutoConfig.for_model(kind, vocab_size=vocab, **(sizes.get(kind, llama) | ids))
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.25)
        model.get_output_embeddings().weight.normal_(0, 0.6)
    return model


@cache
def tree_model(kind: str, vocab: int, seed: int, role: str) -> HfTreeModel:
    """`tiny` as a tree model; target and draft are two, even where the weights are the same."""
    return HfTreeModel(tiny(kind, vocab, seed), vocab_size=vocab, role=role)


def play(
    settings: Settings,
    target: HfTreeModel,
    draft: HfTreeModel | None,
    prompt: Sequence[int],
    eos: Sequence[int] = (),
    seed: int = 0,
) -> tuple[Run, list[Layer]]:
    """One prompt decoded to the end."""

    def ends(node: Node) -> str | None:
        return "eos" if node.token in eos else "length" if node.depth >= settings.max_new_tokens else None

    trie = Trie(ends, eos, settings.max_new_tokens)
    target.prefill(prompt, trie.root, top_n=top_n_needed(settings, len(eos)))
    if draft is not None:
        draft.prefill(prompt, trie.root, top_n=draft_processor(settings).top_n)
    run = start(settings, target, draft, trie, SeededSampler(seed, 0), SeededSampler(seed, 1))
    return run, [event for event in decode(run, settings) if isinstance(event, Layer)]
