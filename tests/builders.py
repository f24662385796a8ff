"""Tiny models whose behaviour is known beforehand, for every test that needs weights.

`rand`: a random model of any architecture. `markov`: a Llama whose next-token law is exactly a
table, the way to test distributions. `says`: a model that answers any prompt with given words.
`parrot`: spells a reply byte by byte after one known prompt, the way to test streaming.
All write an ordinary Hugging Face folder, tokenizer included, and need neither network nor seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

Folder = str | Path
SPECIAL = {"<s>": 0, "</s>": 1, "<|eot|>": 2}
BYTES = 256
VOCAB = len(SPECIAL) + BYTES  # 259, the id of the first extra word

# Option names differ between families; the sizes are the same tiny ones.
_SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
}
_LLAMA_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


def tok(folder: Folder, words: Sequence[str] = (), **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of one token per byte (an emoji is four); `words` are single tokens 259, 260, ..."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {char: len(SPECIAL) + place for place, char in enumerate(alphabet)} | SPECIAL
    for place, word in enumerate(words):
        if word in ids:  # a one-letter word is in the table already: it moves, a filler keeps its old id
            ids[f"<unused{ids[word]}>"] = ids[word]
        ids[word] = VOCAB + place
    core = Tokenizer(models.BPE(ids, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", **options)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>"]})
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.save_pretrained(str(folder))
    return tokenizer


def rand(
    folder: Folder,
    kind: str = "llama",
    seed: int = 0,
    vocab: int = VOCAB,
    words: Sequence[str] = (),
    **options: Any,
) -> PreTrainedModel:
    """A random two-layer model of architecture `kind`; `options` go to its config."""
    torch.manual_seed(seed)
    config = {"vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config |= _SIZES.get(kind, _LLAMA_SIZES) | options
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()
    model.save_pretrained(str(folder))
    tok(folder, words)
    return model


def markov(folder: Folder, table: Tensor, words: Sequence[str] = (), **options: Any) -> PreTrainedModel:
    """A Llama whose next-token law is row `table[last token]` ([V, V], rows sum to 1).

    All layers are silenced, the embedding is one-hot, and the head holds the log-probabilities,
    divided by the sqrt(H) with which the final norm multiplies a one-hot vector.
    """
    vocab = table.shape[0]
    hidden = 8 * math.ceil(vocab / 8)
    sizes: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": 1, "rms_norm_eps": 0.0}
    model: Any = rand(folder, vocab=vocab, words=words, **({"tie_word_embeddings": False} | sizes | options))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        layer = model.model.layers[0]
        for norm in (model.model.norm, layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.fill_(1)
        model.model.embed_tokens.weight[:, :vocab] = torch.eye(vocab)
        model.lm_head.weight[:, :vocab] = table.clamp_min(1e-9).log().T / math.sqrt(hidden)
    model.save_pretrained(str(folder))
    return model


def says(folder: Folder, *words: str, end: int = 1, **options: Any) -> PreTrainedModel:
    """After ANY prompt says words[0], words[1], ... (one token each), then token `end`."""
    table = torch.zeros(VOCAB + len(words), VOCAB + len(words))
    table[:, VOCAB] = 1
    for place in range(len(words)):
        last = place + 1 == len(words)
        table[VOCAB + place] = 0
        table[VOCAB + place, end if last else VOCAB + place + 1] = 1
    return markov(folder, table, words, **options)


def parrot(
    folder: Folder, prompt: str, reply: str | Sequence[int], size: int = 512, eos: int = 1
) -> PreTrainedModel:
    """A GPT-2 that says exactly `reply`, byte by byte, after `prompt`, then `eos`.

    Position p has a one-hot embedding and nothing else, so the head is a table from position to
    token; right behind the reply only `eos` scores.
    """
    tokenizer = tok(folder)
    start = len(tokenizer(prompt).input_ids)
    ids = tokenizer(reply).input_ids if isinstance(reply, str) else list(reply)
    sizes: dict[str, Any] = {"n_embd": size, "n_inner": 1, "n_layer": 1, "n_head": 1, "n_positions": size}
    model: Any = rand(folder, "gpt2", **sizes, tie_word_embeddings=False)
    body = model.transformer
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        body.ln_f.weight.fill_(1)
        body.wpe.weight.copy_(torch.eye(size))
        # Not a small number everywhere: the final norm takes the mean away, and with it any constant row.
        model.lm_head.weight[eos, start - 1 + len(ids)] = 1
        for place, token in enumerate(ids):
            model.lm_head.weight[token, start - 1 + place] = 1
    model.save_pretrained(str(folder))
    return model
