"""Names beside points: on no point, no other name, inside the axes, and each nearest to its own point."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from matplotlib.text import Text

from dsbd_cli.bench import canvas, plots

Interval = dict[str, Any]


def known(value: float, low: float, high: float) -> Interval:
    return {"value": value, "low": low, "high": high}


def arm(method: str, speed: Interval, score: Interval) -> dict[str, Any]:
    return {"method": method, "swept": {}, "speed": speed, "score": score}


# Three items: wide intervals, and points that stand close together.
FEW = {
    "multinomial": arm("multinomial", known(31.0, 17.6, 51.3), known(0.667, 0.177, 0.961)),
    "beam": arm("beam", known(33.0, 11.6, 65.6), known(1.0, 0.464, 1.0)),
    "speculative": arm("speculative", known(34.2, 14.7, 69.7), known(0.667, 0.177, 0.961)),
    "specinfer": arm("specinfer", known(14.5, 4.6, 58.1), known(0.667, 0.177, 0.961)),
    "dsbd": arm("dsbd", known(45.9, 26.2, 85.9), known(1.0, 0.464, 1.0)),
}


def many(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    found = {}
    for number in range(12):
        speed, score = chance.uniform(400, 800), chance.uniform(0.2, 0.3)
        found[f"dsbd:{number}"] = arm(
            "dsbd", known(speed, speed - 20, speed + 20), known(score, score - 0.05, 1.0)
        )
    return found


@pytest.mark.parametrize("arms", [FEW, *map(many, range(3))])
def test_every_name_is_told_from_its_neighbours(arms: dict[str, Any]) -> None:
    plt = canvas.start()
    figure = plots.pareto(plt, arms, "speed", "tokens per second", [("score", "exact match")])
    (axis,) = figure.axes
    renderer = figure.canvas.get_renderer()
    points = {
        name: axis.transData.transform((one["speed"]["value"], one["score"]["value"]))
        for name, one in arms.items()
    }
    boxes = {}
    for text in axis.texts:
        line = text.arrow_patch is not None and text.arrow_patch.get_visible()
        if text.arrow_patch is not None:
            text.update_positions(renderer)
        boxes[text.get_text()] = Text.get_window_extent(text, renderer), line
    plt.close(figure)
    assert boxes.keys() == arms.keys()
    inside = axis.get_window_extent(renderer)
    for name, (box, line) in boxes.items():
        assert box.width > 10
        assert inside.x0 <= box.x0 < box.x1 <= inside.x1, name
        assert inside.y0 <= box.y0 < box.y1 <= inside.y1, name
        assert not any(box.overlaps(other) for other, _ in boxes.values() if other is not box), name
        gaps = {one: _gap(box, point) for one, point in points.items()}
        assert min(gaps.values()) > 3, name  # on no marker
        assert line or min(gaps, key=gaps.__getitem__) == name


def _gap(box: Any, point: Any) -> float:
    across = max(box.x0 - point[0], 0.0, point[0] - box.x1)
    return math.hypot(across, max(box.y0 - point[1], 0.0, point[1] - box.y1))
