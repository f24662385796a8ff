"""The methods that a bench knows, and which settings each of them reads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from dsbd_cli import idle
from dsbd_cli.errors import UserError
from dsbd_cli.names import near

# Name on the command line -> (method as the sweep knows it, settings that the name implies).
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "multinomial": ("multinomial", {}),
    "beam": ("beam", {}),
    "speculative": ("speculative", {}),
    "specinfer": ("specinfer", {}),
    "specinfer:spectr": ("specinfer", {"tree_rule": "spectr"}),
    "specinfer:rsd": ("specinfer", {"tree_rule": "rsd"}),
    "dsbd": ("dsbd", {}),
    "dsbd:paper": ("dsbd", {"verify": "paper"}),
    "dsbd:continue": ("dsbd", {"verify": "continue"}),
    "dsbd:cover": ("dsbd", {"verify": "cover"}),
    "dsbd-kv-one": ("dsbd", {"kv": "one"}),
    "hf-sample": ("hf-sample", {}),
    "hf-beam-sample": ("hf-beam-sample", {}),
    "hf-beam-search": ("hf-beam-search", {}),
    "hf-assisted": ("hf-assisted", {}),
}
DEFAULT_METHODS = ("multinomial", "beam", "speculative", "specinfer", "dsbd")
GROUPS = {
    "all": tuple(METHODS),
    "ours": tuple(name for name in METHODS if not name.startswith("hf-")),
    "hf": tuple(name for name in METHODS if name.startswith("hf-")),
    "default": DEFAULT_METHODS,
}

# `generate` assists one prompt only, also in a bench of batches.
ONE_AT_A_TIME = ("hf-assisted",)

# Settings that mean the same for every method; the rest are looked up per method.
COMMON = (
    "temperature", "top_k", "top_p", "max_new_tokens", "length_penalty", "early_stopping",
)  # fmt: skip
OF_METHOD: Mapping[str, tuple[str, ...]] = {
    **idle.OF_METHOD,
    "hf-sample": (),
    "hf-beam-sample": ("width",),
    "hf-beam-search": ("width",),
    "hf-assisted": ("gamma",),
}
SWEEPABLE = tuple(dict.fromkeys([*COMMON, *itertools.chain(*OF_METHOD.values())]))


def parse_methods(text: str) -> list[str]:
    """Method names from `a,b,c`; `all`, `ours`, `hf` and `default` stand for groups.

    Raises:
        UserError: an unknown name, or none.
    """
    names: list[str] = []
    for word in text.replace(",", " ").split():
        if word not in METHODS and word not in GROUPS:
            known = (*METHODS, *GROUPS)
            raise UserError(
                f"--methods: unknown method {word!r}{near(word, known)}; known: {', '.join(known)}"
            )
        names += GROUPS.get(word, (word,))
    if not names:
        raise UserError(f"--methods is empty; known: {', '.join((*METHODS, *GROUPS))}")
    return list(dict.fromkeys(names))
