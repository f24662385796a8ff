"""What all figures of a report share: style, panels, axes that begin at 0, legends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsbd_cli.bench.fronts import family, value

COLORS = {
    "dsbd": "#0b6e4f",
    "beam": "#c1440e",
    "multinomial": "#7a7a7a",
    "speculative": "#2d6cdf",
    "specinfer": "#8e44ad",
    "hf": "#b8860b",
}
MARKERS = {"dsbd": "o", "beam": "s", "multinomial": "D", "speculative": "^", "specinfer": "v", "hf": "P"}


def start() -> Any:
    """pyplot with the report's style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "savefig.dpi": 160,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e6e6e6",
            "axes.axisbelow": True,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.labelcolor": "#333333",
            "svg.hashsalt": "dsbd",
        }
    )
    return plt


def close(figure: Any) -> Any:
    """The finished figure, whose axes begin at 0 or say that they do not."""
    for axis in figure.axes:
        begin_at_0(axis, "x")
        begin_at_0(axis, "y")
    return figure


def begin_at_0(axis: Any, which: str) -> None:
    """Begin an axis of numbers at 0 where that costs little of the room; else say so in its label."""
    label = getattr(axis, f"get_{which}label")()
    if not label or label in _NO_SCALE or getattr(axis, f"{which}axis").get_scale() == "log":
        return
    ends = getattr(axis, f"get_{which}lim")()
    low, high = min(ends), max(ends)
    if low <= 0 <= high:
        return
    if 0 < low < _NEAR * high:
        set_ends = getattr(axis, f"set_{which}lim")
        set_ends((0, high) if ends[0] < ends[1] else (high, 0))
    else:
        getattr(axis, f"set_{which}label")(f"{label}\n(axis does not begin at 0)")


# An axis that begins below this part of its end is begun at 0.
_NEAR = 0.4
# Axes of names and of places in an order, where 0 means nothing.
_NO_SCALE = {"layer of the draft"}


def panels(plt: Any, count: int, height: float) -> tuple[Any, list[Any]]:
    """A figure of `count` panels, two a row so that they stay readable on a page."""
    columns, rows = min(2, count), (count + 1) // 2
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(5.7 * columns if count > 1 else 6.8, height * rows),
        squeeze=False,
        layout="constrained",
    )
    every = list(axes.flat)
    for spare in every[count:]:
        spare.remove()
    return figure, every[:count]


def tells_apart(arms: Mapping[str, Any], name: str) -> bool:
    """Whether the arms differ in a figure at all: a panel on which all are equal says nothing."""
    values = {value(arm, name) for arm in arms.values()} - {None}
    return len(values) > 1


def errors_of(arm: Mapping[str, Any], **sides: str) -> dict[str, Any]:
    """`xerr` and `yerr` of a point from the intervals of an arm's figures; nothing where there is none."""
    errors: dict[str, Any] = {}
    for side, name in sides.items():
        entry = arm[name]
        if isinstance(entry, Mapping) and entry["low"] is not None:
            errors[side] = [
                [max(0.0, entry["value"] - entry["low"])],
                [max(0.0, entry["high"] - entry["value"])],
            ]
    return errors


def legend(figure: Any, arms: Mapping[str, Any], overall: bool = False) -> None:
    from matplotlib.lines import Line2D

    groups = dict.fromkeys(family(arm["method"]) for arm in arms.values())
    names = {"hf": "Hugging Face generate", "dsbd": "DSBD"}
    handles = [
        Line2D([], [], marker=MARKERS[g], color=COLORS[g], ls="-" if g in ("dsbd", "beam") else "", mec="white",
               label=names.get(g, g))
        for g in groups
    ]  # fmt: skip
    if overall:
        handles.append(Line2D([], [], color="#222222", lw=1.1, ls=(0, (4, 3)), label="best of all"))
    columns = min(len(handles), max(3, int(figure.get_size_inches()[0] / 1.75)))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=9)
