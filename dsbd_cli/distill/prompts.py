"""Where prompts come from: the target itself, or a file of the user's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.messages import question_of
from dsbd_cli.prompts import encode
from dsbd_cli.settings import Settings
from dsbd_cli.turns import texts_of

_MARK = "\u2063dsbd\u2063"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file: a text or chat turns, and the set and id it is reported under."""

    text: str | tuple[dict[str, Any], ...]
    group: str = "prompts"
    id: str = ""


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: JSONL or text, one a line.

    A JSON line holds `prompt` (a text, or messages) or `messages` (a list of {role, content}), and
    optionally `set` and `id`.

    Raises:
        UserError: unreadable, empty, or a line that is not a prompt (with its number).
    """
    try:
        # Not splitlines: texts may hold characters that it takes for line ends.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read prompts: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix not in (".jsonl", ".ndjson"):
            prompts.append(Prompt(line.strip(), id=str(number)))
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: must be an object with prompt or messages")
        text = question_of(record, where)
        prompts.append(Prompt(text, str(record.get("set", "prompts")), str(record.get("id", number))))
    if not prompts:
        raise UserError(f"{path}: no prompts in it")
    return prompts


@dataclass(frozen=True)
class Form:
    """How a model is addressed: `header` + user text + `suffix`, all token ids.

    A base model has no chat template: the header is BOS (or EOS), and `suffix` is None: there are no
    turns, so what it writes from the header is text to learn from as it stands.
    """

    header: tuple[int, ...]
    suffix: tuple[int, ...] | None


def chat_form(tokenizer: Any) -> Form:
    """The form of a tokenizer's chat template, default system turn included.

    Raises:
        UserError: no template and no BOS or EOS token to start from.
    """
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        before, _, after = text.partition(_MARK)
        return Form(tuple(_ids(tokenizer, before)), tuple(_ids(tokenizer, after)))
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise UserError(
            "the tokenizer has no chat template and no BOS or EOS token: use --prompts with --share 1"
        )
    return Form((int(start),), None)


def encode_prompt(tokenizer: Any, text: str | tuple[dict[str, Any], ...]) -> tuple[int, ...]:
    """Token ids of one prompt, as decoding makes them (`dsbd_cli.prompts`): special words in a turn are text there.

    Without a chat template the turns are one text.
    """
    if not isinstance(text, str) and not tokenizer.chat_template:
        text = "\n\n".join("".join(texts_of(turn.get("content"))) for turn in text)
    ids, _ = encode(text, tokenizer, Settings(), len(tokenizer))
    return tuple(ids)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)
