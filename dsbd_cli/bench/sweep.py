"""Which settings a sweep tries: `"gamma=2,3,4 draft_width=2..6 threshold=0.7,0.9"` and what it means."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsbd_cli.bench.methods import COMMON, OF_METHOD, SWEEPABLE, parse_methods
from dsbd_cli.errors import UserError
from dsbd_cli.names import near
from dsbd_cli.setting_text import parse_setting
from dsbd_cli.settings import FIELDS, KINDS, check_value

MOST_POINTS = 10_000  # no bench of more ever ends, and a mistyped range would fill the memory
# Of more digits Python makes no number; so many make a range that is refused as too long.
_RANGE = re.compile(r"(\d{1,999})\.\.(\d{1,999})")

Grid = dict[str, list[Any]]


def parse_sweep(text: str) -> Grid:
    """Setting -> values of one sweep: lists `a,b`, whole ranges `2..6`, `none`, trees such as `2x2x1`.

    `method=dsbd,beam` among them says for which methods the sweep is meant; without it, for all that read
    a setting of it.

    Raises:
        UserError: not `name=values`, an unknown setting, a value of the wrong type or out of its range, a
            name given twice.
    """
    grid: Grid = {}
    for word in text.split():
        name, equals, values = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not values:
            raise UserError(f"--sweep: {word!r} is not name=values, e.g. gamma=2,3,4")
        if name == "method":
            grid[name] = _methods(values)
            continue
        if name not in SWEEPABLE:
            hint = near(name, SWEEPABLE) if name not in FIELDS else ": it does not decide speed or quality"
            raise UserError(f"--sweep: cannot sweep {name!r}{hint}")
        if name in grid:
            raise UserError(f"--sweep: {name} is given twice")
        grid[name] = list(dict.fromkeys(_values(name, values)))
    if not set(grid) - {"method"}:
        raise UserError("--sweep is empty: give name=values, e.g. gamma=2,3,4")
    size = math.prod(len(values) for name, values in grid.items() if name != "method")
    if size > MOST_POINTS:
        raise UserError(f"--sweep: {size} combinations of values, where {MOST_POINTS} is the most")
    return grid


def _methods(values: str) -> list[Any]:
    return list(parse_methods(values))


def _values(name: str, text: str) -> Iterator[Any]:
    for part in text.split(","):
        ends = _RANGE.fullmatch(part)
        if ends and KINDS[name].startswith("int"):
            low, high = int(ends[1]), int(ends[2])
            if low > high:
                raise UserError(f"--sweep: {name}: the range {part} runs backwards")
            if high - low >= MOST_POINTS:
                raise UserError(f"--sweep: {name}: the range {part} holds more than {MOST_POINTS} values")
            yield from range(low, high + 1)
        else:
            yield _value(name, part)


def _value(name: str, part: str) -> Any:
    if name == "tree":
        part = part.replace("x", ",")
    if KINDS[name] == "bool":
        if part not in ("true", "false"):
            raise UserError(f"--sweep: {name} must be true or false, not {part!r}")
        return part == "true"
    if not part:
        raise UserError(f"--sweep: {name} has an empty value")
    try:
        value = parse_setting(name, part)
        check_value(name, value)
        return value
    except UserError as error:
        raise UserError(f"--sweep: {error}") from None


def points(grids: Sequence[Grid], kind: str, method: str) -> list[dict[str, Any]]:
    """The settings that the sweeps ask of one method: each sweep is a full grid, several are united.

    A sweep that names no setting of the method asks nothing of it.

    Args:
        kind: key of `OF_METHOD`. method: its name on the command line.
    """
    mine = (*COMMON, *OF_METHOD[kind])
    found: list[dict[str, Any]] = []
    for grid in grids:
        if method not in grid.get("method", [method]):
            continue
        names = [name for name in grid if name in mine]
        if not names:
            continue
        for values in itertools.product(*(grid[name] for name in names)):
            point = dict(zip(names, values, strict=True))
            if point not in found:
                found.append(point)
    return found


def label_of(point: Mapping[str, Any]) -> str:
    """A point as text, in the order given: `gamma=2 threshold=none`."""
    return " ".join(f"{name}={_show(value)}" for name, value in point.items())


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
