"""Prompts from the command line's argument and from stdin: UTF-8, whatever the locale says."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator

from dsbd_cli.errors import UserError
from dsbd_cli.settings import broken
from dsbd_cli.ui.look import is_terminal

BOM = codecs.BOM_UTF8  # what Windows editors put before a text; no part of a prompt


def read_prompt(prompt: str | None) -> str:
    """The argument, else stdin less one trailing newline; at a terminal with neither: usage.

    Raises:
        UserError: nothing given at a terminal, or text that is not UTF-8.
    """
    if prompt is not None and prompt != "-":
        if broken(prompt):  # in a C locale good UTF-8 comes in like this too
            prompt = _utf8(os.fsencode(prompt), "the prompt")
        return prompt
    if prompt is None and is_terminal(sys.stdin):
        raise UserError('no prompt: dsbd generate "your prompt", or pipe it in (dsbd generate --help)')
    data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    return _utf8(data.removeprefix(BOM), "stdin").removesuffix("\n").removesuffix("\r")


def stdin_lines() -> Iterator[str]:
    """The lines of stdin as they come, without their ends.

    Raises:
        UserError: a line that is not UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer if sys.stdin is not None else (), start=1):
        text = line.removeprefix(BOM) if number == 1 else line
        yield _utf8(text, f"line {number} of stdin").removesuffix("\n").removesuffix("\r")


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} is not UTF-8 text (byte {error.start}): convert it first, e.g. with iconv"
        ) from None
