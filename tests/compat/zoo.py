"""A tiny random model of every architecture that the installed transformers offers as a causal LM.

Sizes are set by the names that configs use for them, so a new architecture is built without anybody's doing;
one that cannot be built small this way is left out by `build` returning why.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 48
MOST_WEIGHTS = 400_000
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embedding_size": 32,
    "word_embed_proj_dim": 32, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "d_ff": 48, "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "intermediate_size_mlp": 48, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
    "dense_intermediate_size": 48, "mlp_hidden_size": 48, "prefix_dense_intermediate_size": 48,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "kv_channels": 8,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128, "seq_length": 128,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "moe_top_k": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "qk_head_dim": 16, "v_head_dim": 8, "rotary_dim": 4, "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_n_groups": 1, "n_mamba_heads": 2, "ssm_state_size": 8, "n_groups": 1,
    "time_step_rank": 4, "lru_width": 32, "attention_window_size": 16, "adapter_rank": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 128, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2, "attention_dropout": 0.0, "dropout": 0.0, "num_codebooks": 2, "mtp_num_layers": 0,
    "num_nextn_predict_layers": 0, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "max_window_layers": 1, "sliding_window": None, "o_lora_rank": 8,
}  # fmt: skip
# What the general sizes do not fit: by architecture.
_OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "codegen": {"rotary_dim": 4, "n_head": 4},
    "gptj": {"rotary_dim": 4},
    "reformer": {"is_decoder": True},
}
_DECODERS = {"bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
             "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
             "xmod", "qdqbert", "bigbird_pegasus", "bart", "blenderbot", "blenderbot-small", "marian", "mbart",
             "mvp", "pegasus", "plbart", "prophetnet", "trocr", "speech_to_text_2", "whisper"}  # fmt: skip


def names() -> list[str]:
    """Every architecture name that maps to a causal LM, in order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(name: str) -> Any:
    """A small config of architecture `name`."""
    kind = AutoConfig.for_model(name).__class__
    usual = kind()
    text = usual.get_text_config()
    if text is not usual:
        raise ValueError("it reads more than text")
    known = set(inspect.signature(kind.__init__).parameters) | set(vars(usual)) | set(kind.attribute_map)
    sizes = {field: value for field, value in (_SIZES | _OWN.get(name, {})).items() if field in known}
    if getattr(usual, "num_attention_heads", None) is None:
        sizes.pop("num_attention_heads", None)
    if isinstance(getattr(usual, "layer_types", None), list) and len(usual.layer_types) > 2:
        # One of each kind, so that none goes untried.
        sizes["layer_types"] = list(dict.fromkeys(usual.layer_types))
        for field in ("num_hidden_layers", "n_layer", "num_layers"):
            if field in sizes:
                sizes[field] = len(sizes["layer_types"])
    if name in _DECODERS:
        sizes["is_decoder"] = True
    return kind(**sizes)


def build(name: str, seed: int = 0) -> Any:
    """The model, float32, in eval mode.

    Raises:
        ValueError: it cannot be built small, with the reason.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = config_of(name)
            with torch.device("meta"):
                size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
            if size > MOST_WEIGHTS:
                raise ValueError(f"{size} weights")
            torch.manual_seed(seed)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except ImportError as error:
        raise ValueError(str(error).strip().splitlines()[0]) from error
    except Exception as error:
        raise ValueError(
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        ) from error
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and weight.is_floating_point():
                weight.normal_(0, 0.2)
    return model
