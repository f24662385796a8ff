"""`dsbd presets`: which presets there are, and what one of them really sets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dsbd_cli.cli.output import Out
from dsbd_cli.presets import list_presets, load_preset, to_yaml
from dsbd_cli.ui.look import columns_of

if TYPE_CHECKING:
    from dsbd_cli.presets import Preset

_COLUMNS = ("preset", "target", "draft", "settings")
app = typer.Typer(help="List the presets, or show one.", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def presets(context: typer.Context) -> None:
    """List the presets: a table at a terminal; in a pipe tab-separated lines, the first of them the head."""
    if context.invoked_subcommand is not None:
        return
    found = list_presets()
    columns = columns_of(sys.stdout)
    if columns is not None:
        Out().write(_table(found, columns))
        return
    for cells in (_COLUMNS, *map(_cells, found)):
        Out().write("\t".join(cells) + "\n")


@app.command(short_help="Print all settings of a preset as YAML.")
def show(name: Annotated[str, typer.Argument(help="A preset's name, or a YAML file.")]) -> None:
    """Print the settings really used, defaults included, as YAML that is itself a preset."""
    Out().write(to_yaml(load_preset(name)))


def _cells(preset: Preset) -> tuple[str, ...]:
    return preset.name, preset.pair.target, preset.pair.draft or "-", _how(preset)


def _how(preset: Preset) -> str:
    settings = preset.settings
    return f"{settings.method} {settings.verify}, width {settings.width}, gamma {settings.gamma}"


def _table(found: list[Preset], columns: int) -> str:
    """All presets in `columns` of a terminal: a row each, or two rows where one is too long."""
    rows = [_COLUMNS, *map(_cells, found)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_COLUMNS))]
    if sum(widths) + 2 * (len(widths) - 1) <= columns:
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
    else:
        lines = [line for row in rows for line in _two_rows(row, widths[0], columns)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _two_rows(row: Sequence[str], width: int, columns: int) -> list[str]:
    name, target, draft, how = row
    pair = f"  {target} + {draft}"
    return [
        f"{name.ljust(width)}  {how}",
        *([pair] if len(pair) <= columns else [f"  {target} +", f"  {draft}"]),
    ]
