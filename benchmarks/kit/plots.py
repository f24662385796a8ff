"""Cost curves as one picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.kit.growth import LABELS, VALUES, lines

# One colour a method in every panel (Okabe and Ito's, told apart by colour-blind readers too).
_COLOURS = {
    "dsbd": "#0072B2",
    "beam": "#D55E00",
    "speculative": "#009E73",
    "multinomial": "#999999",
    "target": "#000000",
    "draft": "#CC79A7",
}


def draw(found: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write STEM.png and STEM.svg; nothing, with a note, where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (--report draws them elsewhere)", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(*value, lines(found["records"], value[0], value[1], value[3])) for value in VALUES]
    panels = [panel for panel in panels if panel[-1]]
    if not panels:
        return []
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(3.6 * columns, 3.0 * rows + 0.5), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (curve, _, label, _, series) in zip(grid.flat, panels, strict=False):
        for name, line in series.items():
            xs, ys = zip(*line, strict=True)
            axes.plot(xs, ys, marker="o", markersize=3.5, color=_COLOURS.get(name), label=name)
        # Both axes linear and from 0, so that what grows faster than linearly bends upwards.
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.08 * max(y for line in series.values() for _, y in line))
        axes.set_xlabel(LABELS[curve])
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    facts = found["facts"]
    target = facts["models"]["target"]
    figure.suptitle(f"{target['name']} ({target['dtype']}), {facts['hardware']}", fontsize=11)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return paths
