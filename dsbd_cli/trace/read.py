"""Reads what `record` wrote, and says what became of every node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.paths import refuse_special
from dsbd_cli.trace.record import FORMAT

ACCEPTED, FILLED, REJECTED, DEAD, UNREACHED = "accepted", "filled", "rejected", "dead", "unreached"
MEANING = {
    ACCEPTED: "drafted, and part of the layer",
    FILLED: "drawn by the target itself",
    REJECTED: "drafted, and refused (cover: not drawn)",
    DEAD: "drafted below one that is no beam",
    UNREACHED: "drafted, and not looked at",
}

COPIED = "copied: what followed the last tokens before, without the draft"


@dataclass
class Trace:
    """One run.

    Attributes:
        start: models, settings, prompt.
        iterations: as written; one per target call, and one where the prompt alone gave a layer.
        notices: what the user was told.
        result: None for a run that did not end.
        torn: the file's last line was cut.
    """

    start: Mapping[str, Any]
    iterations: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    result: Mapping[str, Any] | None = None
    torn: bool = False


def read_trace(path: Path) -> Trace:
    """The run in a file.

    Raises:
        UserError: no such file, or not one of `dsbd generate --trace`.
    """
    refuse_special(path, str(path), "name what dsbd generate --trace wrote")
    try:
        # Not splitlines: a model's words may hold characters that it takes for line ends.
        lines = path.read_bytes().decode("utf-8").split("\n")
        if not lines[-1]:
            lines.pop()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text, so no trace") from None
    trace = None
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            kind = entry["type"]
        except (ValueError, KeyError, TypeError, RecursionError):
            if trace is not None and number == len(lines):
                trace.torn = True
                break
            raise UserError(f"{path} line {number}: not a line of a trace (dsbd generate --trace)") from None
        if kind == "start":
            if entry.get("format") != FORMAT:
                raise UserError(f"{path} is a trace of another release of dsbd: record it again")
            trace = Trace(entry, notices=trace.notices if trace else [])
        elif kind == "notice":
            trace = trace or Trace({})
            trace.notices.append(str(entry.get("text", "")))
        elif trace is not None and kind == "iteration":
            trace.iterations.append(entry)
        elif trace is not None and kind == "finished":
            trace.result = entry["result"]
    if trace is None or not trace.start:
        raise UserError(f"{path} holds no run (dsbd generate --trace writes one)")
    return trace


def fate(node: Mapping[str, Any], iteration: Mapping[str, Any]) -> str:
    """What became of a node: one of the keys of `MEANING`."""
    if node["accepted"]:
        return ACCEPTED
    if node["filled"]:
        return FILLED
    if node["rejected"]:
        return REJECTED
    parents = {beam["id"] for beam in iteration["beams"]}
    parents |= {other["id"] for other in iteration["nodes"] if other["accepted"] or other["filled"]}
    return UNREACHED if node["parent"] in parents else DEAD


def origin(node: Mapping[str, Any]) -> str:
    """Where a node was proposed from: its chance under the draft, or that it followed the last tokens before (which has
    none); empty for one that the target alone drew."""
    if node["q"] is not None:
        return f"q {node['q']:.2f}"
    return "copied" if node["drafted"] else ""


def share(score: float, scores: list[float]) -> float:
    """Softmax weight of `score` among `scores`."""
    import math

    top = max(scores)
    return math.exp(score - top) / sum(math.exp(other - top) for other in scores)
