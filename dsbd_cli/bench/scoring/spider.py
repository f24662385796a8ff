"""Spider execution accuracy, verdicts equal to the published rule (taoyds/test-suite-sql-eval, exec_eval.py).

The rule: DISTINCT is stripped from both queries (unless `keep_distinct`); both run on every database of the
folder; results are equal if some permutation of columns makes them the same bag of rows (the same list, if
the gold says ORDER BY), values compared exactly. This module states that rule anew: the column search is
exact and quick where the published one enumerates all permutations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from dsbd_cli.bench.scoring.sql_extract import RULE as EXTRACTION
from dsbd_cli.bench.scoring.sql_extract import extract_sql
from dsbd_cli.bench.scoring.sql_runner import QueryResult, SqlRunner

RULE = "test-suite-sql-eval execution accuracy"
Outcome = Literal["correct", "wrong", "no_sql", "cut", "error", "timeout", "too_large", "data_fault"]
Row = tuple[Any, ...]

_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """`outcome` of one answer; `correct` is None only for a data fault. `sql` is what was run."""

    outcome: Outcome
    sql: str | None = None
    message: str = ""

    @property
    def correct(self) -> bool | None:
        return None if self.outcome == "data_fault" else self.outcome == "correct"


def same_result(gold: Sequence[Row], given: Sequence[Row], ordered: bool) -> bool:
    """True if some column permutation of `given` equals `gold`: as a bag of rows, or as a list if `ordered`."""
    if not gold and not given:
        return True
    if len(gold) != len(given) or len(gold[0]) != len(given[0]):
        return False
    if not _alike_unordered(gold, given, ordered):
        return False
    width = len(gold[0])
    collect = tuple if ordered else Counter
    heads = [collect(row[: k + 1] for row in gold) for k in range(width)]

    def search(chosen: tuple[int, ...]) -> bool:
        if len(chosen) == width:
            return True
        tried = set()
        for column in range(width):
            key = tuple((type(row[column]), row[column]) for row in given)
            if column in chosen or key in tried:  # equal columns are interchangeable
                continue
            tried.add(key)
            longer = (*chosen, column)
            if collect(tuple(row[c] for c in longer) for row in given) == heads[len(chosen)] and search(
                longer
            ):
                return True
        return False

    return search(())


def _alike_unordered(gold: Sequence[Row], given: Sequence[Row], ordered: bool) -> bool:
    """The published rule's first test, kept because it decides mixed rows of 1 and 1.0 in its own way."""
    rows = [[tuple(sorted(row, key=lambda v: f"{v}{type(v)}")) for row in table] for table in (gold, given)]
    return rows[0] == rows[1] if ordered else set(rows[0]) == set(rows[1])


def prepare(sql: str, keep_distinct: bool = False) -> str:
    """A query as the published rule runs it: comparison signs joined, DISTINCT stripped, CURDATE's year fixed.

    Stripping keeps the first statement only, as the published rule does.
    """
    sql = sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    if not keep_distinct:
        sql = _without_distinct(sql)
    return _YEAR.sub("2020", sql)


@lru_cache(maxsize=4096)
def _without_distinct(sql: str) -> str:
    import sqlparse

    try:
        statements = sqlparse.parse(sql)
        tokens = [token.value for token in statements[0].flatten()] if statements else [sql]
    except (sqlparse.exceptions.SQLParseError, RecursionError):  # nested beyond what the parser takes
        return sql
    return "".join(token for token in tokens if token.lower() != "distinct")


class SpiderScorer:
    """Scores answers against gold queries; keeps gold results.

    Args:
        runner: runs the SQL.
        keep_distinct: compare with DISTINCT kept (the published default strips it).
    """

    def __init__(self, runner: SqlRunner, keep_distinct: bool = False) -> None:
        self.runner, self.keep_distinct = runner, keep_distinct
        self._gold: dict[tuple[Path, str], QueryResult] = {}

    def switches(self) -> dict[str, Any]:
        """What decides a verdict, for the result file."""
        return {
            "rule": RULE,
            "extraction": EXTRACTION,
            "keep_distinct": self.keep_distinct,
            "plug_value": False,
            "timeout_s": self.runner.seconds,
            "max_result_bytes": self.runner.max_bytes,
        }

    def gold(self, database: Path, sql: str) -> QueryResult:
        """The gold's result on one database."""
        key = (database, sql)
        if key not in self._gold:
            self._gold[key] = self.runner.run(database, prepare(sql, self.keep_distinct))
        return self._gold[key]

    def fault(self, database: Path, gold: str) -> str | None:
        """Why a gold query cannot be used, or None."""
        for path in databases(database):
            result = self.gold(path, gold)
            if result.status != "rows":
                return f"gold query on {path.name}: {result.status}: {result.message}"
        return None

    def score(
        self, answer: str, gold: str, database: Path, *, finish_reason: str = "eos", prompt: str = ""
    ) -> Verdict:
        """The verdict on a raw answer: extraction first, then execution."""
        found = extract_sql(answer, prompt)
        if found is None:
            if fault := self.fault(database, gold):
                return Verdict("data_fault", None, fault)
            return Verdict("cut" if finish_reason == "length" and "```" in answer else "no_sql")
        verdict = self.judge(found.sql, gold, database)
        if verdict.outcome in ("wrong", "error") and finish_reason == "length" and not found.closed:
            return Verdict("cut", found.sql, verdict.message)
        return verdict

    def judge(self, sql: str, gold: str, database: Path) -> Verdict:
        """The verdict on a query: published rule, over all databases of the folder."""
        if fault := self.fault(database, gold):
            return Verdict("data_fault", sql, fault)
        ordered = "order by" in prepare(gold, self.keep_distinct).lower()
        prepared = prepare(sql, self.keep_distinct)
        for path in databases(database):
            given = self.runner.run(path, prepared)
            if given.status != "rows":
                return Verdict(given.status, sql, given.message)
            wanted = self.gold(path, gold)
            assert wanted.rows is not None
            assert given.rows is not None
            if not same_result(wanted.rows, given.rows, ordered):
                return Verdict("wrong", sql)
        return Verdict("correct", sql)


def databases(database: Path) -> list[Path]:
    """All databases of a question: every .sqlite file beside the named one (a test suite has several)."""
    return sorted(database.parent.glob("*.sqlite")) or [database]
