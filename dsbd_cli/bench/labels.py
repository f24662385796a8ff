"""Names beside the points of a figure: off points, bars and other names, and told apart from their neighbours'."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dsbd_cli.bench.fronts import Point

_SIZE, _INK = 7.5, "#333333"  # of the letters, in points
_RINGS = (9, 14, 21, 30, 42, 56, 72)  # points from a point's centre to its name, nearest first
_ANGLES = tuple(range(0, 360, 15))
_LEADER = 16  # a name farther away has a line to its point
_MARKER = 10.0  # a point's marker, in points
_AIR = 3.0  # pixels left and right of a name
_SQUARE = 1.6  # from which angle on it is a corner
_STEP = 4.0  # pixels between samples of a line
# What a place costs, in points of distance: a sample of a bar beneath the name, standing nearer to another point than
# to its own (then a line leads there too), and a line that runs through another name or point.
_STRUCK, _ASTRAY, _CROSSED = 2.5, 18.0, 60.0


class Box(NamedTuple):
    """A rectangle in pixels."""

    x0: float
    y0: float
    x1: float
    y1: float

    def meets(self, other: Box) -> bool:
        """Whether both share more than an edge."""
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def gap(self, point: Point) -> float:
        """Pixels from the nearest place in it to a point."""
        across = max(self.x0 - point[0], 0.0, point[0] - self.x1)
        return math.hypot(across, max(self.y0 - point[1], 0.0, point[1] - self.y1))

    def holds(self, point: Point) -> bool:
        return self.x0 <= point[0] <= self.x1 and self.y0 <= point[1] <= self.y1


class Place(NamedTuple):
    """Where a name stands: its box, in pixels, and whether a line leads to its point."""

    box: Box
    leader: bool


def place_labels(
    figure: Any, axis: Any, spots: Sequence[tuple[Point, str]], lines: Sequence[tuple[Point, Point]] = ()
) -> None:
    """Write the names of points beside them; where there is no room left a name is left out.

    Args:
        spots: points and names. Names of one point stand together.
        lines: bars and lines that names should not stand on, from end to end. Both in the axis's units.
    """
    from matplotlib.text import Text

    merged: dict[Point, list[str]] = {}
    for point, name in spots:
        merged.setdefault(point, []).append(name)
    # Plain arms first: their names matter most.
    order = sorted(merged, key=lambda point: "=" in merged[point][0])
    texts = [
        axis.annotate(
            ", ".join(merged[point]), point, textcoords="offset points", xytext=(0, 0), ha="left",
            va="bottom", fontsize=_SIZE, color=_INK, zorder=5, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#999999", "shrinkA": 0, "shrinkB": 3},
        )
        for point in order
    ]  # fmt: skip
    renderer = figure.canvas.get_renderer()
    sizes = [
        Text.get_window_extent(text, renderer) for text in texts
    ]  # an annotation's own holds its line too
    pixels = [tuple(axis.transData.transform(point)) for point in order]
    ends = [[tuple(axis.transData.transform(end)) for end in line] for line in lines]
    scale = figure.dpi / 72
    inside = axis.get_window_extent(renderer)
    found = places(
        pixels,
        [(size.width + 2 * _AIR, size.height) for size in sizes],
        Box(inside.x0, inside.y0, inside.x1, inside.y1),
        [(begin, end) for begin, end in ends],
        scale,
    )
    for number, text in enumerate(texts):
        place = found.get(number)
        if place is None:
            text.remove()
        else:
            # A figure is saved at another resolution than it is laid out in.
            x, y = pixels[number]
            text.set_position(((place.box.x0 + _AIR - x) / scale, (place.box.y0 - y) / scale))
            text.arrow_patch.set_visible(place.leader)


def places(
    points: Sequence[Point],
    sizes: Sequence[Point],
    inside: Box,
    lines: Sequence[tuple[Point, Point]],
    scale: float,
) -> Mapping[int, Place]:
    """Where names stand, by their number; those for which there is no room are left out.

    Args:
        points: in pixels, the most important first. sizes: width and height of their names.
        inside: what no name may leave.
        lines: as for `place_labels`, in pixels.
        scale: pixels in a point.
    """
    half = _MARKER * scale / 2
    markers = [Box(x - half, y - half, x + half, y + half) for x, y in points]
    struck = [sample for line in lines for sample in _samples(*line)]
    found: dict[int, Place] = {}
    for number, (point, size) in enumerate(zip(points, sizes, strict=True)):
        best, least = None, math.inf
        for box, distance in _around(point, size, scale):
            if distance >= least:  # nearest first
                break
            if box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1:
                continue
            if any(map(box.meets, markers)) or any(box.meets(other.box) for other in found.values()):
                continue
            others = [box.gap(other) for place, other in enumerate(points) if place != number]
            astray = bool(others) and min(others) < 1.3 * box.gap(point)
            leader = astray or distance > _LEADER
            cost = distance + _STRUCK * sum(map(box.holds, struck)) + _ASTRAY * astray
            if leader:
                near = min(max(point[0], box.x0), box.x1), min(max(point[1], box.y0), box.y1)
                way = [*_samples(point, near)]
                cost += _CROSSED * sum(any(map(other.box.holds, way)) for other in found.values())
                cost += _CROSSED * sum(
                    any(map(marker.holds, way)) for place, marker in enumerate(markers) if place != number
                )
            if cost < least:
                best, least = Place(box, leader), cost
        if best is not None:
            found[number] = best
    return found


def _around(point: Point, size: Point, scale: float) -> Iterator[tuple[Box, float]]:
    """Boxes of this size around a point, with the distance in points, nearest first."""
    for ring in _RINGS:
        for angle in _ANGLES:
            right, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
            x, y = point[0] + ring * scale * right, point[1] + ring * scale * up
            # Its corner looks at the point; a side does where it stands straight above or beside.
            beside, above = (max(-1.0, min(1.0, _SQUARE * one)) for one in (right, up))
            x0, y0 = x - size[0] * (1 - beside) / 2, y - size[1] * (1 - above) / 2
            yield Box(x0, y0, x0 + size[0], y0 + size[1]), float(ring)


def _samples(begin: Point, end: Point) -> Iterator[Point]:
    steps = max(1, round(math.dist(begin, end) / _STEP))
    for step in range(steps + 1):
        share = step / steps
        yield begin[0] + share * (end[0] - begin[0]), begin[1] + share * (end[1] - begin[1])
