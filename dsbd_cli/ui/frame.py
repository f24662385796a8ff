"""From a snapshot to one picture of the terminal's size. Pure: no terminal, no clock.

The answer takes the rows that the rest leaves. On a low terminal the charts go first, then the
beams; on a narrow one the charts stand below each other. Text of the model reaches rich only as
`Text`, never as markup.
"""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.text import Text

from dsbd_cli.counted import counted
from dsbd_cli.ui.charts import bar, chart
from dsbd_cli.ui.safe import one_line, visible
from dsbd_cli.ui.snapshot import Series, Snapshot

_DIM, _HEAD, _BOLD = Style(dim=True), Style(color="cyan"), Style(bold=True)
_GOOD, _DRAWN, _DISTINCT = Style(color="green"), Style(color="blue"), Style(color="magenta")
_ANSWER_ROWS = 4  # the answer never gets fewer rows than this, whatever else has to go
_CHART_COLUMNS = 16  # a chart that would get fewer columns beside its label stands below it
_TALL = 28  # rows from which on the charts over time are three rows high
_SIDE_BY_SIDE = 56  # columns from which on the two groups of charts stand beside each other


@dataclass(frozen=True)
class Marks:
    """The few signs of the frame, in Unicode or in ASCII."""

    unicode: bool = True

    @property
    def rule(self) -> str:
        return "─" if self.unicode else "-"

    @property
    def dot(self) -> str:
        return " · " if self.unicode else " | "

    @property
    def more(self) -> str:
        return "…" if self.unicode else "..."


def frame(shot: Snapshot, console: Console, width: int, height: int, unicode: bool = True) -> RenderableType:
    """The picture: at most `height` rows of `width` columns."""
    marks = Marks(unicode)
    head = [_title(shot, width, marks), _prompt(shot, width, marks)]
    foot = [
        _shortened(Text(f"! {one_line(note, unicode)}", style="yellow"), width, marks) for note in shot.notes
    ]
    foot += _speed(shot, width, 2 if height >= 16 else 1, marks)
    free = height - len(head) - len(foot) - 1
    rest: list[RenderableType] = []
    tall = 3 if height >= _TALL else 1
    for block in (_beams(shot, width, marks), _charts(shot, width, tall, marks)):
        if free - len(block) >= _ANSWER_ROWS:
            rest += block
            free -= len(block)
    answer = _answer(shot, console, width, max(1, free), marks)
    return Group(*head, _rule("answer", width, marks), *answer, *rest, *foot)


def _rule(name: str, width: int, marks: Marks) -> Text:
    line = Text.assemble((marks.rule * 2, _DIM), (f" {name} ", _HEAD), end="")
    line.append(marks.rule * max(0, width - line.cell_len), _DIM)
    return _cut(line, width)


def _cut(line: Text, width: int) -> Text:
    line.no_wrap, line.end = True, "\n"
    line.truncate(width, overflow="crop")
    return line


def _shortened(line: Text, width: int, marks: Marks) -> Text:
    """One row of it, which says where it is cut."""
    if line.cell_len > width:
        line.truncate(max(0, width - len(marks.more)), overflow="crop")
        line.append(marks.more)
    return _cut(line, width)


def _title(shot: Snapshot, width: int, marks: Marks) -> Text:
    line = Text.assemble(("dsbd ", _BOLD), one_line(shot.models, marks.unicode))
    method = one_line(shot.method, marks.unicode)
    gap = width - line.cell_len - len(method)
    line.append(" " * gap if gap >= 2 else marks.dot)
    line.append(method, _HEAD)
    return _shortened(line, width, marks)


def _prompt(shot: Snapshot, width: int, marks: Marks) -> Text:
    size = f" ({counted(shot.prompt_tokens, 'token')})" if shot.prompt_tokens else " (reading the prompt)"
    text = Text(one_line(shot.prompt, marks.unicode), style=_DIM)
    room = max(0, width - len("prompt ") - len(size))
    if text.cell_len > room:
        text.truncate(max(0, room - len(marks.more)), overflow="crop")
        text.append(marks.more)
    return _cut(Text.assemble(("prompt ", _HEAD), text, (size, _DIM)), width)


def _answer(shot: Snapshot, console: Console, width: int, rows: int, marks: Marks) -> list[Text]:
    """The last `rows` rows of the answer, filled up to exactly that many."""
    # Wrapping only what can show keeps the cost the same for a long answer; begin at a line's start.
    keep = (rows + 2) * width
    settled = visible(shot.confirmed, marks.unicode)
    if len(settled) > keep:
        start = settled.find("\n", len(settled) - 2 * keep, len(settled) - keep)
        settled = settled[start + 1 if start >= 0 else -keep :]
    text = Text(settled)
    text.append(visible(shot.contested, marks.unicode), _DIM)
    lines = list(text.wrap(console, width, overflow="fold"))[-rows:]
    return [_cut(line, width) for line in lines] + [Text("")] * (rows - len(lines))


