"""Where the boxes of one iteration's figure stand: layers are columns, children beside their parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BOX, STEP, ROW, HEAD = 128, 166, 42, 18  # pixels: box width, column step, row step, room for column heads


@dataclass(frozen=True)
class Place:
    """Upper left corner of a box, and its column (0: the beams)."""

    x: int
    y: int
    column: int


def place_nodes(iteration: Mapping[str, Any]) -> tuple[dict[int, Place], int, int]:
    """Places by node id, and the figure's width and height. Every row of a column holds one box.

    A leaf takes the next free row of the figure, a parent stands beside its first child; so edges
    never cross.
    """
    base = iteration["beams"][0]["depth"]
    columns = {beam["id"]: 0 for beam in iteration["beams"]}
    children: dict[int, list[int]] = {beam["id"]: [] for beam in iteration["beams"]}
    for node in iteration["nodes"]:
        columns[node["id"]] = node["depth"] - base
        children[node["id"]] = []
    for node in iteration["nodes"]:
        if node["parent"] in children:
            children[node["parent"]].append(node["id"])
    rows: dict[int, int] = {}
    free = 0
    for beam in iteration["beams"]:
        free = _settle(beam["id"], free, children, rows)
    places = {
        node: Place(columns[node] * STEP + 1, HEAD + row * ROW, columns[node]) for node, row in rows.items()
    }
    width = max(place.x for place in places.values()) + BOX + 2
    return places, width, HEAD + free * ROW


def _settle(node: int, row: int, children: Mapping[int, list[int]], rows: dict[int, int]) -> int:
    """Give `node` and all below it their rows, from `row` on; the next free row."""
    rows[node] = row
    for child in children[node]:
        row = _settle(child, row, children, rows)
    return max(row, rows[node] + 1)
