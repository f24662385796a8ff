"""Function-preserving enlargement of a small Llama: the text of a 135M model at the cost of a 7B one.

Speed depends on what the models say (how much of a draft is accepted), so random weights of the right
size prove little, and real 7B weights are a download. Here the small model lives inside a big one:

- hidden size: padded with zeros; RMS norm weights are scaled by sqrt(h/H) and its eps by h/H, which
  undoes the larger divisor of the mean.
- KV heads and MLP rows: random ones in pairs, twins whose outputs carry opposite signs, so that each
  pair adds nothing. Query heads beyond the original ratio are copies, the output being shared in
  powers of two.
- everything that reads the padding is random: zeros would cost less power, and on some devices less
  time, than weights do.

A draft that shares embeddings keeps the small model's: the first h columns of the big one's.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.kit.bandwidth import read_bytes
from dsbd_cli.errors import DsbdError, UserError
from dsbd_cli.loading import Pair, PairSpec, load_pair
from dsbd_cli.loading.model import describe

# Weights that cancel in pairs leave rounding behind; the smaller they are, the less.
_NULLED_SCALE = 1 / 8


@dataclass(frozen=True)
class Sizes:
    """The enlarged model's sizes; layers, head size and vocabulary stay. The default costs what a 7B does."""

    hidden: int = 4096
    heads: int = 64
    kv_heads: int = 16
    intermediate: int = 14336


def inflate(
    model: Any,
    sizes: Sizes | None = None,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """A larger model with the same logits, up to rounding.

    Args:
        model: a `LlamaForCausalLM` without biases.
        sizes: the larger model's.
        seed: of the random weights.
        device, dtype: of the larger model; None takes the small one's.

    Returns:
        A `LlamaForCausalLM` with an untied head, in eval mode.

    Raises:
        UserError: another architecture, or sizes that cannot hold the model.
    """
    sizes = sizes or Sizes()
    _check(model, sizes)
    config = copy.deepcopy(model.config)
    config.hidden_size, config.intermediate_size = sizes.hidden, sizes.intermediate
    config.num_attention_heads, config.num_key_value_heads = sizes.heads, sizes.kv_heads
    config.head_dim = model.model.layers[0].self_attn.head_dim
    config.rms_norm_eps = model.config.rms_norm_eps * model.config.hidden_size / sizes.hidden
    config.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the file that the small one was read from
    device = torch.device(device or model.device)
    with torch.device(device):
        big: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or model.dtype).eval()
    big.generation_config = copy.deepcopy(model.generation_config)
    random = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        _fill(big.model.embed_tokens.weight, model.model.embed_tokens.weight, None)
        _fill(big.lm_head.weight, model.lm_head.weight, random)
        _norm(big.model.norm, model.model.norm)
        for new, old in zip(big.model.layers, model.model.layers, strict=True):
            _norm(new.input_layernorm, old.input_layernorm)
            _norm(new.post_attention_layernorm, old.post_attention_layernorm)
            _attention(new.self_attn, old.self_attn, model.config, sizes, random)
            _mlp(new.mlp, old.mlp, random)
    return big


def inflated(pair: Pair, sizes: Sizes | None = None, seed: int = 0) -> Pair:
    """`pair` with its target enlarged. Its draft stays what it is, embeddings of the small target included."""
    big = inflate(pair.target.model, sizes, seed=seed)
    target = describe(big, pair.target.source)
    return dataclasses.replace(pair, target=dataclasses.replace(target, name=f"{pair.target.name}-inflated"))


