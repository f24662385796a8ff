"""A tokenizer by the `tokenizers` library alone: ids, text and plain chat templates, as transformers makes them.

Importing transformers for its wrapper costs most of a second. What is not plain goes to the real tokenizer, loaded
then. `faithful` compares the two once, when a pair is remembered.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from dsbd_cli.errors import let_by

# What a template may not mention, for transformers gives it something of its own there, or the time of day.
_NOT_PLAIN = ("endgeneration", "strftime_now", "namespace", "dict")
_METHODS = (
    "__call__",
    "decode",
    "apply_chat_template",
    "convert_ids_to_tokens",
    "get_vocab",
    "_encode_plus",
    "_decode",
)
_HOMES = {f"transformers.tokenization_utils_{part}" for part in ("base", "tokenizers", "fast")}
_TEXTS = (
    "Hello  world\n\n1. 2,345 x² don't", " a\tb\r\n", "naïve 日本 🙂é", "def f(x):\n    return x", "", " ", "\n",
    "Why is the sky blue?", "I'll SAY \"it's\" 10.5% done…", "<s>[INST] hi </s> <|im_start|>user\nhi<|im_end|>",
)  # fmt: skip
_CHATS = (
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  hi <b>\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b "},
        {"role": "user", "content": "c"},
    ],
)


class ReadyTokenizer:
    """As much of a transformers tokenizer as decoding needs.

    Args:
        stored: `stored_form` of the real one, and its bytes.
        real: loads the real one.
    """

    is_fast = True

    def __init__(self, facts: dict[str, Any], data: bytes, real: Callable[[], Any]) -> None:
        self.backend_tokenizer = Tokenizer.from_str(data.decode())
        self._facts, self._real = facts, real
        self.chat_template = facts["template"]
        self.all_special_ids, self.all_special_tokens = facts["special_ids"], facts["special_tokens"]
        for name in ("bos_token_id", "eos_token_id"):
            setattr(self, name, facts[name])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return dict(sorted(self.backend_tokenizer.get_added_tokens_decoder().items()))

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def convert_ids_to_tokens(self, token: Any) -> Any:
        if isinstance(token, int):
            return self.backend_tokenizer.id_to_token(token)
        return [self.backend_tokenizer.id_to_token(one) for one in token]

    def __call__(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        verbose: bool = True,
        split_special_tokens: bool | None = None,
        return_offsets_mapping: bool = False,
        **more: Any,
    ) -> Any:
        if more or not isinstance(text, str):
            how = {"add_special_tokens": add_special_tokens, "verbose": verbose, **more}
            return self._real()(text, **how)
        core = self.backend_tokenizer
        core.encode_special_tokens = (
            self._facts["split"] if split_special_tokens is None else split_special_tokens
        )
        found = core.encode(text, add_special_tokens=add_special_tokens)
        result: dict[str, Any] = {"input_ids": found.ids}
        if return_offsets_mapping:
            result["offset_mapping"] = found.offsets
        return result

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        if clean_up_tokenization_spaces is not False:
            how = {"skip_special_tokens": skip_special_tokens}
            if clean_up_tokenization_spaces is not None:
                how["clean_up_tokenization_spaces"] = True
            return str(self._real().decode(ids, **how))
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> Any:
        plain = {"add_generation_prompt": True, "continue_final_message": False, "tokenize": False}
        simple = all(
            turn.keys() == {"role", "content"} and all(type(part) is str for part in turn.values())
            for turn in messages
        )
        if how == plain and simple and messages and self._facts["plain"]:
            try:
                return _template(self.chat_template).render(
                    messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._facts["words"]
                )  # fmt: skip
            except Exception as error:  # what it refuses, the real one refuses in its own words
                let_by(error)
        return self._real().apply_chat_template(messages, **how)


@functools.cache
def _template(source: str) -> Any:
    """As transformers compiles it, for templates without what `_NOT_PLAIN` names."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
               sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    world = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    world.filters["tojson"] = tojson
    world.globals["raise_exception"] = refuse
    return world.from_string(source)


def stored_form(tokenizer: Any) -> tuple[dict[str, Any], bytes] | None:
    """Facts and bytes of a real tokenizer, for `ReadyTokenizer`; None where it is not of the plain kind."""
    kind = type(tokenizer)
    homes = {getattr(getattr(kind, name, None), "__module__", None) for name in _METHODS}
    template = tokenizer.chat_template
    if (
        not getattr(tokenizer, "is_fast", False)
        or not homes <= _HOMES
        or not isinstance(template, str | None)
    ):
        return None
    core = tokenizer.backend_tokenizer
    if core.truncation is not None or core.padding is not None:
        return None
    words = dict(tokenizer.special_tokens_map)
    facts = {
        "template": template,
        "plain": template is not None
        and all(type(word) is str for word in words.values())
        and not any(word in template for word in _NOT_PLAIN),
        "words": {name: str(word) for name, word in words.items()},
        "special_ids": list(tokenizer.all_special_ids),
        "special_tokens": [str(token) for token in tokenizer.all_special_tokens],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "split": bool(getattr(tokenizer, "split_special_tokens", False)),
    }
    return facts, core.to_str().encode()


def faithful(ready: ReadyTokenizer, tokenizer: Any) -> bool:
    """Whether both give the same: ids, offsets and text of samples, every token, and templates of conversations."""
    if ready.get_vocab() != tokenizer.get_vocab():
        return False
    if {place: str(token) for place, token in ready.added_tokens_decoder.items()} != {
        place: str(token) for place, token in tokenizer.added_tokens_decoder.items()
    }:
        return False
    for text in _TEXTS:
        for how in (
            {},
            {"add_special_tokens": False},
            {"add_special_tokens": False, "split_special_tokens": True},
        ):
            if list(ready(text, **how)["input_ids"]) != list(tokenizer(text, **how)["input_ids"]):
                return False
        how = {"add_special_tokens": False, "return_offsets_mapping": True}
        if list(map(tuple, ready(text, **how)["offset_mapping"])) != list(
            map(tuple, tokenizer(text, **how)["offset_mapping"])
        ):
            return False
    known = max(ready.get_vocab().values(), default=0) + 1
    runs = [list(range(begin, min(begin + 61, known))) for begin in range(0, known, max(61, known // 40))]
    for ids in runs:
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        if ready.decode(ids, **how) != tokenizer.decode(ids, **how):
            return False
        if ready.convert_ids_to_tokens(ids) != tokenizer.convert_ids_to_tokens(ids):
            return False
    if ready.chat_template is None:
        return True
    return all(_said(ready, chat) == _said(tokenizer, chat) for chat in _CHATS)


def _said(tokenizer: Any, chat: list[dict[str, str]]) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, continue_final_message=False, tokenize=False
            )
        )
    except Exception as error:
        let_by(error)
        return f"{type(error).__name__}: {error}"
