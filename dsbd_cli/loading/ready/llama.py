"""Weights and numbers of a Llama-shaped model in modules of torch's own, as far as fused forwards read them.

Importing transformers' modelling code costs a second or two, and a fused forward runs none of it. This is what
it reads, under the same names. Whatever runs the model's own code gets the real model, loaded then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.loading.ready.packed import Place


class Config(SimpleNamespace):
    """A config's plain values as attributes."""

    def get_text_config(self, **_: Any) -> Config:
        return self

    def to_dict(self) -> dict[str, Any]:
        """The values, as a config of transformers gives them."""
        return dict(vars(self))


class Norm(nn.Module):
    """What is read of an RMS norm."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps


class Rotary(nn.Module):
    """cos and sin by position, from the model's own frequencies; as transformers computes them."""

    def __init__(self, kind: str, frequencies: Tensor, scaling: float) -> None:
        super().__init__()
        self.rope_type, self.attention_scaling = kind, scaling
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x: for its dtype and device. position_ids: [1, N]. Gives [1, N, size] each."""
        angles = position_ids[..., None].float() * self.inv_freq  # type: ignore[operator]
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos() * self.attention_scaling, both.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


class ReadyLlama(nn.Module):
    """A model of one of the families of fused forwards.

    Args:
        config: plain values of its config.
        numbers: `numbers_of` the real model.
        weights: by the names of the real model's state; without `lm_head.weight` the head is the embedding's.
        real: loads the real model.
        packed: where a forward in C keeps these weights as it reads them.
    """

    def __init__(
        self,
        config: dict[str, Any],
        numbers: dict[str, Any],
        weights: Mapping[str, Tensor],
        real: Callable[[], Any],
        packed: Place | None = None,
    ) -> None:
        super().__init__()
        self.packed = packed
        self.config, self.generation_config = Config(**config), None
        self._weights = {name: nn.Parameter(weight, False) for name, weight in weights.items()}
        self._numbers, self._load = numbers, real
        frequencies = torch.tensor(numbers["frequencies"], dtype=torch.float32)
        inner: Any = nn.Module()
        embedding: Any = _bare(nn.Embedding)
        embedding.weight = self._weights["model.embed_tokens.weight"]
        embedding.num_embeddings, embedding.embedding_dim = embedding.weight.shape
        embedding.padding_idx = embedding.max_norm = None
        embedding.norm_type, embedding.scale_grad_by_freq, embedding.sparse = 2.0, False, False
        inner.embed_tokens = embedding
        inner.layers = nn.ModuleList([self._layer(i) for i in range(self.config.num_hidden_layers)])
        inner.norm = self._norm("model.norm")
        inner.rotary_emb = Rotary(numbers["rope_type"], frequencies, numbers["rope_scaling"])
        self.model = inner
        self.lm_head = self._linear("lm_head" if "lm_head.weight" in weights else "model.embed_tokens")
        del self._weights
        self.eval()

    def _linear(self, name: str) -> nn.Linear:
        return linear_of(self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str) -> Norm:
        return Norm(self._weights[f"{name}.weight"], self._numbers["eps"])

    def _layer(self, index: int) -> nn.Module:
        name = f"model.layers.{index}"
        layer: Any = nn.Module()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        layer.input_layernorm = self._norm(f"{name}.input_layernorm")
        layer.post_attention_layernorm = self._norm(f"{name}.post_attention_layernorm")
        attention = layer.self_attn
        attention.config, attention.head_dim = self.config, self._numbers["head_dim"]
        attention.scaling = self._numbers["scaling"]
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(attention, part, self._linear(f"{name}.self_attn.{part}"))
        for part in ("q_norm", "k_norm"):
            if f"{name}.self_attn.{part}.weight" in self._weights:
                setattr(attention, part, self._norm(f"{name}.self_attn.{part}"))
        for part in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, part, self._linear(f"{name}.mlp.{part}"))
        return layer  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens  # type: ignore[return-value]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def real(self) -> Any:
        """The real model, of transformers' own modules; loaded when it is first asked for."""
        return self._load()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The real model's."""
        return self.real()(*args, **kwargs)


def linear_of(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """A linear layer of these [outputs, inputs] and [outputs]."""
    linear: Any = _bare(nn.Linear)
    linear.weight, linear.bias = weight, bias
    linear.out_features, linear.in_features = weight.shape
    return linear  # type: ignore[no-any-return]


def _bare(kind: type[nn.Module]) -> nn.Module:
    """A module of torch's without the random weights that its constructor draws: hundreds of them take their time."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def numbers_of(model: Any) -> dict[str, Any]:
    """What a real model computes with beside its weights and config; plain values."""
    attention, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    return {
        "eps": float(model.model.norm.variance_epsilon),
        "head_dim": int(attention.head_dim),
        "scaling": float(attention.scaling),
        "rope_type": str(rotary.rope_type),
        "rope_scaling": float(rotary.attention_scaling),
        "frequencies": rotary.inv_freq.float().tolist(),
    }


@torch.inference_mode()
def same(ready: ReadyLlama, model: Any) -> bool:
    """Whether both hold the same bits: weights by name, which of them are one, norms, rotations by position."""
    mine, theirs = ready.state_dict(), model.state_dict()
    if mine.keys() != theirs.keys():
        return False
    for name, weight in theirs.items():
        if mine[name].dtype != weight.dtype or not torch.equal(mine[name], weight):
            return False
    ends = [(one.get_input_embeddings().weight, one.get_output_embeddings().weight) for one in (ready, model)]
    if len({head is embedding for embedding, head in ends}) != 1:
        return False
    norms = {
        name: part.variance_epsilon
        for name, part in model.named_modules()
        if hasattr(part, "variance_epsilon")
    }
    if any(ready.get_submodule(name).variance_epsilon != eps for name, eps in norms.items()):
        return False
    positions = torch.arange(min(4096, int(model.config.max_position_embeddings)))[None]
    like = torch.zeros(1, dtype=model.dtype)
    inner: Any = ready.model
    pairs = zip(inner.rotary_emb(like, positions), model.model.rotary_emb(like, positions), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)
