"""Which part of an answer is the SQL: one rule for all methods.

1. The first fenced block that holds a statement, if there is one (a fence left open runs to the end).
2. In that text, if it begins with a statement, from there; else from the first SELECT (or WITH that opens a
   common table expression) that begins a line; else from the first one anywhere.
3. Up to the first `;`, closing fence or blank line outside quotes and comments, else to the end.
4. If the prompt ends in SELECT and the answer does not begin with a statement, SELECT is put before it.
5. Nothing found: None ("no SQL found").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FENCE = re.compile(r"```[ \t]*(?:[A-Za-z]+(?=\s))?[ \t]*\n?(.*?)(?:```|\Z)", re.S)
_CTE = r"with\s+(?:recursive\s+)?[\w\"`\[\]]+\s*(?:\([^()]*\)\s*)?as\s*(?:(?:not\s+)?materialized\s*)?\("
_QUERY = re.compile(rf"\bselect\b|\b{_CTE}", re.I)
_QUERY_LINE = re.compile(rf"^[ \t]*(?:select\b|{_CTE})", re.I | re.M)
# Statements that are no queries are run too, and refused by the runner, so that they count as errors.
_STATEMENT = re.compile(
    rf"\s*(?:select\b|{_CTE}|values\s*\(|(?:insert|replace)\s+(?:or\s+\w+\s+)?into\b|update\s+\S+\s+set\b|"
    r"delete\s+from\b|(?:drop|create|alter)\s+(?:temp\w*\s+|unique\s+|virtual\s+)?(?:table|view|index|trigger)\b|"
    r"(?:attach|detach|pragma|vacuum|reindex|savepoint)\b\s*[\w'\";(]|explain\s+(?:query\s+plan\s+)?select\b)",
    re.I,
)
_PIECE = re.compile(
    r"'(?:[^']|'')*(?:'|\Z)|\"(?:[^\"]|\"\")*(?:\"|\Z)|`[^`]+(?:`|\Z)|\[[^\]\n]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)"
    r"|(?P<end>;|```|\n[ \t]*\n)",
    re.S,
)


@dataclass(frozen=True)
class Extracted:
    """A statement found in an answer; `closed` = its end was seen, it was not merely the end of the text."""

    sql: str
    closed: bool


def extract_sql(answer: str, prompt: str = "") -> Extracted | None:
    """The statement in an answer by the rule above, or None.

    Args:
        answer: raw model text.
        prompt: what it was asked, for rule 4.
    """
    if re.search(r"\bselect\s*$", prompt, re.I) and not _STATEMENT.match(answer) and "```" not in answer:
        return _cut("SELECT " + answer.lstrip()) if answer.strip() else None
    for fence in _FENCE.finditer(answer):
        if found := _from(fence.group(1)):
            closed = found.closed or fence.group(0).rstrip().endswith("```")
            return Extracted(found.sql, closed)
    return _from(answer)


def _from(text: str) -> Extracted | None:
    if _STATEMENT.match(text):
        return _cut(text.lstrip())
    start = _QUERY_LINE.search(text) or _QUERY.search(text)
    return _cut(text[start.start() :].lstrip()) if start else None


def _cut(text: str) -> Extracted | None:
    for piece in _PIECE.finditer(text):
        if piece.group("end"):
            return _stripped(text[: piece.start()], True)
    return _stripped(text, False)


def _stripped(sql: str, closed: bool) -> Extracted | None:
    return Extracted(sql.strip(), closed) if sql.strip() else None
