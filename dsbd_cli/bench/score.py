"""Scores of one item's answers, by data set; the unreadable and the broken are counted apart from the wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsbd_cli.bench.datasets.records import Dataset, PlainItem, SpiderItem, SquadItem
from dsbd_cli.bench.scoring import squad
from dsbd_cli.bench.scoring.spider import SpiderScorer
from dsbd_cli.bench.scoring.sql_runner import SqlRunner

# Data set -> (field of the score, how outputs call it, whether it is yes/no).
PRIMARY: Mapping[str, tuple[str, str, bool]] = {
    "spider": ("correct", "execution accuracy", True),
    "squad": ("exact_match", "exact match", True),
    "mt-bench": ("rating", "judge's rating (1 to 10)", False),
    "jsonl": ("exact_match", "exact match", True),
    "prose": ("f1", "F1", False),
}


class Scorer:
    """Scores answers of one data set; a context manager, since SQL runs in a process of its own."""

    def __init__(self, kind: str, *, sql_timeout: float = 5.0, keep_distinct: bool = False) -> None:
        self.kind = kind
        self._runner = SqlRunner(seconds=sql_timeout) if kind == "spider" else None
        self._spider = SpiderScorer(self._runner, keep_distinct) if self._runner else None

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()

    def rule(self) -> dict[str, Any]:
        """What decides the score, for result files."""
        if self._spider is not None:
            return self._spider.switches()
        if self.kind in ("squad", "jsonl"):
            return {"rule": "SQuAD v1.1 exact match and F1 over the answer's first non-empty line"}
        if self.kind == "prose":
            return {
                "rule": "SQuAD v1.1 F1 over the whole answer: no answer could match references that are prose"
            }
        return {"rule": "judge's last well-formed [[rating]] from 1 to 10, mean over turns"}

    def faults(self, dataset: Dataset) -> dict[str, str]:
        """Items whose gold cannot be used: id -> reason. Run before a model is loaded."""
        if self._spider is None:
            return {}
        found = {}
        for item in dataset.items:
            if isinstance(item, SpiderItem) and (reason := self._spider.fault(item.database, item.gold)):
                found[item.id] = reason
        return found

    def score(
        self, item: Any, answers: Sequence[str], finish_reasons: Sequence[str]
    ) -> dict[str, Any] | None:
        """The score of an item's last answer, or None where the data set has none here."""
        if isinstance(item, SpiderItem) and self._spider is not None:
            verdict = self._spider.score(
                answers[-1], item.gold, item.database, finish_reason=finish_reasons[-1]
            )
            return {
                "correct": verdict.correct,
                "outcome": verdict.outcome,
                "sql": verdict.sql,
                "message": verdict.message[:500],
            }
        if self.kind == "prose" and item.references:
            return {"f1": squad.f1(answers[-1], item.references)}
        if isinstance(item, (SquadItem, PlainItem)) and item.references:
            answer = squad.answer_of(answers[-1])
            match = squad.exact_match(answer, item.references)
            outcome = (
                "correct" if match else "cut" if finish_reasons[-1] == "length" and not answer else "wrong"
            )
            return {
                "exact_match": match,
                "f1": squad.f1(answer, item.references),
                "outcome": outcome,
                "answer": answer,
            }
        return None
