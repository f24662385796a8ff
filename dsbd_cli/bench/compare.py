"""Two runs of the same items against each other: settings side by side, and paired tests arm by arm."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_cli.bench import export, pairs
from dsbd_cli.bench.cells import word
from dsbd_cli.bench.files import Record, read_ratings, read_results, read_run
from dsbd_cli.bench.paired_tables import paired_table
from dsbd_cli.bench.pairs import Clocked, Pair
from dsbd_cli.bench.score import PRIMARY
from dsbd_cli.bench.sessions import busy, differing
from dsbd_cli.bench.summary import with_ratings
from dsbd_cli.bench.table import Column, Table
from dsbd_cli.bench.terminal import in_width, table_text
from dsbd_cli.bench.windows import clocks
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.names import near
from dsbd_cli.paths import make_folder


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    folder: Path
    run: Mapping[str, Any]
    results: list[Record]

    @classmethod
    def of(cls, folder: Path) -> Side:
        """Raises UserError for a folder without results."""
        run, results = read_run(folder), read_results(folder)
        if run is None or not results:
            raise UserError(f"{folder}: no results of a bench")
        if run["data"]["kind"] == "mt-bench":
            results = with_ratings(results, read_ratings(folder), run.get("judge"))
        return cls(folder, run, results)

    def arms(self) -> list[str]:
        given = {record["arm"] for record in self.results}
        return [name for name in self.run["arms"] if name in given]

    def records(self, arm: str) -> list[Record]:
        return [record for record in self.results if record["arm"] == arm]


@dataclass(frozen=True)
class Comparison:
    """What `dsbd bench compare` says: tables, and sentences before them."""

    head: str
    notes: list[str]
    tables: list[Table]

    def text(self, width: int | None = None) -> str:
        """For a terminal of `width` columns; None for a pipe."""
        out = io.StringIO()
        for line in (self.head, *(f"note: {note}" for note in self.notes)):
            out.write(in_width(line, width) + "\n")
        for table in self.tables:
            out.write(f"\n{table.title}\n{table_text(table, width)}\n")
            if table.note:
                out.write(in_width(table.note, width) + "\n")
        return out.getvalue()


def compare_runs(one: Path, two: Path, arms: Sequence[str] = ()) -> Comparison:
    """Paired comparison of run `one` against run `two`, over the items that both answered.

    Args:
        arms: none: every arm that both have; one: that arm in both; two: the first of `one` with the second of
            `two`.

    Raises:
        UserError: no results, other data, an unknown arm, or no item in common.
    """
    mine, base = Side.of(one), Side.of(two)
    try:
        return _compare(mine, base, arms)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{one} or {two} holds results that this version of dsbd does not know "
            f"({type(error).__name__}: {error})"
        ) from None


def _compare(mine: Side, base: Side, arms: Sequence[str]) -> Comparison:
    data = [side.run["fingerprint"]["data"] for side in (mine, base)]
    if data[0] != data[1]:
        kinds = [f"{side.folder} {side.run['data']['label']}" for side in (mine, base)]
        raise UserError(f"not runs of the same items: {'; '.join(kinds)}")
    field, score, yes_no = PRIMARY[mine.run["data"]["kind"]]
    chosen = _arms(mine, base, arms)
    found = []
    both: list[Pair] = []
    for left, right in chosen:
        pair = pairs.common(mine.records(left), base.records(right))
        both += pair
        timed = pairs.common(clocks(mine.records(left)), clocks(base.records(right)))
        found.append((left, right, pairs.compare(pair, Clocked(timed), field, yes_no)))
    if not both:
        raise UserError(f"{mine.folder} and {base.folder} have no answered item in common")
    names = _names(mine, base)
    labelled = [(f"{names[0]}: {left}", f"{names[1]}: {right}", entry) for left, right, entry in found]
    items = len({record["item"] for record, _ in both})
    head = f"{names[0]} against {names[1]}: {mine.run['data']['label']}, {counted(items, 'item')} in both"
    return Comparison(
        head,
        _notes(mine, base, both),
        [_settings(mine, base, chosen, names), paired_table(labelled, score)],
    )


def _arms(mine: Side, base: Side, arms: Sequence[str]) -> list[tuple[str, str]]:
    if len(arms) > 2:
        raise UserError("--arm is given once for both runs, or twice: one for each")
    if not arms:
        shared = [name for name in mine.arms() if name in base.arms()]
        if not shared:
            raise UserError(
                f"no arm in common: {mine.folder} has {', '.join(mine.arms())}; {base.folder} has "
                f"{', '.join(base.arms())}; name two with --arm"
            )
        return [(name, name) for name in shared]
    left, right = arms[0], arms[-1]
    for side, name in ((mine, left), (base, right)):
        if name not in side.arms():
            raise UserError(
                f"--arm: {side.folder} has no arm {name!r}{near(name, side.arms())}; it has "
                f"{', '.join(side.arms())}"
            )
    return [(left, right)]


def _names(mine: Side, base: Side) -> tuple[str, str]:
    names = [side.folder.resolve().name for side in (mine, base)]
    return (names[0], names[1]) if names[0] != names[1] else (str(mine.folder), str(base.folder))


def _notes(mine: Side, base: Side, both: Sequence[Pair]) -> list[str]:
    """What makes clocks or texts of the two runs unlike."""
    used = []
    for place, side in enumerate((mine, base)):
        numbers = {pair[place].get("session", 0) for pair in both}
        used += [side.run["sessions"][n] for n in sorted(numbers) if 0 <= n < len(side.run["sessions"])]
    notes = []
    if other := differing(used):
        notes.append(f"the machines differ in {', '.join(other)}: speed and energy compare these too")
    notes += dict.fromkeys(f"a session's machine: {words}" for s in used if (words := busy(s)) is not None)
    lengths = [(one["item"], a, b) for one, two in both if (a := _prompt(one)) != (b := _prompt(two))]
    if lengths:
        item, a, b = lengths[0]
        notes.append(f"the prompts differ: {item} has {a} tokens in the one and {b} in the other")
    return notes


def _prompt(record: Record) -> int | None:
    turns = record["turns"]
    return turns[0].get("prompt_tokens") if turns else None


def _settings(mine: Side, base: Side, chosen: Sequence[tuple[str, str]], names: tuple[str, str]) -> Table:
    """All that differs between the runs and their arms, and the settings of the arms where nothing does."""
    rows: list[list[Any]] = []
    left, right = (_flat(side.run["fingerprint"]) for side in (mine, base))
    for key in dict.fromkeys([*left, *right]):
        if left.get(key) != right.get(key):
            rows.append([key, left.get(key), right.get(key)])
    for one, two in chosen:
        a, b = (side.run["arms"][arm]["settings"] for side, arm in ((mine, one), (base, two)))
        same = one == two
        for key in dict.fromkeys([*a, *b]):
            if a.get(key) != b.get(key) or not same:
                rows.append([f"{one if same else 'arm'}: {key}", a.get(key), b.get(key)])
    note = "" if rows else "The two runs were made with the same settings."
    columns = [Column("setting", "setting"), Column("a", names[0]), Column("b", names[1])]
    rows = [[key, word(a), word(b)] for key, a, b in rows]
    return Table("settings", "Settings that differ" if rows else "No setting differs", columns, rows, note)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            found |= _flat(entry, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = entry
    return found


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """Both tables as CSV, Markdown and LaTeX in `folder/tables`."""
    make_folder(folder, f"--out {folder}")
    export.write_tables(folder, {"compare": comparison.tables})
