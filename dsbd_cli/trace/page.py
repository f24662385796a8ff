"""A trace as one self-contained page: the paper's figure, for your own prompt. No script, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dsbd_cli.setting_text import describe
from dsbd_cli.trace import PAGE
from dsbd_cli.trace.layout import BOX, ROW, STEP, Place, place_nodes
from dsbd_cli.trace.read import ACCEPTED, COPIED, FILLED, MEANING, Trace, fate, origin, share
from dsbd_cli.ui.safe import one_line

_LONGEST = 14  # characters of a token shown in its box
_STYLE = (
    """
:root { color-scheme: light dark; --bg: #fff; --ink: #1c2430; --dim: #6b7686; --line: #d5dbe3; --box: #f4f6f9;
 --accepted: #14804a; --filled: #1f5fc4; --rejected: #c2372e; --dead: #a5aebb; --unreached: #a5aebb; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161c; --ink: #e3e8ef; --dim: #8f9bab; --line: #313a47;
 --box: #1b222b; --accepted: #4cc38a; --filled: #6aa2f7; --rejected: #f2766d; --dead: #5b6674; --unreached: #5b6674; } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--bg); color: var(--ink);
 font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .25rem; }
.dim { color: var(--dim); } .mono, svg text, .answer { font-family: ui-monospace, Menlo, Consolas, monospace; }
.prompt, .answer { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line);
 padding: .25rem .75rem; margin: .5rem 0; max-height: 40vh; overflow-y: auto; }
.answer a { color: inherit; text-decoration: none; border-bottom: 2px solid; border-radius: 2px; }
.answer a:hover, .answer a:focus { background: var(--line); }
.answer .accepted { border-color: var(--accepted); } .answer .filled { border-color: var(--filled); }
dl { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: .75rem 0; } dl div { display: flex; gap: .5rem; }
dt { color: var(--dim); } dd { margin: 0; } .figure { overflow-x: auto; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; margin: .75rem 0; }
ul.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .4em;
 border: 2px solid; }
ul.legend .beam { border-color: var(--ink); }
section { border-top: 1px solid var(--line); padding: .75rem 0; content-visibility: auto;
 contain-intrinsic-size: auto 16rem; }
section:target h2 { color: var(--filled); }
svg { display: block; max-width: none; } svg text { font-size: 12px; fill: var(--ink); }
svg .small { font-size: 10px; fill: var(--dim); } svg path { fill: none; stroke: var(--line); stroke-width: 1.5; }
svg rect { fill: var(--box); stroke-width: 1.5; stroke: var(--ink); }
"""
    + "".join(
        f"svg .{name} rect, ul.legend .{name} {{ stroke: var(--{name}); border-color: var(--{name}); }}\n"
        f"svg path.{name} {{ stroke: var(--{name}); }}\n"
        for name in MEANING
    )
    + """
