"""A trace in the terminal: every iteration as a tree, beams as roots, drafts and draws below them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text
from rich.tree import Tree

from dsbd_cli.counted import counted
from dsbd_cli.setting_text import describe
from dsbd_cli.trace.read import (
    ACCEPTED,
    COPIED,
    DEAD,
    FILLED,
    REJECTED,
    UNREACHED,
    Trace,
    fate,
    origin,
    share,
)
from dsbd_cli.ui.safe import one_line
from dsbd_cli.wording import ending

_STYLES = {ACCEPTED: "green", FILLED: "blue", REJECTED: "red", DEAD: "dim", UNREACHED: "dim"}
_SIGNS = {ACCEPTED: "+", FILLED: "*", REJECTED: "x", DEAD: "-", UNREACHED: "."}
LEGEND = f"+ accepted   * drawn by the target   x refused   . not looked at   - below one that is no beam   {COPIED}"


def head(trace: Trace, unicode: bool = True) -> Text:
    """What was run, and what the signs mean."""
    start = trace.start
    models = " + ".join(entry["name"] for entry in start["models"].values() if entry)
    text = Text(
        f"{one_line(models, unicode)}, {one_line(describe(start['settings']), unicode)}\n", style="bold"
    )
    text.append(f"prompt ({counted(start['prompt_tokens'], 'token')}): ", "dim")
    text.append(one_line(start["prompt"], unicode) + "\n").append(LEGEND, "dim")
    return text


def trees(trace: Trace, unicode: bool = True) -> Iterator[Tree]:
    """One tree an iteration."""
    for iteration in trace.iterations:
        yield _tree(iteration, unicode)


def _tree(iteration: Mapping[str, Any], unicode: bool) -> Tree:
    layers = iteration["layers"]
    widths = ", ".join(f"{layer['width']} ({layer['distinct']} distinct)" for layer in layers)
    tree = Tree(
        Text(
            f"iteration {iteration['n']}: {counted(len(layers), 'layer')}, width {widths}",
            style="bold",
        )
    )
    at: dict[int, Tree] = {}
    scores = [beam["score"] for beam in iteration["beams"]]
    for beam in iteration["beams"]:
        label = Text(f"{share(beam['score'], scores):4.2f} ", style="cyan")
        at[beam["id"]] = tree.add(label.append(one_line(beam["tail"] or "(prompt)", unicode), "default"))
    for node in iteration["nodes"]:
        fated = fate(node, iteration)
        label = Text(f"{_SIGNS[fated]} {one_line(repr(node['text'])[1:-1], unicode)}", style=_STYLES[fated])
        facts = []
        if node["drafted"]:
            facts.append(origin(node) + (f" x{node['drafted']}" if node["drafted"] > 1 else ""))
        if node["accepted"] + node["filled"] > 1:
            facts.append(f"draws {node['accepted'] + node['filled']}")
        if node["logp"] is not None:
            facts.append(f"log p {node['logp']:.2f}")
        if node["finish"]:
            facts.append(node["finish"])
        at[node["id"]] = at[node["parent"]].add(label.append("  " + ", ".join(facts), "dim"))
    return tree


def tail(trace: Trace) -> Text:
    """How it ended."""
    if trace.result is None:
        return Text(
            "the run did not end" + (" (the last line is torn)" if trace.torn else ""), style="yellow"
        )
    stats = trace.result["stats"]
    return Text(f"{counted(stats['new_tokens'], 'token')} in {counted(stats['target_calls'], 'target call')}, "
                f"{ending(trace.result['finish_reason'])}", style="bold")  # fmt: skip
