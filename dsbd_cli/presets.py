"""Presets: one flat YAML file for a pair and its settings, read strictly.

The numbers in a preset decide results, so nothing is guessed: an unknown key, a key given twice, a
value of the wrong type or out of range is refused with file, line and key (`strict_yaml.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dsbd_cli.errors import UserError
from dsbd_cli.loading.spec import SPEC_FIELDS, PairSpec
from dsbd_cli.names import near
from dsbd_cli.paths import expanded
from dsbd_cli.settings import FIELDS, MOST, SAMPLING_ONLY, Settings
from dsbd_cli.strict_yaml import means_itself, read_mapping, refuse

DEFAULT_PRESET = "smol"
_SUFFIXES = (".yaml", ".yml")
_OTHER_KEYS = ("why", "sweep")
_KEYS = (*SPEC_FIELDS, *FIELDS, *_OTHER_KEYS)


@dataclass(frozen=True)
class Preset:
    """A pair and how to decode with it.

    Attributes:
        name: file name without suffix.
        pair: models, devices, dtypes.
        settings: decoding settings.
        why: reasons, by setting; a single text is under `preset`.
        sweep: values to try, by setting, for `dsbd bench`; empty if the preset carries none.
        path: the file.
    """

    name: str
    pair: PairSpec
    settings: Settings
    why: dict[str, str]
    sweep: dict[str, Any] = field(default_factory=dict)
    path: Path = Path()


def preset_folder() -> Path:
    """Where the shipped presets are: in the installed package, or at the top of a checkout."""
    package = Path(__file__).parent
    shipped = package / "_presets"
    return shipped if shipped.is_dir() else package.parent / "presets"


def list_presets() -> list[Preset]:
    """All shipped presets, the default first, then by name."""
    names = [path.stem for path in preset_folder().glob("*.yaml")]
    return [load_preset(name) for name in sorted(names, key=lambda name: (name != DEFAULT_PRESET, name))]


def load_preset(name_or_path: str | Path) -> Preset:
    """The preset of that name, or in that file.

    A relative path in a file, of a model or of prices, is looked for beside the file first, then in the working
    folder.
    A file without `target` uses the default preset's pair.

    Raises:
        UserError: no such preset, or a file that does not say exactly what it means.
    """
    path = _find(str(name_or_path))
    values, lines = read_mapping(path, _KEYS, nested=_OTHER_KEYS)
    given = {key: values[key] for key in FIELDS if key in values}
    if "prices" in given:
        given["prices"] = _found(path, given["prices"])
    try:
        settings = Settings().merged(given)
    except UserError as error:
        refuse(path, _line_of(str(error), given, lines), str(error))
    return Preset(
        name=path.stem,
        pair=_pair(path, values, lines),
        settings=settings,
        why=_why(path, values.get("why"), lines),
        sweep=_sweep(path, values.get("sweep"), lines),
        path=path,
    )


def to_yaml(preset: Preset) -> str:
    """The settings really used, defaults included, as a preset file."""
    settings = preset.settings.to_dict()
    # What has no effect beside another setting would be refused when read back.
    idle = SAMPLING_ONLY if preset.settings.deterministic else ("gamma",) if preset.settings.tree else ()
    values = preset.pair.to_dict() | {name: value for name, value in settings.items() if name not in idle}
    if preset.sweep:
        values["sweep"] = preset.sweep
    if preset.why:
        values["why"] = preset.why
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def _find(text: str) -> Path:
    path = expanded(text)
    if path.is_dir() and (path.suffix in _SUFFIXES or "/" in text):
        raise UserError(f"preset {text} is a folder, not a YAML file")
    if path.suffix in _SUFFIXES or "/" in text or "\\" in text:
        if not path.is_file():
            raise UserError(f"preset {text}: no such file")
        return path
    shipped = preset_folder() / f"{text}.yaml"
    if shipped.is_file() and text:
        return shipped
    names = sorted(entry.stem for entry in preset_folder().glob("*.yaml"))
    hint = near(text, names) or f" (there are: {', '.join(names)})"
    raise UserError(f"no preset is called {text!r}{hint}; a file needs its .yaml")


def _pair(path: Path, values: dict[str, Any], lines: dict[str, int]) -> PairSpec:
    given = {key: values[key] for key in SPEC_FIELDS if key in values}
    if "target" not in given:
        if path == preset_folder() / f"{DEFAULT_PRESET}.yaml":
            raise UserError(f"{path} names no target")
        return _replaced(load_preset(DEFAULT_PRESET).pair, given, path, lines)
    for key in ("target", "draft"):
        if key in given:
            given[key] = _found(path, given[key])
    return _replaced(PairSpec(target="-"), given, path, lines)


def _found(path: Path, source: Any) -> Any:
    """What a preset's file names: beside it if it is there, else as it stands."""
    if isinstance(source, str) and source and not expanded(source).is_absolute():
        beside = path.parent / source
        if beside.exists():
            return str(beside)
    return source


def _replaced(base: PairSpec, given: dict[str, Any], path: Path, lines: dict[str, int]) -> PairSpec:
    try:
        return base.replace(**given)
    except UserError as error:
        refuse(path, _line_of(str(error), given, lines), str(error))


def _line_of(message: str, given: dict[str, Any], lines: dict[str, int]) -> int | None:
    """The line of the key that a message is about: the given option that it names first."""
    found = {}
    for key in given:
        match = re.search(rf"(?<![\w-]){re.escape(key).replace('_', '[-_]')}(?![\w-])", message)
        if match:
            found[match.start()] = lines[key]
    return found[min(found)] if found else None


def _why(path: Path, value: Any, lines: dict[str, int]) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"preset": value.strip()}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        refuse(path, lines["why"], "why must be a text, or a text for each setting")
    for key in value:
        if key not in (*_KEYS, "preset"):
            refuse(path, lines["why"], f"why: unknown key {key!r}{near(key, _KEYS)}")
    return {key: text.strip() for key, text in value.items()}


def _sweep(path: Path, value: Any, lines: dict[str, int]) -> dict[str, Any]:
    """Checked for names and types; which values make sense together is the bench's affair."""
    if value is None:
        return {}
    loose: dict[str, Any] = {"width": MOST, "method": "specinfer"}
    if not isinstance(value, dict):
        refuse(path, lines["sweep"], "sweep must hold `setting: [values]` lines")
    for key, choices in value.items():
        if key not in FIELDS:
            refuse(path, lines["sweep"], f"sweep: unknown setting {key!r}{near(key, FIELDS)}")
        if not isinstance(choices, list) or not choices:
            refuse(path, lines["sweep"], f"sweep: {key} must be a list of values")
        for choice in choices:
            try:
                # Loose limits, so that the value alone is judged, not its company.
                Settings(**(loose | {key: choice}))
            except UserError as error:
                refuse(path, lines["sweep"], f"sweep: {error}")
    return value


class _Dumper(yaml.SafeDumper):
    """Lists on one line; texts that a reader would take for something else quoted, control characters escaped."""


def _flow(dumper: yaml.SafeDumper, value: Any) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # SafeDumper quotes what YAML 1.1 would read otherwise, but writes U+0085, a line's end there, as it is.
    plain = value.isprintable() and means_itself(value)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(list, _flow)
_Dumper.add_representer(str, _text)