svg .accepted rect, svg .filled rect { stroke-width: 2.5; }
svg .dead text, svg .unreached text { fill: var(--dim); } svg .rejected text.token { text-decoration: line-through; }
svg .dead rect, svg .unreached rect { stroke-dasharray: 3 3; }
"""
)


def page(trace: Trace) -> str:
    """The whole document."""
    models = " + ".join(str(entry["name"]) for entry in trace.start["models"].values() if entry)
    method = describe(trace.start["settings"])
    body = [
        f"<h1>{_safe(models)} <span class=dim>by {_safe(method)}</span></h1>",
        f'<div class="prompt dim">{_lines(trace.start["prompt"])}</div>',
        _answer(trace),
        _numbers(trace),
        _legend(),
        *(f"<p class=dim>{_safe(notice)}</p>" for notice in trace.notices),
        *(_section(iteration) for iteration in trace.iterations),
    ]
    if trace.result is None:
        body.append("<p>The run did not end: this is what was recorded.</p>")
    return (
        f"{PAGE}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(one_line(trace.start['prompt'])[:60])}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _safe(text: Any) -> str:
    """Words of a model, a prompt or a file as nothing but words."""
    return escape(one_line(str(text)))


def _lines(text: str) -> str:
    from dsbd_cli.ui.safe import visible

    return escape(visible(text))


def _answer(trace: Trace) -> str:
    """The answer, every token underlined by how it came about and linked to its iteration."""
    if trace.result is None:
        return ""
    known: dict[tuple[int, int], tuple[Mapping[str, Any], int]] = {}
    for iteration in trace.iterations:
        for node in iteration["nodes"]:
            if node["accepted"] or node["filled"]:
                known[node["parent"], node["token"]] = node, iteration["n"]
    at = trace.iterations[0]["beams"][0]["id"] if trace.iterations else None
    parts = []
    for token in trace.result["token_ids"]:
        node, number = known.get((at, token), (None, 0)) if at is not None else (None, 0)
        if node is None:
            break
        at = node["id"]
        name = ACCEPTED if node["accepted"] else FILLED
        parts.append(f'<a class={name} href="#iteration-{number}">{_lines(node["text"])}</a>')
    return f"<div class=answer>{''.join(parts)}</div>"


def _numbers(trace: Trace) -> str:
    if trace.result is None:
        return ""
    stats = trace.result["stats"]
    rows = [
        ("tokens", stats["new_tokens"]),
        ("target calls", stats["target_calls"]),
        ("layers per target call", stats["layers_per_target_call"]),
        ("acceptance", stats["acceptance_rate"]),
        ("mean width", stats["mean_width"]),
        ("mean distinct width", stats["mean_distinct_width"]),
        ("tokens per second", stats["tokens_per_s"]),
        ("joules per token", stats["joules_per_token"]),
    ]
    cells = "".join(f"<div><dt>{name}<dd>{_number(value)}</div>" for name, value in rows)
    return f"<dl>{cells}</dl>"


def _number(value: Any) -> str:
    return "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else _safe(value)


def _legend() -> str:
    items = "".join(f"<li><i class={name}></i>{meaning}</li>" for name, meaning in MEANING.items())
    return f"<ul class=legend><li><i class=beam></i>live beam</li>{items}<li>{COPIED}</li></ul>"


def _section(iteration: Mapping[str, Any]) -> str:
    layers = iteration["layers"]
    widths = ", ".join(f"{layer['width']} ({layer['distinct']} distinct)" for layer in layers)
    count = f"{len(layers)} layer{'' if len(layers) == 1 else 's'}"
    return (
        f"<section id=iteration-{iteration['n']}><h2>Iteration {iteration['n']} "
        f'<span class=dim>{count}, width {widths}</span></h2><div class="figure">{_figure(iteration)}</div></section>'
    )


def _figure(iteration: Mapping[str, Any]) -> str:
    """The forest, layers from left to right."""
    places, width, height = place_nodes(iteration)
    scores = [beam["score"] for beam in iteration["beams"]]
    base = iteration["beams"][0]["depth"]
    shapes = [
        _head(index, iteration, base) for index in range(1 + max(place.column for place in places.values()))
    ]
    boxes = []
    for beam in iteration["beams"]:
        words = beam["tail"][-_LONGEST:] or "(prompt)"
        boxes.append(
            _box(places[beam["id"]], "beam", words, f"{share(beam['score'], scores):.2f}", beam["tail"])
        )
    for node in iteration["nodes"]:
        name = fate(node, iteration)
        if node["parent"] in places:
            shapes.append(_edge(places[node["parent"]], places[node["id"]], name))
        boxes.append(_box(places[node["id"]], name, node["text"], _facts(node), _title(node, name)))
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="draft forest of iteration {iteration["n"]}">{"".join(shapes)}{"".join(boxes)}</svg>'
    )


def _head(column: int, iteration: Mapping[str, Any], base: int) -> str:
    layers: Sequence[Mapping[str, Any]] = iteration["layers"]
    name = "beams" if column == 0 else f"layer {base + column}"
    if 0 < column <= len(layers):
        layer = layers[column - 1]
        tested = f", {layer['accepted']}/{layer['examined']}" if layer["drafted"] is not None else ""
        name += f": W {layer['width']}{tested}"
    return f'<text class="small" x="{column * STEP + 1}" y="11">{name}</text>'


def _box(place: Place, name: str, words: str, below: str, title: str) -> str:
    shown = one_line(words).replace(" ", "\u2423")
    shown = shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "\u2026"
    return (
        f'<g class="{name}" transform="translate({place.x} {place.y})"><title>{_safe(title)}</title>'
        f'<rect width="{BOX}" height="{ROW - 8}" rx="5"/><text class="token" x="7" y="15">{escape(shown)}</text>'
        f'<text class="small" x="7" y="27">{escape(below)}</text></g>'
    )


def _facts(node: Mapping[str, Any]) -> str:
    parts = [where] if (where := origin(node)) else []
    if node["logp"] is not None:
        parts.append(f"p {math.exp(node['logp']):.2f}")
    count = node["accepted"] + node["filled"] or node["drafted"]
    if count > 1:
        parts.append(f"x{count}")
    if node["finish"]:
        parts.append(node["finish"])
    return " ".join(parts)


def _title(node: Mapping[str, Any], name: str) -> str:
    return f"{node['text']!r} (token {node['token']}): {MEANING[name]}; {_facts(node)}"


def _edge(start: Place, end: Place, name: str) -> str:
    x1, y1, x2, y2 = start.x + BOX, start.y + (ROW - 8) // 2, end.x, end.y + (ROW - 8) // 2
    middle = (x1 + x2) // 2
    return f'<path class="{name}" d="M{x1} {y1}C{middle} {y1} {middle} {y2} {x2} {y2}"/>'