def _check(model: Any, sizes: Sizes) -> None:
    config = model.config
    if type(model).__name__ != "LlamaForCausalLM":
        raise UserError(f"only Llama models can be enlarged, not {type(model).__name__}")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise UserError("a Llama with biases cannot be enlarged")
    smallest = {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "intermediate": config.intermediate_size,
    }
    for name, least in smallest.items():
        if getattr(sizes, name) < least:
            raise UserError(
                f"{name.replace('_', '-')} {getattr(sizes, name)} is below the model's own {least}"
            )
    group = config.num_attention_heads // config.num_key_value_heads
    if sizes.heads % sizes.kv_heads or sizes.heads // sizes.kv_heads < group:
        raise UserError(
            f"heads {sizes.heads} must be a multiple of kv-heads {sizes.kv_heads}, at least {group} times as many"
        )
    if sizes.kv_heads > config.num_key_value_heads and (sizes.heads // sizes.kv_heads) % 2:
        raise UserError("random heads come in twins: heads / kv-heads must be even where kv-heads grow")
    if (sizes.intermediate - config.intermediate_size) % 2:
        raise UserError(f"random MLP rows come in twins: intermediate must be {config.intermediate_size} plus "
                        "an even number")  # fmt: skip


def _fill(new: Tensor, old: Tensor, random: torch.Generator | None) -> None:
    """`old` in the upper left corner of `new`; the rest random, as spread as `old`, or zero."""
    if random is None:
        new.zero_()
    else:
        new.normal_(0, float(old.float().std()), generator=random)
    new[: old.shape[0], : old.shape[1]] = old


def _norm(new: Any, old: Any) -> None:
    small, large = len(old.weight), len(new.weight)
    new.weight.fill_(math.sqrt(small / large))
    new.weight[:small] = old.weight * math.sqrt(small / large)


def _attention(new: Any, old: Any, config: Any, sizes: Sizes, random: torch.Generator) -> None:
    size, small = new.head_dim, config.hidden_size
    groups, share = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    shape = (sizes.kv_heads, sizes.heads // sizes.kv_heads, size)
    _fill(new.k_proj.weight, old.k_proj.weight, random)
    _fill(new.v_proj.weight, old.v_proj.weight, random)
    _fill(new.q_proj.weight, old.q_proj.weight, random)
    query = new.q_proj.weight.view(*shape, sizes.hidden)
    query[:groups, :share, :, :small] = old.q_proj.weight.view(groups, share, size, small)
    query[:groups, share:] = query[:groups, :1]
    query[groups:, 1::2] = query[groups:, 0::2]
    _fill(new.o_proj.weight, old.o_proj.weight, random)
    new.o_proj.weight.mul_(_NULLED_SCALE)
    out = new.o_proj.weight.view(sizes.hidden, *shape)
    own = old.o_proj.weight.view(small, groups, share, size)
    out[:, :groups] = 0
    out[:small, :groups, :share] = own
    parts = _halves(shape[1] - share + 1)
    for place, part in zip([0, *range(share, shape[1])], parts, strict=True):
        out[:small, :groups, place] = own[:, :, 0] * part
    out[:, groups:, 1::2] = -out[:, groups:, 0::2]


def _halves(count: int) -> list[float]:
    """`count` powers of two that sum to 1, so that sharing a weight rounds nothing."""
    return [*(2.0**-i for i in range(1, count)), 2.0 ** -(count - 1)]


def _mlp(new: Any, old: Any, random: torch.Generator) -> None:
    rows, small = old.gate_proj.weight.shape
    for name in ("gate_proj", "up_proj"):
        weight = getattr(new, name).weight
        _fill(weight, getattr(old, name).weight, random)
        weight[rows + 1 :: 2] = weight[rows::2]
    down = new.down_proj.weight
    _fill(down, old.down_proj.weight, random)
    down[:, rows:] *= _NULLED_SCALE
    down[small:, :rows] = 0
    down[:, rows + 1 :: 2] = -down[:, rows::2]


@torch.inference_mode()
def compare(small: Any, big: Any, tokenizer: Any) -> tuple[float, float]:
    """(largest difference of logits, largest logit) of the two models on a text."""
    text = "The quick brown fox jumps over the lazy dog. SELECT name FROM river WHERE length > 100;"
    ids = torch.tensor([list(tokenizer(text)["input_ids"])])
    mine = small(ids.to(small.device)).logits.float().cpu()
    theirs = big(ids.to(big.device)).logits.float().cpu()
    return float((mine - theirs).abs().max()), float(mine.abs().max())


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """The options that `sizes_of` reads."""
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default, metavar="N",
                            help=f"enlarged to (default {field.default})")  # fmt: skip


def sizes_of(options: argparse.Namespace) -> Sizes:
    """The sizes on a command line."""
    return Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "target", help="a folder, hub id, GGUF file or wheel: source, as `dsbd --target` takes it"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write (must not exist)")
    parser.add_argument("--device", default="cpu", help="where to build it (default cpu)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights written (default bfloat16)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    add_sizes(parser)
    options = parser.parse_args(arguments)
    try:
        return _write(options)
    except DsbdError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _write(options: argparse.Namespace) -> int:
    out: Path = options.out
    if out.exists():
        raise UserError(f"--out {out} is there already")
    spec = PairSpec(options.target, target_device=options.device, target_dtype=options.dtype)
    pair = load_pair(spec, need_draft=False)
    big = inflate(pair.target.model, sizes_of(options), seed=options.seed)
    difference, scale = compare(pair.target.model, big, pair.tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        big.save_pretrained(part)
        pair.tokenizer.save_pretrained(part)
        part.chmod(0o755)
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{out}: {read_bytes(big) / 1e9:.2f} GB read a forward (was {read_bytes(pair.target.model) / 1e9:.2f}); "
          f"logits differ by at most {difference:.1e} on a scale of {scale:.1f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
