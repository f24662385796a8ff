"""A tiny random model of every architecture that the installed transformers offers as a causal LM.

Sizes are set by the names that configs use for them, so a new architecture is built without anybody's doing;
for one that cannot be built small this way, `build` says why.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 40
WINDOW = 12  # shorter than the longest text of a comparison: windows are crossed
MOST_WEIGHTS = 2_200_000
_BY_VALUE: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size n_embd d_model dim embedding_size word_embed_proj_dim lru_width",
    48: """intermediate_size ffn_dim n_inner d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp
        dense_intermediate_size mlp_hidden_size prefix_dense_intermediate_size""",
    24: """moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        shared_intermediate_size""",
    2: """num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_key_value_heads num_kv_heads
        num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k n_mamba_heads index_n_heads num_codebooks
        linear_num_key_heads linear_num_value_heads pad_token_id swa_num_key_value_heads""",
    4: """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts
        num_local_experts n_routed_experts moe_num_experts rotary_dim time_step_rank
        swa_num_attention_heads index_topk d_rel rel_extent floor_scale log_scaling_n_floor""",
    8: """head_dim kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim state_size mamba_d_state mamba_n_heads
        mamba_d_head mamba_num_heads mamba_head_dim ssm_state_size adapter_rank hidden_size_per_layer_input
        linear_key_head_dim linear_value_head_dim o_lora_rank
        swa_head_dim""",
    16: "q_lora_rank kv_lora_rank qk_head_dim attention_window_size index_head_dim",
    WINDOW: "sliding_window sliding_window_size attention_chunk_size local_attention keep_window_size",
    128: "max_position_embeddings n_positions n_ctx max_seq_len seq_length",
    1: """n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups n_groups eos_token_id
        max_window_layers""",
    0: "bos_token_id num_kv_shared_layers mtp_num_layers num_nextn_predict_layers",
}
_SIZES: dict[str, Any] = {name: value for value, names in _BY_VALUE.items() for name in names.split()}
_SIZES |= {
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}
# What the general sizes do not fit: by architecture.
_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (8, 16),
        "attn_layers": ["local", "lsh"],
    },
    "xmod": {"default_language": "en_XX"},
    "ctrl": {"dff": 48},
    "mamba2": {"num_heads": 8},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8},
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "ngram_vocab_size_base": 40,
        "split_ngram_parts": 2,
        "hc_lowrank": 8,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            key: {"rope_type": "default", "rope_theta": 10000.0}
            for key in ("sliding_attention", "full_attention")
        },
    },
    "zaya": {"num_experts_per_tok": 1},
    "xlstm": {"hidden_size": 64, "num_heads": 4, "qk_dim_factor": 1.0},
    "roc_bert": {"pronunciation_vocab_size": 40, "shape_vocab_size": 40},
    "inkling2_text": {"unpadded_vocab_size": VOCAB, "vocab_size": VOCAB},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB, "vocab_size": VOCAB},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def names() -> list[str]:
    """Every architecture name that maps to a causal LM, in order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(name: str, seed: int = 0) -> Any:
    """The model, float32, in eval mode.

    Raises:
        ValueError: it cannot be built small, with the reason.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            usual = AutoConfig.for_model(name)
            if usual.get_text_config() is not usual:
                raise ValueError("its config holds more than text")
        except Exception as error:
            raise ValueError(_said(error)) from error
        reason = ""
        for without in ((), ("layer_types",), ("head_dim",), ("head_dim", "layer_types")):
            try:
                return _made(type(usual), usual, name, seed, without)
            except Exception as error:
                reason = reason or _said(error)
        raise ValueError(reason)


def _made(kind: Any, usual: Any, name: str, seed: int, without: tuple[str, ...]) -> Any:
    config = kind(**_sizes(kind, usual, name, without))
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"{size} weights")
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and weight.is_floating_point():
                weight.normal_(0, 0.2)
        model(torch.tensor([[5, 6, 7]]))
    return model


def _sizes(kind: Any, usual: Any, name: str, without: tuple[str, ...]) -> dict[str, Any]:
    known = set(inspect.signature(kind.__init__).parameters) | set(vars(usual)) | set(kind.attribute_map)
    wanted = _SIZES | _OWN.get(name, {})
    known -= {field for field in known if isinstance(getattr(kind, field, None), property)}
    sizes = {field: value for field, value in wanted.items() if field in known and field not in without}
    if "kv_lora_rank" in sizes:  # latent attention has one key head for each query head
        sizes["num_key_value_heads"] = 4
    for field in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(usual, field, None), int):
            sizes[field] = WINDOW
    kinds = getattr(usual, "layer_types", None)
    ours = "layer_types" in _OWN.get(name, {})
    if (
        isinstance(kinds, (list, tuple))
        and len(kinds) > 2
        and not ours
        and "layer_types" in known - {*without}
    ):
        # One of each kind, so that none goes untried.
        sizes["layer_types"] = list(dict.fromkeys(kinds))
        sizes |= dict.fromkeys((field for field in _LAYERS if field in sizes), len(sizes["layer_types"]))
    if "is_decoder" in known:
        sizes["is_decoder"] = True
    return sizes


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
