"""The arms of a benchmark: each is one method with one set of settings and one name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_cli.bench.methods import COMMON, METHODS, OF_METHOD
from dsbd_cli.bench.sweep import Grid, label_of, points
from dsbd_cli.errors import UserError
from dsbd_cli.settings import DEFAULTS, Settings, width_from_target

# Hugging Face's methods are run by `generate`; these settings only carry their numbers.
_CARRIER = {"hf-sample": "multinomial", "hf-assisted": "speculative",
            "hf-beam-sample": "beam", "hf-beam-search": "beam"}  # fmt: skip
_OF_WIDTH = ("threshold", "width_rule", "min_width")
_NO_FOREST = "plain beams have no forest, so that a threshold needs draws=distinct or width_rule=distinct"
_EVERYWHERE = (*COMMON, "stop", "system", "raw")


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: unique within a run; the method's name, and what a sweep changed.
        method: the name on the command line.
        settings: what the engine gets, or what `generate`'s arguments are taken from.
        swept: what a sweep changed.
    """

    name: str
    method: str
    settings: Settings
    swept: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The method as a sweep knows it: all of dsbd's variants are one."""
        return METHODS[self.method][0]

    @property
    def hf(self) -> bool:
        """Run by Hugging Face `generate`, as an outside reference."""
        return self.method.startswith("hf-")

    @property
    def needs_draft(self) -> bool:
        return self.settings.method in ("dsbd", "speculative", "specinfer")

    def shown(self) -> dict[str, Any]:
        """The settings that have a meaning for this arm, for results."""
        values = self.settings.to_dict()
        return {name: values[name] for name in (*_EVERYWHERE, *OF_METHOD[self.kind])}


def build_arms(
    methods: Sequence[str],
    base: Settings,
    given: Mapping[str, Any],
    grids: Sequence[Grid],
    asked: bool = True,
) -> tuple[list[Arm], list[str]]:
    """The arms of a run, and notes about what was left out.

    Args:
        methods: names as `parse_methods` gives them.
        base: the preset's settings.
        given: settings from the command line; each reaches the methods it has a meaning for.
        grids: sweeps.
        asked: whether the user wrote them; sweeps of ours may find nothing to try.

    Raises:
        UserError: settings that no method of the run takes, or that exclude each other; a sweep of which
            nothing can be run.
    """
    for name in ("method", "seed", "num_return"):
        if name in given and name != "seed":
            hint = "--methods says what is run" if name == "method" else "the bench returns one answer"
            raise UserError(f"--{name.replace('_', '-')} has no place in a bench: {hint}")
    used: set[str] = {"seed"}
    arms: list[Arm] = []
    notes: list[str] = []
    tried, refusal = 0, None
    for method in methods:
        kind, implied = METHODS[method]
        mine = (*_EVERYWHERE, *OF_METHOD[kind])
        local = {name: value for name, value in given.items() if name in mine}
        if given.get("deterministic") and kind in ("beam", "dsbd"):
            local = {name: value for name, value in local.items() if name != "threshold"}
        local |= implied
        plain = _settings(kind, base, local)
        named = {name for name, value in implied.items() if given.get(name, value) != value}
        used.update(set(local) - named - _idle(plain, local))
        twin = next((arm for arm in arms if arm.settings == plain and arm.kind == kind), None)
        if twin is not None:
            notes.append(f"{method} is what {twin.name} already runs with these settings: left out")
            continue
        arms.append(Arm(method, method, plain))
        wrong = same = 0
        for point in points(grids, kind, method):
            try:
                if other := [name for name, value in point.items() if implied.get(name, value) != value]:
                    raise UserError(f"{method} has a {other[0].replace('_', '-')} of its own")
                arm = Arm(f"{method} {label_of(point)}", method, _settings(kind, base, local | point), point)
            except UserError as error:
                wrong += 1
                refusal = refusal or error
                continue
            if _idle(arm.settings, point):
                same += 1
                refusal = refusal or UserError(_NO_FOREST)
                continue
            tried += 1
            if not any(arm.method == other.method and arm.settings == other.settings for other in arms):
                arms.append(arm)
        if wrong:
            notes.append(f"{method}: {wrong} settings of the sweep exclude themselves and are left out")
        if same and asked:
            notes.append(f"{method}: {same} settings of the sweep are left out: {_NO_FOREST}")
    if asked and refusal is not None and not tried:
        raise UserError(f"--sweep: none of its settings can be run: {refusal}")
    unused = [name for name in given if name not in used]
    if unused:
        raise UserError(f"--{unused[0].replace('_', '-')} means nothing to the methods of this run")
    swept = {name for grid in grids for name in grid} - {"method"}
    idle = swept - {name for method in methods for name in (*COMMON, *OF_METHOD[METHODS[method][0]])}
    if idle:
        raise UserError(f"--sweep: {sorted(idle)[0]} means nothing to the methods of this run")
    return arms, notes


def _idle(settings: Settings, named: Mapping[str, Any]) -> set[str]:
    """Which of the named settings mean nothing to plain beams: the paper's dynamic width needs a forest."""
    if settings.method != "beam" or settings.threshold is not None:
        return set()
    return {name for name in _OF_WIDTH if named.get(name) is not None}


def _settings(kind: str, base: Settings, local: Mapping[str, Any]) -> Settings:
    """Base settings, reduced to what the method reads, with `local` laid over them."""
    mine = (*_EVERYWHERE, *OF_METHOD[kind])
    values = {name: getattr(base, name) for name in mine if name != "deterministic"}
    method = _CARRIER.get(kind, kind)
    plain = Settings(**(DEFAULTS | {"method": method, "seed": None} | _consistent(values)))
    if local.get("deterministic", base.deterministic) and "deterministic" in mine:
        local = {**local, "deterministic": True}
    made = plain.merged(dict(local))
    if method == "beam" and (made.threshold is None or not width_from_target(made)):
        # Inherited from a preset, or meant for the other methods: what means nothing here is not shown.
        made = dataclasses.replace(
            made, threshold=None, width_rule="auto", min_width=min(DEFAULTS["min_width"], made.width)
        )
    return made


def _consistent(values: dict[str, Any]) -> dict[str, Any]:
    """A method that reads width but not min_width must not trip over the default of the latter."""
    if "width" in values and "min_width" not in values:
        return values | {"min_width": min(DEFAULTS["min_width"], values["width"])}
    if "min_width" in values and "width" not in values:
        return {name: value for name, value in values.items() if name != "min_width"}
    return values
