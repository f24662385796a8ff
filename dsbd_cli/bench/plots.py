"""The figures of a report, by matplotlib: each function draws one figure, or gives None where data lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dsbd_cli.bench import canvas
from dsbd_cli.bench.canvas import COLORS, MARKERS, begin_at_0, close, errors_of
from dsbd_cli.bench.fronts import Point, family, front, value
from dsbd_cli.bench.labels import place_labels


def pareto(plt: Any, arms: Mapping[str, Any], x: str, x_label: str, qualities: Sequence[tuple[str, str]],
           low_x: bool = False) -> Any:  # fmt: skip
    """Quality against speed or energy with intervals; fronts of the DSBD, of the beam and of all arms."""
    usable = {name: arm for name, arm in arms.items() if value(arm, x) is not None}
    qualities = [entry for entry in qualities if canvas.tells_apart(usable, entry[0])]
    if not usable or not qualities:
        return None
    figure, axes = canvas.panels(plt, len(qualities), 4.5)
    edge = _edge(usable, x, low_x)
    labels: list[tuple[Any, list[tuple[Point, str]], list[tuple[Point, Point]]]] = []
    for axis, (quality, label) in zip(axes, qualities, strict=True):
        groups: dict[str, list[Point]] = {}
        spots: list[tuple[Point, str]] = []
        for name, arm in usable.items():
            across, up = value(arm, x), value(arm, quality)
            if across is not None and up is not None:
                if edge is not None and _far(across, edge, low_x):
                    # Drawn at the edge, with its number: on one scale it would squeeze all others together.
                    axis.plot(
                        edge, up, marker="<", color=COLORS["hf"], ms=7, mec="white", mew=0.8, ls="", zorder=3
                    )
                    spots.append(((edge, up), f"{name} ({across:.3g})"))
                    continue
                groups.setdefault(family(arm["method"]), []).append((across, up))
                spots.append(((across, up), name))
        outside = [spot for spot in spots if spot[1] not in usable]
        spots = [spot for spot in spots if spot[1] in usable]
        keep = {point for group in ("beam", "dsbd") for point in front(groups.get(group, []), low_x)}
        for group in ("beam", "dsbd"):
            line = front(groups.get(group, []), low_x)
            if len(line) > 1:
                axis.plot(*zip(*line, strict=True), color=COLORS[group], lw=1.6, alpha=0.75, zorder=2)
        overall = front([point for points in groups.values() for point in points], low_x)
        if len(overall) > 1:
            axis.plot(*zip(*overall, strict=True), color="#222222", lw=1.1, ls=(0, (4, 3)), zorder=1.5)
        keep |= set(overall)
        for point, name in spots:
            arm = usable[name]
            _spot(axis, arm, x, quality, family(arm["method"]), plain=not arm["swept"] or point in keep)
        axis.set_xlabel(x_label)
        axis.set_ylabel(label)
        axis.margins(x=0.16, y=0.14)
        if low_x:
            axis.invert_xaxis()
        shown = [s for s in spots if s[0] in keep or not usable[s[1]]["swept"]]
        fronts_drawn = [front(groups.get(group, []), low_x) for group in ("beam", "dsbd")]
        bars = [bar for point, name in spots for bar in _bars(usable[name], point, x, quality)]
        labels.append(
            (axis, [*shown, *outside], [*bars, *(pair for line in fronts_drawn for pair in pairwise(line))])
        )
    canvas.legend(figure, usable, overall=True)
    close(figure)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # labels are placed on the final axes
    for axis, spots, lines in labels:
        place_labels(figure, axis, spots, lines)
    return figure


def _edge(arms: Mapping[str, Any], x: str, low_x: bool) -> float | None:
    """Where arms are drawn that lie far on the bad side of all of ours; None where none of ours has a number."""
    ours = [value(arm, x) for arm in arms.values() if family(arm["method"]) != "hf"]
    known = [number for number in ours if number is not None]
    if len(known) < 2:
        return None
    low, high = min(known), max(known)
    room = 0.18 * (high - low)
    return high + room if low_x else low - room


def _far(across: float, edge: float, low_x: bool) -> bool:
    return across > 2 * edge if low_x else across < edge / 2


def _bars(arm: Mapping[str, Any], point: Point, x: str, y: str) -> list[tuple[Point, Point]]:
    """Its intervals from end to end."""
    ends = []
    for place, name in enumerate((x, y)):
        entry = arm[name]
        if isinstance(entry, Mapping) and entry["low"] is not None:
            low, high = list(point), list(point)
            low[place], high[place] = entry["low"], entry["high"]
            ends.append(((low[0], low[1]), (high[0], high[1])))
    return ends


def _spot(axis: Any, arm: Mapping[str, Any], x: str, y: str, group: str, plain: bool) -> None:
    axis.errorbar(
        value(arm, x), value(arm, y), **errors_of(arm, xerr=x, yerr=y), fmt=MARKERS[group], color=COLORS[group],
        ms=7 if plain else 5, elinewidth=0.8 if plain else 0.5, ecolor=COLORS[group] + ("66" if plain else "33"),
        mec="white", mew=0.8, zorder=4 if plain else 3, alpha=1 if plain else 0.7,
    )  # fmt: skip


def widths(plt: Any, arms: Mapping[str, Any], panels: Sequence[tuple[str, str]]) -> Any:
    """Mean distinct width against quality, speed and energy, for methods that keep beams."""
    usable = {
        name: arm
        for name, arm in arms.items()
        if value(arm, "distinct_width") is not None
        and family(arm["method"]) in ("dsbd", "beam", "multinomial")
    }
    panels = [entry for entry in panels if canvas.tells_apart(usable, entry[0])]
    if len(usable) < 2 or not panels:
        return None
    figure, axes = canvas.panels(plt, len(panels), 3.7)
    for axis, (name, label) in zip(axes, panels, strict=True):
        for arm in usable.values():
            if value(arm, name) is not None:
                group = family(arm["method"])
                axis.errorbar(
                    value(arm, "distinct_width"), value(arm, name), **errors_of(arm, xerr="distinct_width", yerr=name),
                    fmt=MARKERS[group], color=COLORS[group], ms=7, mec="white", elinewidth=0.8,
                    ecolor=COLORS[group] + "55",
                )  # fmt: skip
        axis.set_xlabel("distinct beams per layer, median item")
        axis.set_ylabel(label)
        axis.margins(0.12)
    canvas.legend(figure, usable)
    return close(figure)


def ablation(plt: Any, arms: Mapping[str, Any], setting: str, panels: Sequence[tuple[str, str]]) -> Any:
    """A swept setting on the x axis; a line for each choice of the other swept settings."""
    lines: dict[str, list[tuple[Any, Mapping[str, Any]]]] = {}
    for arm in arms.values():
        if setting in arm["swept"]:
            others = " ".join(f"{k}={_word(v)}" for k, v in arm["swept"].items() if k != setting)
            lines.setdefault(f"{arm['method']} {others}".strip(), []).append((arm["swept"][setting], arm))
        elif arm["method"].startswith("dsbd") and setting in arm["settings"] and not arm["swept"]:
            lines.setdefault(arm["method"], []).append((arm["settings"][setting], arm))
    values = list(dict.fromkeys(v for points in lines.values() for v, _ in points))
    lines = {name: points for name, points in lines.items() if len({str(v) for v, _ in points}) > 1}
    drawn = {
        f"{line} {number}": arm for line, points in lines.items() for number, (_, arm) in enumerate(points)
    }
    panels = [entry for entry in panels if canvas.tells_apart(drawn, entry[0])]
    if not lines or not panels:
        return None
    order = sorted(values, key=lambda v: (v is None, str(type(v)), v if v is not None else 0))
    figure, axes = canvas.panels(plt, len(panels), 3.7)
    shades = plt.get_cmap("viridis")
    many = len(lines) > 6
    for axis, (name, label) in zip(axes, panels, strict=True):
        for number, (line, points) in enumerate(lines.items()):
            spots = sorted(
                ((order.index(v), arm) for v, arm in points if value(arm, name) is not None),
                key=lambda p: p[0],
            )
            color = shades(number / max(1, len(lines) - 1) * 0.85)
            # Lines are set apart sideways, so that their bars do not cover each other.
            shift = 0.24 * (number / max(1, len(lines) - 1) - 0.5) if len(lines) > 1 else 0.0
            across = [place + shift for place, _ in spots]
            axis.plot(
                across, [value(arm, name) for _, arm in spots], marker="o", ms=5, lw=1.4, label=line, mec="white",
                color=color, alpha=0.6 if many else 0.95,
            )  # fmt: skip
            for place, (_, arm) in zip(across, spots, strict=True):
                bars = errors_of(arm, yerr=name)
                axis.errorbar(
                    place, value(arm, name), **bars, fmt="none", ecolor=color, elinewidth=0.7, alpha=0.5
                )
        axis.set_xticks(range(len(order)), [_word(v) for v in order])
        axis.set_xlabel(setting.replace("_", "-"))
        axis.set_ylabel(label)
    handles, labels = axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(
            handles[:12], labels[:12], loc="outside lower center", ncols=2, frameon=False, fontsize=7.5
        )
    for axis in axes:
        begin_at_0(axis, "y")
    return figure


def _word(item: Any) -> str:
    return "none" if item is None else f"{item:g}" if isinstance(item, float) else str(item)


def depths(plt: Any, arms: Mapping[str, Any]) -> Any:
    """Acceptance at each layer of the forest with intervals and n: how far drafts are worth making."""
    usable = {
        name: arm["acceptance_by_depth"]
        for name, arm in arms.items()
        if arm["acceptance_by_depth"] and not arm["swept"]
    }
    if not usable:
        return None
    figure, axis = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    dashes = ["-", "--", ":", "-."]
    seen: dict[str, int] = {}
    for number, (name, entries) in enumerate(usable.items()):
        group = family(arms[name]["method"])
        style = dashes[seen.setdefault(group, 0) % len(dashes)]
        seen[group] += 1
        shift = 0.16 * (number / max(1, len(usable) - 1) - 0.5) if len(usable) > 1 else 0.0
        known = [
            (depth + shift, entry) for depth, entry in enumerate(entries, 1) if entry["value"] is not None
        ]
        drafts = "/".join(_short(entry["examined"]) for _, entry in known)
        axis.plot(
            [place for place, _ in known], [entry["value"] for _, entry in known], style, marker=MARKERS[group],
            color=COLORS[group], mec="white", label=f"{name}\n(n drafts: {drafts})",
        )  # fmt: skip
        for place, entry in known:
            bars = errors_of({"share": entry}, yerr="share")
            axis.errorbar(
                place, entry["value"], **bars, fmt="none", ecolor=COLORS[group], elinewidth=0.8, alpha=0.5
            )
    axis.set_xticks(range(1, 1 + max(len(entries) for entries in usable.values())))
    axis.set_ylim(bottom=0)
    axis.set_xlabel("layer of the draft")
    axis.set_ylabel("share of drafts accepted, median item")
    figure.legend(loc="outside right center", frameon=False, fontsize=8.5)
    return close(figure)


def _short(count: float) -> str:
    return f"{count:.0f}" if count < 10_000 else f"{count / 1000:.0f}k"


def spread(plt: Any, samples: Mapping[str, Sequence[float]], methods: Mapping[str, str], label: str,
           unit_at: float | None = None) -> Any:  # fmt: skip
    """How a figure is spread over items: a dot an item, with the median and its interval beneath.

    Args:
        samples: values of each arm. methods: its method, for the colour.
        unit_at: where a line marks "no difference".
    """
    from dsbd_cli.bench.stats import median

    samples = {name: values for name, values in samples.items() if len(values) > 1}
    if not samples:
        return None
    figure, axis = plt.subplots(figsize=(7.2, 1.4 + 0.62 * len(samples)), layout="constrained")
    every = [value for values in samples.values() for value in values]
    logarithmic = min(every) > 0 and max(every) / min(every) > 20
    for row, (name, values) in enumerate(samples.items()):
        group = family(methods[name])
        # A fixed pattern instead of chance: the same results give the same picture.
        heights = [row - 0.22 + 0.3 * ((place * 0.618) % 1 - 0.5) for place in range(len(values))]
        axis.plot(sorted(values), heights, "o", color=COLORS[group], ms=4, alpha=0.45, mec="none", ls="")
        entry = median(values).to_dict()
        bars = errors_of({"v": entry}, xerr="v")
        axis.errorbar(
            entry["value"],
            row + 0.2,
            **bars,
            fmt=MARKERS[group],
            color=COLORS[group],
            ms=7,
            mec="white",
            capsize=3,
        )
    if unit_at is not None:
        axis.axvline(unit_at, color="#777777", lw=0.9, zorder=1)
    axis.set_yticks(range(len(samples)), [f"{name}\n(n = {len(values)})" for name, values in samples.items()])
    axis.set_ylim(len(samples) - 0.5, -0.6)
    if logarithmic:
        axis.set_xscale("log")
        label += " (logarithmic axis)"
    axis.set_xlabel(label)
    return close(figure)
