"""Streamed text on a narrow terminal: broken at spaces, whatever pieces it comes in."""

from __future__ import annotations

import random

import pytest

from dsbd_cli.ui.wrapping import Wrapping

TEXT = "It was the best of times, it was the worst of times;\n\n  - an age of wisdom\n    indented code  here\nend "


def wrapped(text: str, columns: int, seed: int) -> str:
    rng, wrapping, shown = random.Random(seed), Wrapping(columns), ""
    while text:
        size = rng.randint(1, 7)
        shown += wrapping.push(text[:size])
        text = text[size:]
    return shown + wrapping.finish()


@pytest.mark.parametrize("columns", [12, 20, 40, 200])
def test_no_word_is_broken_and_none_is_lost(columns: int) -> None:
    lines = {wrapped(TEXT, columns, seed) for seed in range(20)}
    assert len(lines) == 1
    shown = lines.pop()
    assert shown.split() == TEXT.split()
    assert all(len(line.rstrip()) <= columns for line in shown.split("\n"))
    assert (shown == TEXT) == (columns == 200)


def test_what_fits_on_no_line_and_wide_characters_are_not_held_back() -> None:
    wrapping = Wrapping(10)
    assert wrapping.push("a" * 11) == "a" * 11  # the terminal breaks it
    assert wrapping.push(" bbbb ") == " bbbb"
    assert wrapping.push("\u4f60\u597d") == " \u4f60\u597d"
    assert wrapping.push("\u4f60" * 5) == "\u4f60" * 5
    assert wrapping.push(" c") == ""
    assert wrapping.finish() == " c"


@pytest.mark.parametrize("fence", ["```", "~~~"])
def test_fenced_code_is_the_terminal_s_to_break(fence: str) -> None:
    code = f"  {fence}python\n    return the very long line that was asked for\n~~ {fence}\n  {fence}\n"
    text = f"here is code:\n{code}and prose\nthat goes on and on"
    shown = wrapped(text, 12, 3)
    assert code in shown
    before, _, behind = shown.partition(code)
    assert before == "here is\ncode:\n"
    assert behind == "and prose\nthat goes on\nand on"
