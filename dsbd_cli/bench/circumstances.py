"""Tables of how a run came about: items that stand out, windows, settings and sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsbd_cli.bench.cells import NA, size
from dsbd_cli.bench.table import ARM, Column, Table, figure

Run = Mapping[str, Any]


def outliers(run: Run) -> Table:
    """Items whose speed ratio lies far from the others': where a clock was disturbed, or the text was."""
    columns = [
        Column("item", "item"),
        ARM,
        Column("against", "against"),
        figure("ratio", "x speed"),
        Column("tokens", "tokens"),
        figure("seconds", "seconds"),
        Column("base_tokens", "its tokens"),
        figure("base_seconds", "its seconds"),
    ]
    found = [(entry["arm"], entry["base"], entry["speed"]) for entry in run["against_hf"]]
    found += [
        (name, run["baseline"], arm["against_baseline"]["speed"])
        for name, arm in run["arms"].items()
        if arm["against_baseline"] and name != run["baseline"]
    ]
    rows = [
        [o["item"], arm, base, o["ratio"], int(o["part"]), o["whole"], int(o["base_part"]), o["base_whole"]]
        for arm, base, entry in found
        for o in entry["outliers"]
    ]
    note = (
        "Over 3.5 robust deviations and a factor of 2 from the median item. They count like any other item."
    )
    return Table("outliers", "Items that stand out", columns, rows, note)


def windows(run: Run) -> Table:
    """What answers that share a clock cost together; empty where each has its own."""
    columns = [
        ARM,
        Column("window", "window"),
        Column("repeat", "repeat"),
        Column("session", "session"),
        Column("rank", "process"),
        Column("at_a_time", "at a time"),
        Column("answers", "answers"),
        Column("tokens", "tokens"),
        figure("seconds", "seconds"),
        figure("joules", "joules"),
        Column("peak_bytes", "peak of the allocator", size),
    ]
    rows = [
        [name, *(entry[key] for key in (
            "item", "repeat", "session", "rank", "at_a_time", "answers", "new_tokens", "wall_s", "energy_j",
            "peak_bytes"))]
        for name, arm in run["arms"].items()
        for entry in arm["windows"] or []
    ]  # fmt: skip
    note = "Arms are asked the same windows; a window's clock holds prefill."
    return Table("windows", "Windows", columns, rows, note)


def settings(run: Run) -> Table:
    """Settings of every arm."""
    names = list(dict.fromkeys(name for arm in run["arms"].values() for name in arm["settings"]))
    rows = [[name, *(arm["settings"].get(key, "") for key in names)] for name, arm in run["arms"].items()]
    return Table("settings", "Settings", [ARM, *(Column(name, name) for name in names)], rows)


def sessions(run: Run) -> Table:
    """Every session's circumstances."""
    columns = [Column(key, key.replace("_", " ")) for key in (
        "session", "started", "devices", "cores", "threads", "processes", "attention", "load", "load_at_end",
        "others", "dsbd", "commit", "idle_watts", "command")]  # fmt: skip
    rows = [
        [number, s["started"], ", ".join(s["devices"].values()), s.get("usable_cores") or s.get("cores"),
         s.get("threads"), s.get("processes", 1), s.get("attention"), s.get("load"), s.get("load_at_end"),
         None if s.get("others") is None else f"{s['others']:.0%}", s["dsbd"], s["commit"],
         None if s.get("idle_watts") is None else round(s["idle_watts"]),
         " ".join(s["command"])]
        for number, s in enumerate(run["sessions"])
    ]  # fmt: skip
    return Table("sessions", "Sessions", columns, [[NA if c is None else c for c in row] for row in rows])
