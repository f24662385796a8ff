"""`summary.json`, figures and `report.html` of one run, or of several runs side by side."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dsbd_cli.bench import canvas, export, html, plots, tables
from dsbd_cli.bench.files import SUMMARY, read_ratings, read_results, read_run, write_whole
from dsbd_cli.bench.summary import summarize, with_ratings
from dsbd_cli.errors import UserError
from dsbd_cli.paths import make_folder, refuse_no_folder

REPORT = "report.html"
_SWEPT = ("threshold", "draft_width", "gamma", "min_width", "width", "top_k", "top_p", "temperature")


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Summary and report of the runs in `folders`.

    Args:
        folders: folders of runs; unfinished ones report what they hold.
        out: where files go; by default the folder itself, or `bench-report` for several.

    Returns:
        That folder.

    Raises:
        UserError: a folder that holds no results, or a place that cannot be written to.
    """
    target = out or (folders[0] if len(folders) == 1 else Path("bench-report"))
    refuse_no_folder(target, "--out")
    runs: list[dict[str, Any]] = []
    answers = []
    for folder in folders:
        run = read_run(folder)
        results = read_results(folder)
        if run is None or not results:
            raise UserError(f"{folder}: no results of a bench")
        ratings = read_ratings(folder)
        try:
            summary = summarize(run, results, ratings)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder}: results that this version of dsbd does not know ({type(error).__name__}: {error}); "
                f"report them with the version that wrote them, {run['fingerprint'].get('dsbd', 'unknown')}"
            ) from None
        runs.append({"name": _name(folder, [r["name"] for r in runs]), **summary})
        answers.append(
            with_ratings(results, ratings, run.get("judge")) if summary["primary"][0] == "rating" else results
        )
    make_folder(target, f"--out {target}")
    document = {"format": 2, "runs": runs}
    write_whole(target / SUMMARY, json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
    named = {run["name"]: list(tables.tables(run)) for run in runs}
    export.write_tables(target, named)
    for run, results in zip(runs, answers, strict=True):
        front = f"{export.file_name(run['name'])}-" if len(runs) > 1 else ""
        write_whole(
            target / export.FOLDER / f"{front}items.csv", export.items_csv(results).encode("utf-8", "replace")
        )
    figures = dict(_figures(runs, target))
    # Answers may hold halves of characters, which no UTF-8 file can.
    write_whole(target / REPORT, html.page(runs, figures, answers).encode("utf-8", "replace"))
    return target


def _name(folder: Path, taken: Sequence[str]) -> str:
    name = folder.resolve().name
    return name if name not in taken else f"{name} ({len(taken) + 1})"


def all_arms(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arms of all runs, named after their run where there are several."""
    several = len(runs) > 1
    return {
        f"{run['name']}: {name}" if several else name: {
            **arm,
            "is_baseline": name == run["baseline"],
            "drafts": bool(arm["acceptance_by_depth"]),
        }
        for run in runs
        for name, arm in run["arms"].items()
    }


def _figures(runs: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[tuple[str, html.Figure]]:
    """(name, picture) of each figure that the data allow; PNG and SVG files beside the report."""
    plt = canvas.start()
    arms = all_arms(runs)
    kinds = {run["data"]["kind"] for run in runs}
    score = runs[0]["primary"][1] if len(kinds) == 1 else "score"
    qualities = [("score", score)] + ([("f1", "F1")] if kinds == {"squad"} else [])
    qualities.append(("logprob_per_token", "target log-prob, nats per token, median item"))
    plain = {name: arm for name, arm in arms.items() if not arm["swept"]}
    methods = {name: arm["method"] for name, arm in arms.items()}
    together = {bool(run["batch"]) for run in runs}
    unit = "item" if together == {False} else "window" if together == {True} else "item or window"
    speed, energy = (
        ("tokens_per_s", f"tokens/s, median {unit}"),
        ("joules_per_token", f"joules per token, median {unit}"),
    )
    panels = [speed, energy, *qualities]
    draw: dict[str, Callable[[], Any]] = {
        "pareto_speed": lambda: plots.pareto(
            plt, arms, speed[0], f"tokens per second, median {unit}", qualities
        ),
        "pareto_energy": lambda: plots.pareto(
            plt,
            arms,
            energy[0],
            f"joules per token, median {unit} (less is to the right)",
            qualities,
            low_x=True,
        ),
        "speed_ups": lambda: plots.spread(
            plt,
            {
                name: list(arm["against_baseline"]["speed"]["by_item"].values())
                for name, arm in plain.items()
                if arm["against_baseline"] and not arm["is_baseline"]
            },
            methods,
            f"times the baseline's tokens/s, same {unit}",
            1.0,
        ),
        "layers": lambda: plots.spread(
            plt,
            {name: list(arm["layers_by_item"].values()) for name, arm in plain.items() if arm["drafts"]},
            methods,
            "layers committed per target call, by item",
        ),
        "width": lambda: plots.widths(plt, arms, panels),
        "depth": lambda: plots.depths(plt, arms),
    }
    for setting in _SWEPT:
        draw[f"ablation_{setting}"] = partial(plots.ablation, plt, arms, setting, panels)
    for name, make in draw.items():
        figure = make()
        for suffix in ("png", "svg"):
            (folder / f"{name}.{suffix}").unlink(missing_ok=True)
        if figure is None:
            continue
        images = {}
        for suffix in ("png", "svg"):
            buffer = io.BytesIO()
            # Without dates, a report of the same results is the same bytes.
            if suffix == "svg":  # shows the page's background through, light or dark
                figure.savefig(buffer, format=suffix, metadata={"Date": None}, facecolor="none")
            else:
                figure.savefig(buffer, format=suffix)
            images[suffix] = buffer.getvalue()
            write_whole(folder / f"{name}.{suffix}", images[suffix])
        panels_drawn = len(figure.axes)
        plt.close(figure)
        uri = "data:image/svg+xml;base64," + base64.b64encode(_slim(images["svg"])).decode()
        yield name, html.Figure(uri, panels_drawn)


def _slim(svg: bytes) -> bytes:
    """An SVG without its XML prologue and metadata, which an image element needs none of."""
    text = svg.decode("utf-8")
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S).encode("utf-8")
