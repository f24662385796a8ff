"""SQuAD exact match and F1 by the official normalisation (evaluate-v1.1.py of Rajpurkar et al., 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

# An answer of more words than that matches another's words by accident only.
_SHORT = 10

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Lower case, ASCII punctuation out, the words a/an/the out, single spaces; nothing else."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> bool:
    """True if the normalised prediction equals any normalised reference.

    Raises:
        ValueError: no references (a fault of the data, never a score of 0).
    """
    _require(references)
    return any(normalize(prediction) == normalize(reference) for reference in references)


def f1(prediction: str, references: Sequence[str]) -> float:
    """Best token F1 over the references, in 0..1. Raises like `exact_match`."""
    _require(references)
    return max(_f1(prediction, reference) for reference in references)


def is_prose(reference: str) -> bool:
    """Whether a reference is so long that nothing but itself would match it: several lines, or many words."""
    lines = [line for line in reference.splitlines() if line.strip()]
    return len(lines) > 1 or len(normalize(reference).split()) > _SHORT


def answer_of(text: str) -> str:
    """The part of a model's answer that is scored: its first non-empty line, for all methods alike."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _f1(prediction: str, reference: str) -> float:
    given, wanted = normalize(prediction).split(), normalize(reference).split()
    same = sum((Counter(given) & Counter(wanted)).values())
    return 2 * same / (len(given) + len(wanted)) if same else 0.0


def _require(references: Sequence[str]) -> None:
    if not references:
        raise ValueError("no reference answers")
