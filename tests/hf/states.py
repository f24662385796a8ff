"""Random states of a model inside another program: adapters, hooks, replaced methods, changed weights.

A `Program` holds one tiny model and goes from state to state; after each, `differs` says whether
`custom_generate=dsbd_cli.generate` gives another text than the model's own `generate`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM

import dsbd_cli

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "opt")
VOCAB = 40
_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                          "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}  # fmt: skip
_OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0},
    "mistral": _SIZES | {"sliding_window": None},
}  # fmt: skip
_TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "gpt2": (["c_attn", "c_proj"], ["mlp.c_fc"]),
    "opt": (["q_proj", "v_proj"], ["fc2"]),
}
_INNER: dict[str, str] = {"gpt2": "transformer.h", "opt": "model.decoder.layers"}


def tiny(kind: str, seed: int, **options: Any) -> Any:
    """A random model with a head that tells its states apart, float32, in eval mode."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **sizes | _OWN_SIZES.get(kind, _SIZES) | options)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model


class Program:
    """One model, in one state after the other.

    Attributes:
        told: what was done, for a failure's message.
        outer: what a user would call: the model, or peft's wrapper of it.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.dice = kind, random.Random(seed)
        torch.manual_seed(seed)
        self.model = tiny(kind, seed)
        self.draft = tiny("llama", seed + 1)
        self.outer: Any = self.model
        self.handles: list[Any] = []
        self.undo: list[Callable[[], None]] = []
        self.told: list[str] = []
        self.adapters = 0
        self.off: Any = None
        self.merged = False

    # States.

    def step(self) -> None:
        """One random change."""
        choices = [self.hook, self.unhook, self.replace, self.restore, self.modes, self.in_place, self.through_data,
                   self.load, self.new_head, self.reparametrize]  # fmt: skip
        choices += [self.add] * 3
        if self.adapters:
            choices += [self.switch, self.toggle, self.merge, self.unload] * 2
        change = self.dice.choice(choices)
        self.told.append(change.__name__)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            change()

    def _layers(self) -> Any:
        found = self.model
        for name in _INNER.get(self.kind, "model.layers").split("."):
            found = getattr(found, name)
        return found

    def _linears(self) -> list[Any]:
        """Plain linear layers, whichever adapters sit around them."""
        return [m for m in self.model.modules() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]

    def hook(self) -> None:
        module = self.dice.choice([m for m in self.model.modules() if isinstance(m, (nn.Linear, nn.LayerNorm))]
                                  or [self.model])  # fmt: skip
        size = self.dice.choice((0.7, 1.3))
        if self.dice.random() < 0.5:
            self.handles.append(
                module.register_forward_hook(lambda m, args, out: out * size if torch.is_tensor(out) else out)
            )
        else:
            self.handles.append(
                module.register_forward_pre_hook(
                    lambda m, args: (args[0] * size, *args[1:]) if args else None
                )
            )

    def unhook(self) -> None:
        if self.handles:
            self.handles.pop().remove()

    def replace(self) -> None:
        module = self.dice.choice(self._linears())
        if "forward" in vars(module):
            return
        before, size = module.forward, self.dice.choice((0.6, 1.4))
        module.forward = lambda *args, **kwargs: before(*args, **kwargs) * size
        self.undo.append(lambda: vars(module).pop("forward", None))  # type: ignore[func-returns-value,arg-type,return-value]

    def restore(self) -> None:
        if self.undo:
            self.undo.pop()()

    def modes(self) -> None:
        self.outer.train(self.dice.random() < 0.6)

    def in_place(self) -> None:
        with torch.no_grad():
            self.dice.choice(self._linears()).weight.mul_(self.dice.choice((0.7, -1.0, 1.3)))

    def through_data(self) -> None:
        self.dice.choice(self._linears()).weight.data.mul_(self.dice.choice((0.7, -1.0, 1.3)))

    def load(self) -> None:
        own = {name: value for name, value in self.model.state_dict().items() if "lora" not in name}
        name = self.dice.choice([name for name, value in own.items() if value.dim() > 1])
        self.model.load_state_dict({name: own[name] * 0.8 + 0.02}, strict=False)

    def new_head(self) -> None:
        old = self.model.get_output_embeddings()
        if type(old) is not nn.Linear or parametrize.is_parametrized(old):
            return
        head = nn.Linear(old.in_features, old.out_features, bias=False)
        with torch.no_grad():
            head.weight.copy_(torch.randn_like(head.weight) * 0.3)
        self.model.set_output_embeddings(head.train(self.model.training))

    def reparametrize(self) -> None:
        class Scaled(nn.Module):
            def forward(self, weight: Any) -> Any:
                return weight * 1.2

        plain = [m for m in self._linears() if not parametrize.is_parametrized(m) and type(m) is nn.Linear]
        if self.adapters or len(plain) < 4:  # peft reads weights of parametrized layers in ways of its own
            return
        module = self.dice.choice(plain)
        parametrize.register_parametrization(module, "weight", Scaled())
        self.undo.append(
            lambda: (
                parametrize.remove_parametrizations(module, "weight")
                if parametrize.is_parametrized(module)
                else None
            )
        )

    # Adapters.

    def add(self) -> None:
        from peft import IA3Config, LoraConfig, TaskType, get_peft_model

        if (
            self.off is not None
            or self.merged
            or any(parametrize.is_parametrized(m) for m in self.model.modules())
        ):
            return
        targets, forwards = _TARGETS.get(self.kind, (["q_proj", "v_proj"], ["down_proj"]))
        which = self.dice.choice(("lora", "dora", "lora", "ia3"))
        config: Any
        if which == "ia3":
            config = IA3Config(task_type=TaskType.CAUSAL_LM, target_modules=[*targets, *forwards],
                               feedforward_modules=forwards, init_ia3_weights=False,
                               fan_in_fan_out=self.kind == "gpt2")  # fmt: skip
        else:
            config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, target_modules=[*targets, *forwards],
                                use_dora=which == "dora", init_lora_weights=False,
                                fan_in_fan_out=self.kind == "gpt2")  # fmt: skip
        if not self.adapters:
            self.outer, self.family = get_peft_model(self.model, config, adapter_name="a0"), which == "ia3"
            self.outer.eval()
        elif self.family == (which == "ia3") and self.adapters < 3:
            self.outer.add_adapter(f"a{self.adapters}", config)
            self.outer.eval()
        else:
            return
        self.adapters += 1
        with torch.no_grad():
            for name, weight in self.outer.named_parameters():
                if "lora_" in name and "magnitude" not in name:
                    weight.normal_(0, 0.2)
                elif "ia3_" in name:
                    weight.uniform_(0.5, 1.5)

    def switch(self) -> None:
        if not self.merged:
            self.outer.set_adapter(f"a{self.dice.randrange(self.adapters)}")

    def toggle(self) -> None:
        if self.merged:
            return
        if self.off is None:
            self.off = self.outer.disable_adapter()
            self.off.__enter__()
        else:
            self.off.__exit__(None, None, None)
            self.off = None

    def merge(self) -> None:
        if self.off is not None:
            return
        if self.merged:
            self.outer.unmerge_adapter()
        else:
            self.outer.merge_adapter()
        self.merged = not self.merged

    def unload(self) -> None:
        if self.off is not None or self.handles or self.undo:
            return
        if self.merged:
            self.merge()
        merge = self.dice.random() < 0.6
        self.model = self.outer.merge_and_unload() if merge else self.outer.unload()
        self.outer, self.adapters = self.model, 0

    # The question.

    def differs(self) -> str | None:
        """What is wrong in this state; None where both texts are alike."""
        ids = torch.tensor([[self.dice.randrange(2, VOCAB) for _ in range(self.dice.randrange(3, 9))]])
        width = self.dice.choice((1, 3))
        method = self.dice.choice(("beam", "dsbd", "multinomial" if width == 1 else "beam"))
        options: dict[str, Any] = {"max_new_tokens": self.dice.randrange(4, 11), "do_sample": False}
        flags = [module.training for module in self.model.modules()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = self.outer.generate(
                input_ids=ids, custom_generate=dsbd_cli.generate, method=method, draft_model=self.draft,
                width=width, **options,
            )  # fmt: skip
            if flags != [module.training for module in self.model.modules()]:
                return "flags are not as before"
            theirs = self.outer.generate(input_ids=ids, num_beams=width, **options)
        if ours.tolist() != theirs.tolist():
            return f"{method}, width {width}: {ours.tolist()} for {theirs.tolist()}"
        return None
