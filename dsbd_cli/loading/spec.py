"""Which two models, where and in what number format: one frozen record, checked when it is made."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.names import named, near

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
QUANTIZATIONS = ("8bit", "4bit")
_DTYPE_ALIASES = {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
}
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]?))?")  # torch itself ends at two digits


@named("option {} of a pair")
@dataclass(frozen=True)
class PairSpec:
    """Sources, devices and dtypes of a pair; nothing is looked up yet.

    Attributes:
        target, draft: sources as `source.py` reads them; `draft=None` for methods without one.
        target_device, draft_device: `auto` (cuda, then mps, then cpu), `cpu`, `mps`, `cuda`, `cuda:N`.
        target_dtype, draft_dtype: one of `DTYPES`; `auto` is what the device runs well
            (on a CPU with a choice: what was measured to be quicker, docs/speed.md).
        revision, draft_revision: hub revisions.
        trust_remote_code: run modelling code that comes with a checkpoint; off unless asked for.
        quantization: `8bit` or `4bit` (bitsandbytes), of the target alone; None loads it as stored.
        device_map: handed to transformers for a target spread over several devices.
        tensor_parallel: processes of a torchrun that hold one target together (`group.py`).
        draft_vocab: how many ids the draft proposes on a CPU, the first ones (`vocabulary.py`); 0: all.

    Raises:
        UserError: a name that is no field's, or a value that no field takes.
    """

    target: str
    draft: str | None = None
    target_device: str = "auto"
    draft_device: str = "auto"
    target_dtype: str = "auto"
    draft_dtype: str = "auto"
    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None
    device_map: str | None = None
    tensor_parallel: int = 1
    draft_vocab: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name))
        if not self.target.strip():
            raise UserError("target is empty: name a folder, a hub id or a GGUF file")
        for name in ("target_device", "draft_device"):
            value = getattr(self, name).lower()
            if not _DEVICE.fullmatch(value):
                raise UserError(f"{self._asked(name)} must be auto, cpu, mps, cuda or cuda:N, not {value!r}")
            object.__setattr__(self, name, value)
        for name in ("target_dtype", "draft_dtype"):
            value = getattr(self, name).removeprefix("torch.")
            value = _DTYPE_ALIASES.get(value, value)
            if value not in DTYPES:
                raise UserError(
                    f"{self._asked(name)} must be one of {', '.join(DTYPES)}, not {value!r}{near(value, DTYPES)}"
                )
            object.__setattr__(self, name, value)
        if self.draft is not None and not self.draft.strip():
            raise UserError("draft is empty: name a folder, a hub id or a GGUF file, or leave it out")
        if self.tensor_parallel < 1:
            raise UserError(f"tensor-parallel must be at least 1, not {self.tensor_parallel}")
        if self.draft_vocab < 0:
            raise UserError(f"draft-vocab must be at least 0 (all ids), not {self.draft_vocab}")
        if self.tensor_parallel > 1 and (self.device_map or self.quantization):
            raise UserError("tensor-parallel excludes device-map and quantization: leave those out")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            known = ", ".join(QUANTIZATIONS)
            raise UserError(f"quantization must be one of {known}, not {self.quantization!r}")

    def _asked(self, name: str) -> str:
        """A field as its user named it: `device` where both models' are the same."""
        role, kind = name.split("_")
        other = {"target": "draft", "draft": "target"}[role]
        return kind if getattr(self, name) == getattr(self, f"{other}_{kind}") else _option(name)

    def replace(self, **given: Any) -> PairSpec:
        """This spec with some fields replaced.

        Raises:
            UserError: unknown field or bad value.
        """
        return dataclasses.replace(self, **given)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML."""
        return dataclasses.asdict(self)


SPEC_FIELDS = tuple(field.name for field in dataclasses.fields(PairSpec))
SPEC_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(PairSpec) if field.name != "target"
}
_KINDS = {field.name: str(field.type) for field in dataclasses.fields(PairSpec)}


def _check_type(name: str, value: Any) -> None:
    kind = _KINDS[name]
    if value is None and "None" in kind:
        return
    want = {"bool": bool, "int": int}.get(kind, str)
    if type(value) is not want:
        what = {bool: "true or false", int: "a whole number"}.get(want, "a text")
        raise UserError(f"{_option(name)} must be {what}, not {value!r}")


def _option(name: str) -> str:
    return name.replace("_", "-")
