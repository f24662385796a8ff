"""Decoding settings: one frozen record, checked when it is made (docs/design.md sections 1 to 4).

One module, since every check reads the same list of fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.names import named, near

METHODS = ("dsbd", "beam", "speculative", "specinfer", "multinomial")
VERIFY_RULES = ("paper", "continue", "cover")
DRAWS = ("iid", "distinct")
WIDTH_RULES = ("auto", "paper", "distinct")
TREE_RULES = ("specinfer", "spectr", "rsd")
EARLY_STOPPING = ("first", "heuristic", "never")
KV_MODES = ("all", "one")
FORESTS = ("adaptive", "full")
DRAFTING = ("dsbd", "speculative", "specinfer")
ONE_BEAM_METHODS = ("multinomial", "speculative", "specinfer")
DEFAULT_TREE = (2, 2, 1)
NONE = ("none", "null")  # how a number that may be absent is said to be so, in text
MOST = 4096  # of anything that takes memory for each of them
_CHOICES = {"method": METHODS, "verify": VERIFY_RULES, "draws": DRAWS, "width_rule": WIDTH_RULES,
            "early_stopping": EARLY_STOPPING, "tree_rule": TREE_RULES,
            "kv": KV_MODES, "forest": FORESTS}  # fmt: skip
_AT_LEAST = {"width": 1, "draft_width": 1, "gamma": 0, "min_width": 1, "top_k": 0, "max_new_tokens": 0,
             "num_return": 1, "forest_nodes": 0, "lookup": 0}  # fmt: skip
_LIMITED = ("width", "draft_width", "gamma", "forest_nodes", "lookup")
# Proposals that are no draws of q: `paper` and `continue`, which verify with q, can't take them.
NO_DRAWS = ("forest_nodes", "lookup")
# Temperature has no meaning in the deterministic mode, nor has anything that acts through it.
SAMPLING_ONLY = ("temperature", "top_k", "top_p", "draws", "threshold", "width_rule", "kv")


class _Default(int):
    """A default that yields to what is given beside it; the same number, given, would be an error."""


@named("setting {}")
@dataclass(frozen=True)
class Settings:
    """Everything that decides what a method computes; field names are the option names.

    Attributes:
        method: one of `METHODS`.
        width: W, draws per layer and beams kept (ignored by one-beam methods).
        draft_width: W_S, draws (or, for `cover`, distinct continuations) per drafted layer.
        gamma: drafted layers per target call, >= 0.
        verify: `paper`, `continue` or `cover` (docs/design.md section 3).
        draws: `iid`, or `distinct`: without replacement, so that W draws are W beams (docs/design.md section 1).
        threshold: t of the dynamic width in (0, 1], or None for a fixed width (docs/design.md section 4).
        width_rule: what t is compared with: `paper` (the probability that a width needs no further target call),
            `distinct` (the target's mass on that many continuations), or `auto`: `distinct` for distinct draws,
            else `paper`.
        min_width: W_min, 1 <= W_min <= width; 2 where nothing is given, and 1 beside width 1.
        forest: `adaptive`: where the host drafts, as many layers and nodes as recently paid, gamma and W_S at
            most, down to none; `full`: always gamma layers of W_S (a GPU drafts them anyway).
        forest_nodes: of a forest, the most probable nodes, this many at most, wherever they stand; 0: all. Of gamma
            layers of W_S, which may then be larger than what the target is to compute.
        lookup: prompt lookup: at most so many tokens of what followed a beam's last ones where they stood
            before, beside the draft's forest; 0: none. Forests without the draft (`adaptive`) need none of it.
        prices: what nodes and layers of an adaptive forest cost: `auto` (measured on this machine, once), `off`
            (assumed from sizes) or a file that `dsbd doctor --measure` or `dsbd tune` wrote.
        tree: per-depth expansion of SpecInfer, or None for (2, 2, 1).
        tree_rule: how a node of that tree is verified: `specinfer`, `spectr` or `rsd`, the last with distinct draws
            (docs/design.md section 3).
        kv: `all`, or `one` for the paper's memory-constrained mode.
        deterministic: Hugging Face's beam search, token for token (beam and dsbd only).
        temperature, top_k, top_p: T, acting once on the joint; 0 = argmax, 0 = off, 1 = off.
        max_new_tokens: budget of generated tokens, EOS counted.
        length_penalty: alpha of score = l / len**alpha.
        early_stopping: `first`, `heuristic` or `never` (docs/design.md section 1).
        stop: stop strings, matched on text across token borders.
        system, raw: system turn; no chat template.
        seed: None draws one, and the result reports it.
        num_return: how many of the best beams to return.

    Raises:
        UserError: an unknown name, a value out of its range, or values that exclude each other.
    """

    method: str = "dsbd"
    width: int = 4
    draft_width: int = 8
    gamma: int = 4
    verify: str = "cover"
    draws: str = "iid"
    threshold: float | None = None
    width_rule: str = "auto"
    min_width: int = _Default(2)
    forest: str = "adaptive"
    forest_nodes: int = 0
    lookup: int = 0
    prices: str = "auto"
    tree: tuple[int, ...] | None = None
    tree_rule: str = "specinfer"
    kv: str = "all"
    deterministic: bool = False
    temperature: float = 1.0
    top_k: int = 10
    top_p: float = 0.8
    max_new_tokens: int = 256
    length_penalty: float = 1.0
    early_stopping: str = "heuristic"
    stop: tuple[str, ...] = ()
    system: str | None = None
    raw: bool = False
    seed: int | None = None
    num_return: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.min_width, _Default):
            wide = type(self.width) is int and self.width >= 2
            object.__setattr__(self, "min_width", 2 if wide else 1)
        for field in dataclasses.fields(self):
            value = _typed(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        for field in dataclasses.fields(self):
            _in_range(field.name, getattr(self, field.name))
        if self.min_width > self.width and self.threshold is None:
            # Not read, and `dataclasses.replace` hands a default on as if it were given.
            object.__setattr__(self, "min_width", self.width)
        _check_widths(self.min_width, self.width)
        if self.num_return > self.beams:
            raise UserError(
                f"num-return {self.num_return} is more than the {counted(self.beams, 'beam')} of this run"
            )
        if self.draws == "distinct" and self.width_rule == "paper" and self.threshold is not None:
            raise UserError("width-rule paper counts iid draws: beside draws distinct, leave it out")
        for name in NO_DRAWS:
            if getattr(self, name) and verifies_draws(vars(self)):
                rule = self.verify if self.method == "dsbd" else self.method
                raise UserError(
                    f"{_option(name)} proposes what is no draw of the draft, and {rule} verifies draws: leave it "
                    "out, or take method dsbd with verify cover"
                )
        if self.deterministic:
            if self.method in ONE_BEAM_METHODS:
                raise UserError(f"deterministic works with beam and dsbd, not with {self.method}")
            for name in SAMPLING_ONLY:
                if getattr(self, name) != DEFAULTS.get(name, getattr(self, name)):
                    raise UserError(f"{_option(name)} has no meaning beside deterministic: leave it out")

    @property
    def beams(self) -> int:
        """W; 1 for methods of one sequence, whatever the width."""
        return 1 if self.method in ONE_BEAM_METHODS else self.width

    def merged(self, given: Mapping[str, Any]) -> Settings:
        """These settings with what the user gave laid over them.

        Only what was GIVEN can conflict; a value inherited from a preset yields quietly.

        Raises:
            UserError: unknown name, bad value, or two given values that exclude each other.
        """
        given = dict(given)
        for name in given:
            if name not in FIELDS:
                raise UserError(f"unknown setting {name!r}{near(name, FIELDS)}")
        given = {name: None if _absent(name, value) else value for name, value in given.items()}
        base = {name: getattr(self, name) for name in FIELDS}
        if "gamma" in given and given.get("tree") is not None:
            raise UserError("gamma and tree exclude each other: the depth of the token tree is the tree's")
        if "tree" in given and given["tree"] is not None and given.get("method", self.method) != "specinfer":
            raise UserError(f"tree belongs to specinfer, not to {given.get('method', self.method)}")
        if given.get("deterministic", self.deterministic):
            for name in SAMPLING_ONLY:
                if name in given:
                    raise UserError(f"{_option(name)} has no meaning beside deterministic: leave it out")
                base[name] = DEFAULTS[name]
        if verifies_draws(base | given):
            base |= {name: DEFAULTS[name] for name in NO_DRAWS}
        if given.get("draws") == "distinct" and "width_rule" not in given:
            base["width_rule"] = DEFAULTS["width_rule"]
        result = base | given
        width = _typed("width", result["width"])
        if "min_width" not in given and base["min_width"] > width >= 1:
            result["min_width"] = width
        _check_widths(_typed("min_width", result["min_width"]), width)
        return Settings(**result)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML."""
        return dataclasses.asdict(self) | {
            "tree": list(self.tree) if self.tree else None,
            "stop": list(self.stop),
        }


def _check_widths(least: int, width: int) -> None:
    if least > width >= 1:
        raise UserError(f"min-width {least} is above width {width}")


def verifies_draws(values: Mapping[str, Any]) -> bool:
    """Whether settings verify the draft's own draws, from what they were drawn with."""
    if values["method"] not in DRAFTING or values["deterministic"]:
        return False
    return values["method"] != "dsbd" or values["verify"] != "cover"


def never_passes(settings: Settings) -> str | None:
    """A note where these settings can never pass a drafted layer; None where they can."""
    most = settings.width if settings.threshold is None else settings.min_width
    if settings.method != "dsbd" or settings.verify != "paper" or settings.draft_width >= most:
        return None
    return (
        f"draft-width {settings.draft_width} is below the {most} draws that a layer needs: under `paper` no "
        f"drafted layer can pass, so nothing is gained by drafting; give draft-width {most} or more"
    )


def width_from_target(settings: Settings) -> bool:
    """Whether a threshold looks at the target alone (docs/design.md section 4, `distinct`): no forest is needed."""
    rule = settings.width_rule
    return rule == "distinct" or (rule == "auto" and settings.draws == "distinct")


def check_value(name: str, value: Any) -> None:
    """Refuse a value that no other setting can make possible.

    Raises:
        UserError: of another type, or out of its range.
    """
    _in_range(name, _typed(name, value))


def _in_range(name: str, value: Any) -> None:
    if name in _CHOICES:
        _one_of(_option(name), value, _CHOICES[name])
    elif name in _AT_LEAST:
        if value < _AT_LEAST[name]:
            raise UserError(f"{_option(name)} must be at least {_AT_LEAST[name]}, not {value}")
        if name in _LIMITED and value > MOST:
            raise UserError(f"{_option(name)} must be at most {MOST}, not {value}")
    elif name == "temperature" and not (math.isfinite(value) and value >= 0):
        raise UserError(f"temperature must be 0 (greedy) or a positive number, not {value}")
    elif name == "top_p" and not 0 <= value <= 1:
        raise UserError(f"top-p must lie in 0..1 (1 = off), not {value}")
    elif name == "threshold" and value is not None and not 0 < value <= 1:
        raise UserError(f"threshold must lie in (0, 1], or be `none`, not {value:g}")
    elif name == "length_penalty" and not -10 <= value <= 10:  # beyond, length ** alpha leaves all numbers
        raise UserError(f"length-penalty must lie in -10..10, not {value}")
    elif name == "prices" and value not in ("auto", "off") and not value.endswith(".json"):
        raise UserError(f"prices must be auto, off, or a .json file of prices, not {value!r}")
    elif name == "tree" and value is not None:
        if not value or min(value) < 1:
            raise UserError(f"tree must be positive numbers such as 2,2,1, not {list(value)}")
        if math.prod(value) > MOST:
            raise UserError(f"tree must have at most {MOST} leaves, not {math.prod(value)}")
    elif name in ("stop", "system"):
        texts = value if name == "stop" else (value or "",)
        if any(map(broken, texts)):
            raise UserError(f"{name} is not UTF-8 text: check the terminal's or the file's encoding")
        if name == "stop" and any(not text for text in texts):
            raise UserError("stop must not be an empty string")
        if name == "stop" and any("\ufffd" in text for text in texts):
            raise UserError("stop must not hold U+FFFD, which stands for bytes that are no text (yet)")
    elif name == "seed" and value is not None and value < 0:
        raise UserError(f"seed must not be negative, not {value}")


def broken(text: str) -> bool:
    """Whether a text holds half a surrogate pair: how Python hands on bytes it cannot read, and JSON `"\\ud800"`."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def _option(name: str) -> str:
    return name.replace("_", "-")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{name} must be one of {', '.join(known)}, not {value!r}{near(value, known)}")


def _absent(name: str, value: Any) -> bool:
    """Whether a value says that there is none, for a setting that may be absent; of a text only None does."""
    kind = KINDS[name]
    word = isinstance(value, str) and value.lower() in NONE and "str" not in kind
    return "None" in kind and (value is None or word)


def _typed(name: str, value: Any) -> Any:
    """The value in its field's type, or a UserError; an int is a float, a bool never an int."""
    kind = KINDS[name]
    if _absent(name, value):
        return None
    if kind.startswith("tuple"):
        item = str if "str" in kind else int
        if not isinstance(value, (list, tuple)) or not all(type(entry) is item for entry in value):
            raise UserError(f"{_option(name)} must be a list of {_LISTS[item]}, not {value!r}")
        return tuple(value)
    want = {"int": int, "float": float, "str": str, "bool": bool}[kind.split(" ")[0]]
    if want is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if type(value) is not want:
        raise UserError(f"{_option(name)} must be {_A[want]}, not {value!r}")
    return value


_LISTS = {int: "whole numbers such as [2, 2, 1]", str: "texts such as ['.', 'END']"}
_A = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
FIELDS = tuple(field.name for field in dataclasses.fields(Settings))
KINDS = {field.name: str(field.type) for field in dataclasses.fields(Settings)}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}
