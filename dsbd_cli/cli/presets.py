"""`dsbd presets`: which presets there are, and what one of them really sets."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dsbd_cli.presets import list_presets, load_preset, to_yaml

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
    if sys.stdout.isatty():
        _table(found)
        return
    for cells in (_COLUMNS, *map(_cells, found)):
        sys.stdout.write("\t".join(cells) + "\n")


@app.command()
def show(name: Annotated[str, typer.Argument(help="A preset's name, or a YAML file.")]) -> None:
    """Print the settings really used, defaults included, as YAML that is itself a preset."""
    sys.stdout.write(to_yaml(load_preset(name)))


def _cells(preset: Preset) -> tuple[str, ...]:
    return preset.name, preset.pair.target, preset.pair.draft or "-", _how(preset)


def _how(preset: Preset) -> str:
    settings = preset.settings
    return f"{settings.method} {settings.verify}, width {settings.width}, gamma {settings.gamma}"


def _table(found: list[Preset]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in _COLUMNS:
        table.add_column(title, overflow="fold", no_wrap=title in ("preset", "settings"))
    for preset in found:
        # Text objects: what stands in a file is never markup.
        table.add_row(*(Text(cell) for cell in _cells(preset)))
    Console().print(table)
