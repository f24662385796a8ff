"""Prompts of a batch, from a text file (one a line) or JSON Lines, and the seed of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsbd_cli import messages
from dsbd_cli.errors import UserError
from dsbd_cli.paths import refuse_special
from dsbd_cli.prompts import Prompt
from dsbd_cli.settings import FIELDS, Settings, broken


@dataclass(frozen=True)
class Item:
    """One prompt. `index` counts from 0 in the order of the input; `id` is the user's own name for it."""

    index: int
    prompt: Prompt
    id: str | int | None = None


def item_seed(seed: int, index: int) -> int:
    """The seed of prompt `index` in a run of seed `seed`: 53 bits of numpy's `SeedSequence([seed, index])`.

    Prompts of one batch get independent randomness, and a prompt's answer depends neither on what
    was decoded before it nor on who decodes it. 53 bits, so that every JSON reader keeps it exact.
    """
    state = np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)
    return int(state[0]) >> 11


def form_of(path: Path) -> str:
    """How the lines of a file are read: `text` or `json`."""
    return "text" if path.suffix == ".txt" else "json"


def read_items(path: Path, option: str = "--input ") -> tuple[list[Item], str]:
    """The prompts of a file and the SHA-256 of its bytes.

    `.txt`: line i is prompt i, an empty line an empty prompt (most targets refuse it: `prompts.encode`).
    `.jsonl`: a line is an object with `prompt` (a text, or messages) or `messages` (a list of {role, content}) and,
    if wanted, an `id`; or simply a JSON string. Other keys are left alone; blank lines are skipped.

    A line that no target could be asked is refused here, before anything is loaded; what depends on the target (a
    role of its template's, no room) refuses that prompt alone, later.

    Args:
        option: what the file was named with, for errors; nothing where it is an argument.

    Raises:
        UserError: no such file, not UTF-8, another suffix, or a line that is no prompt.
    """
    refuse_special(path, f"{option}{path}", "for a pipe there is --lines")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{option}{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{option}{path} is a folder, not a file") from None
    except OSError as error:
        raise UserError(f"{option}{path} cannot be read: {error.strerror}") from None
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"{option}{path} line {line}: not UTF-8 text; convert it first, e.g. with iconv"
        ) from None
    if lines[-1] == "":
        lines.pop()
    lines = [text.removesuffix("\r") for text in lines]
    if path.suffix == ".txt":
        items = [Item(index, text) for index, text in enumerate(lines)]
    elif path.suffix in (".jsonl", ".ndjson"):
        items = []
        for number, text in enumerate(lines, start=1):
            if text.strip():
                items.append(_parse(text, len(items), f"{option}{path} line {number}"))
    else:
        raise UserError(f"{option}{path}: the name must end in .txt (a prompt a line) or .jsonl")
    if not items:
        raise UserError(f"{option}{path} holds no prompt")
    return items, hashlib.sha256(data).hexdigest()


def refuse_raw(items: Iterable[Item], settings: Settings, where: str) -> None:
    """Refuse messages in a raw run before anything is loaded.

    Args:
        where: what the prompts were read from, for the error.

    Raises:
        UserError: the first prompt that is no text.
    """
    turns = [item.index for item in items if not isinstance(item.prompt, str)]
    if settings.raw and turns:
        raise UserError(f"{where}: prompt {turns[0] + 1} holds messages; {messages.NOT_RAW}")


def json_note(number: int, text: str, way: str) -> str | None:
    """What to tell of a line of text that was most likely meant as one of JSON Lines; None of any other.

    Args:
        number: of the line, from 1.
        way: what takes lines as texts, and what takes such objects; `{}` stands for the key.
    """
    if not text.lstrip().startswith("{"):
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    key = next((key for key in ("messages", "prompt") if key in entry), None)
    return None if key is None else f"line {number} looks like JSON: {way.format(key)}"


def _parse(line: str, index: int, where: str) -> Item:
    try:
        entry = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    if isinstance(entry, str):
        return Item(index, entry)
    if not isinstance(entry, Mapping):
        raise UserError(f"{where}: must be an object with prompt or messages, or a text")
    known = [name for name in entry if name in FIELDS]
    if known:
        raise UserError(f"{where}: {known[0]} is a setting of the whole run: give it on the command line")
    try:
        prompt = messages.prompt_of(entry)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    own = entry.get("id")
    if not (own is None or type(own) in (str, int)) or (isinstance(own, str) and broken(own)):
        raise UserError(f"{where}: id must be a text or a whole number")
    return Item(index, prompt, own)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return found