def _beams(shot: Snapshot, width: int, marks: Marks) -> list[RenderableType]:
    """A rule, and as many rows as beams may live, so that the picture keeps its shape."""
    rows: list[RenderableType] = [_rule("live beams", width, marks)]
    gauge = 12 if width >= 80 else 6
    for beam in shot.beams:
        shade = bar(beam.share, gauge, marks.unicode)
        text = one_line(beam.text, marks.unicode)
        line = Text.assemble(f"{beam.share:5.2f} ", (shade.ljust(gauge), _GOOD), " ")
        room = width - line.cell_len
        own = Text(text)
        if own.cell_len > room:
            # The end is where beams differ most lately, but their beginning tells them apart.
            own.truncate(max(0, room - len(marks.more)), overflow="crop")
            own.append(marks.more)
        rows.append(_cut(line + own, width))
    space = min(4, max(1, shot.width)) - len(shot.beams)
    return rows + [Text("")] * space


def _charts(shot: Snapshot, width: int, tall: int, marks: Marks) -> list[RenderableType]:
    """Acceptance and width, side by side where they fit; one renderable a row."""
    if width < _SIDE_BY_SIDE:
        parts = [*_acceptance(shot, width, 1, marks), *_widths(shot, width, 1, marks)]
        return [_rule("acceptance and width", width, marks), *(_cut(part, width) for part in parts)]
    left = (width - 2) // 2
    right = width - 2 - left
    one = [_rule("acceptance", left, marks), *_acceptance(shot, left, tall, marks)]
    two = [_rule("beam width", right, marks), *_widths(shot, right, tall, marks)]
    rows: list[RenderableType] = []
    for first, second in itertools.zip_longest(one, two):
        line = _cut(first, left) if first is not None else Text("")
        line.pad_right(left + 2 - line.cell_len)
        rows.append(_cut(line + second, width) if second is not None else line)
    return rows


def _number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _lines(
    name: str, series: Series, width: int, rows: int, top: float, style: Style, marks: Marks
) -> list[Text]:
    """`name now 0.75 avg 0.61 ▁▃▅▇`, the chart `rows` high."""
    label = Text.assemble((f"{name:9}", _DIM), f"{_number(series.now):>5}", (" avg ", _DIM))
    label.append(f"{_number(series.mean):>5} ")
    if width - label.cell_len < _CHART_COLUMNS:
        below = chart(series.values, width, rows, top, marks.unicode)
        return [label, *(Text(line, style=style) for line in below)]
    drawn = chart(series.values, width - label.cell_len, rows, top, marks.unicode)
    blank = Text(" " * label.cell_len)
    return [(label if row == 0 else blank).copy().append(line, style) for row, line in enumerate(drawn)]


def _acceptance(shot: Snapshot, width: int, rows: int, marks: Marks) -> list[Text]:
    lines = _lines("rate", shot.acceptance, width, rows, 1.0, _GOOD, marks)
    for depth, rate in enumerate(shot.by_depth, start=1):
        line = Text.assemble((f"layer {depth:<3}", _DIM), f"{_number(rate):>5} ")
        shade = bar(rate or 0.0, max(0, width - line.cell_len), marks.unicode)
        lines.append(line.append(shade, _GOOD))
    if not shot.by_depth:
        lines += [Text(line, style=_DIM) for line in textwrap.wrap(shot.undrafted, max(1, width))]
    return lines


def _widths(shot: Snapshot, width: int, rows: int, marks: Marks) -> list[Text]:
    lines = [
        *_lines("drawn", shot.drawn, width, rows, shot.width, _DRAWN, marks),
        *_lines("distinct", shot.distinct, width, rows, shot.width, _DISTINCT, marks),
    ]
    total = sum(count for _, count in shot.histogram)
    for value, count in shot.histogram[-4:]:
        line = Text.assemble((f"W_L = {value:<3}", _DIM), f"{count / total:>5.0%} ")
        shade = bar(count / total, max(0, width - line.cell_len), marks.unicode)
        lines.append(line.append(shade, _DRAWN))
    return lines


def _speed(shot: Snapshot, width: int, rows: int, marks: Marks) -> list[Text]:
    """The bottom lines, at most `rows`: what fits, most wanted first."""
    rate = "n/a" if shot.tokens_per_s is None else f"{shot.tokens_per_s:.1f}"
    size = kilo(shot.kv_bytes, "B")
    parts = [
        f"{_number(shot.layers_per_call.mean)} layers/call",
        f"{shot.tokens}/{shot.budget} tokens",
        f"{_number(shot.joules_per_token)} J/token" if shot.joules_per_token is not None else "n/a J/token",
        f"KV {size}" if shot.kv_slots is None else f"KV {shot.kv_slots} slots, {size}",
        f"{shot.seconds:.1f} s",
    ]
    lines = [Text(f"{rate} tok/s", style=_BOLD)]
    for part in parts:
        if lines[-1].cell_len + len(marks.dot) + len(part) <= width:
            lines[-1] = Text.assemble(lines[-1], (marks.dot, _DIM), part)
        elif len(lines) < rows:
            lines.append(Text(part))
    return [_cut(line, width) for line in lines]


def kilo(value: int | None, unit: str) -> str:
    """12345678 -> `12.3 MB`; `n/a` for None."""
    if value is None:
        return f"n/a {unit}"
    size = float(value)
    for prefix in ("", "k", "M", "G"):
        if size < 1000:
            return f"{size:.0f} {unit}" if not prefix else f"{size:.1f} {prefix}{unit}"
        size /= 1000
    return f"{size:.1f} T{unit}"
