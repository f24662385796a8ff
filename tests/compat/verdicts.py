"""What becomes of an architecture: served, only path by path, refused by name, or wrong.

`python -m tests.compat.verdicts [CASES] [NAME...]` compares every architecture, or those named, and writes their
lines into `docs/architectures.md`.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import dsbd_cli
from dsbd_cli.errors import UserError
from tests.compat import zoo

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
METHODS = ("multinomial", "beam", "dsbd", "deterministic")
SERVED, PATHS, REFUSED, FAILS, UNBUILT = "served", "path by path", "refused", "fails", "not built small"
_MARK = "| architecture |"

Texts = dict[tuple[int, ...], list[list[int]]]


class Verdict(NamedTuple):
    """One line of the table: the architecture, what `METHODS` do with it, and the reason where not all are served."""

    name: str
    by_method: dict[str, str]
    note: str = ""

    def line(self) -> str:
        return f"| {self.name} | {' | '.join(self.by_method[method] for method in METHODS)} | {self.note} |"


def draft(vocab: int) -> Any:
    """A tiny Llama for the drafting method: any draft serves any target."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=vocab, max_position_embeddings=128, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


def judge(name: str, cases: int, seed: int = 0) -> Verdict:
    """Compare `cases` random texts a method with transformers' own: greedy and beams, float32."""
    try:
        model = zoo.build(name)
    except ValueError as error:
        return Verdict(name, dict.fromkeys(METHODS, UNBUILT), str(error)[:100].replace("|", "/"))
    small = draft(zoo.VOCAB)
    by_method: dict[str, str] = {}
    notes: list[str] = []
    texts: Texts = {}
    for method in METHODS:
        by_method[method], note = _tried(model, small, method, cases, seed, texts)
        if note and note not in notes:
            notes.append(note)
    return Verdict(name, by_method, "; ".join(notes))


def _tried(model: Any, small: Any, method: str, cases: int, seed: int, texts: Texts) -> tuple[str, str]:
    """The verdict and its reason; `texts` are transformers' own, by what was asked for."""
    dice = random.Random(seed)
    word = SERVED
    for _ in range(cases):
        ids = torch.tensor([[dice.randrange(3, zoo.VOCAB) for _ in range(dice.randrange(2, 9))]])
        length = dice.randrange(3, 13)
        ours: dict[str, Any] = {
            "custom_generate": dsbd_cli.generate,
            "max_new_tokens": length,
            "draft_model": small,
        }
        theirs: dict[str, Any] = {"max_new_tokens": length, "do_sample": False, "num_beams": 1}
        if method == "deterministic":
            beams = dice.choice((2, 3, 4))
            ours |= {"method": "dsbd", "width": beams, "do_sample": False}
            theirs["num_beams"] = beams
        elif method == "multinomial":
            ours |= {"method": method, "do_sample": False}
        else:  # beams of the joint's most probable continuation: greedy
            ours |= {
                "method": method,
                "width": 3,
                "do_sample": True,
                "top_k": 1,
                "top_p": 1.0,
                "temperature": 1.0,
            }
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            asked = (*ids[0].tolist(), length, theirs["num_beams"])
            try:
                expected = texts.get(asked) or model.generate(ids, **theirs).tolist()
            except Exception as error:
                return UNBUILT, f"transformers' own generate fails: {_first(error)}"
            texts[asked] = expected
            try:
                got = model.generate(ids, **ours).tolist()
            except UserError as error:
                return REFUSED, _short(str(error))
            except Exception as error:
                return FAILS, f"{type(error).__name__}: {_first(error)}"
        if got != expected:
            return FAILS, f"{method} differs from transformers"
        if any("path by path" in str(warning.message) for warning in said):
            word = PATHS
    return word, ""


def _first(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:100].replace("|", "/")


def _short(refusal: str) -> str:
    """A refusal without the model's name in front and the way out behind."""
    what = refusal if " is not offered" in refusal else refusal.split(": ", 1)[-1]
    return what.split(", so a tree")[0].split("; method")[0][:140].replace("|", "/")


def table(verdicts: list[Verdict]) -> str:
    """The Markdown table, one line an architecture."""
    head = f"{_MARK} {' | '.join(METHODS)} | why |"
    lines = [head, "|" + " --- |" * (len(METHODS) + 2), *(verdict.line() for verdict in verdicts)]
    return "\n".join(lines) + "\n"


def read_page() -> dict[str, dict[str, str]]:
    """By architecture, what the page says of each method."""
    return {name: dict(zip(METHODS, cells, strict=False)) for name, (*cells, _) in _lines().items()}


def measured_with() -> tuple[int, ...]:
    """The release of transformers that the page was written with."""
    said = re.search(r"transformers (\d+)\.(\d+)", PAGE.read_text(encoding="utf-8"))
    assert said is not None
    return int(said[1]), int(said[2])


def _lines() -> dict[str, list[str]]:
    """The table's cells behind the name, by name."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and not line.startswith((_MARK, "| ---")) and len(cells) == len(METHODS) + 2:
            found[cells[0]] = cells[1:]
    return found


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    asked = sys.argv[2:]
    torch.set_num_threads(1)
    lines = _lines() if asked else {}
    for name in asked or zoo.names():
        verdict = judge(name, cases)
        lines[name] = [*(verdict.by_method[method] for method in METHODS), verdict.note]
        print(verdict.line(), flush=True)
    rows = [
        Verdict(name, dict(zip(METHODS, cells, strict=False)), cells[-1])
        for name, cells in sorted(lines.items())
    ]
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.split(_MARK)[0] + table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
