"""Which part of an answer is the SQL: one rule for all methods.

Where it begins: the first of these that is there.
 1. The first fenced block (``` or ~~~, closed or cut by the end of the text) that holds a statement.
 2. The answer itself, if it begins with a statement; comments and opening marks (bold, quotes, ...) may stand before.
 3. Inline code (`...`, <code>...</code>) that begins with a statement and names a table (FROM).
 4. A SELECT, or a WITH that opens a common table expression, in the text: one in capitals before one that is not,
    one that begins a line before one that does not, then the first. A "select" that the words around it show to be
    prose ("select the names: SELECT ...") is passed over.
Where it ends: at the first of these outside quotes and comments.
 - `;`, a fence, a closing tag, a `)` that was not opened, the mark that closes the one the statement was opened with.
 - In a closed fence nothing else; elsewhere a blank line, and a line that cannot go on with the statement (it begins
   with neither a keyword nor an operator, and the line before was complete). In a cut fence SQL may go on behind a
   blank line.
If the prompt ends in SELECT and the answer does not begin with a statement, SELECT is put before it.
Nothing found: None ("no SQL found").
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from typing import Literal

RULE = "fence, the answer's own start, inline code, statement in the text"  # for result files
_FENCE = re.compile(
    r"(?P<mark>`{3,}|~{3,})[ \t]*(?:(?!(?:select|with|values)\b)[\w+#.-]+(?=\s))?(?P<body>.*?)(?:(?P=mark)|\Z)",
    re.S | re.I,
)
_CTE = r"with\s+(?:recursive\s+)?[\w\"`\[\]]+\s*(?:\([^()]*\)\s*)?as\s*(?:(?:not\s+)?materialized\s*)?\("
_SELECT = r"select(?=\s+[^\s`]|\s*[(*'\"\[])"
_QUERY = re.compile(rf"\b(?:{_SELECT}|{_CTE})", re.I)
# Statements that are no queries are run too, and refused by the runner, so that they count as errors.
_STATEMENT = re.compile(
    rf"(?:{_SELECT}|{_CTE}|values\s*\(|(?:insert|replace)\s+(?:or\s+\w+\s+)?into\b|update\s+\S+\s+set\b|"
    r"delete\s+from\b|(?:drop|create|alter)\s+(?:temp\w*\s+|unique\s+|virtual\s+)?(?:table|view|index|trigger)\b|"
    r"(?:attach|detach|pragma|vacuum|reindex|savepoint)\b\s*[\w'\";(]|explain\s+(?:query\s+plan\s+)?select\b)",
    re.I,
)
_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)|^[ \t]*--[^\n]*", re.S | re.M)
_COMMENTS = re.compile(r"/\*.*?(?:\*/|\Z)|--[^\n]*", re.S)
_MARKS = "*_\"'“‘«(>` \t\r\n"
_CODE = re.compile(r"(?<!`)`{1,2}(?!`)\s*|<(?:code|pre|sql|query)\b[^>]*>\s*", re.I)
_OPENER = re.compile(r"(\*\*|\*|__|_|\"|'|`{1,2}|“|‘|«)\s*\Z")
_CLOSER = {"“": "”", "‘": "’", "«": "»"}
_TAG = re.compile(r"<(?:code|pre|sql|query)\b[^>]*>\s*\Z", re.I)
# Words that follow the verb "to select", never the keyword.
_PROSE = re.compile(
    r"select\s+(?:the|an?\s+(?!from\b)\w|all|any|every|each|these|those|this|that|which|only|your|our|from|statement|query|clause|"
    r"and|or|it|them)\b",
    re.I,
)
_SENTENCE = re.compile(r"[:.?!](?=\s)")
_PIECE = re.compile(
    r"'(?:[^']|'')*(?:'|\Z)|\"(?:[^\"]|\"\")*(?:\"|\Z)|`(?!``)[^`]+(?:`|\Z)|\[[^\]\n]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)"
    r"|(?P<end>;|`{3,}|~{3,}|</[a-z]+>|\.(?=[ \t]*(?:\r?\n|\Z)))|(?P<line>\r?\n(?:[ \t]*\r?\n)*)|(?P<paren>[()])",
    re.S | re.I,
)
_GOES_ON = re.compile(
    r"(?:select|from|where|group|order|having|limit|offset|union|intersect|except|all|distinct|as|and|or|not|is|null|"
    r"like|glob|between|exists|case|when|then|else|end|join|left|right|full|inner|outer|cross|natural|on|using|with|"
    r"values|over|partition|rows|range|by|asc|desc|nulls|collate|escape|window|filter|indexed|returning|set)\b|in\s*\(",
    re.I,
)
_OPEN_END = re.compile(
    r"(?:[,(=<>+*/%|-]|\b(?:select|distinct|from|where|and|or|not|on|by|join|as|in|like|between|having|limit|offset|"
    r"union|all|except|intersect|case|when|then|else|using|set|is))\s*\Z",
    re.I,
)

Fence = Literal["", "closed", "cut"]


@dataclass(frozen=True)
class Extracted:
    """A statement found in an answer; `closed` = its end was seen, it was not merely the end of the text."""

    sql: str
    closed: bool


def extract_sql(answer: str, prompt: str = "") -> Extracted | None:
    """The statement in an answer by the rule above, or None.

    Args:
        answer: raw model text.
        prompt: what it was asked, for an answer that goes on behind its SELECT.
    """
    fences = list(_FENCE.finditer(answer))
    if re.search(r"\bselect\s*$", prompt, re.I) and not fences and not _STATEMENT.match(answer.lstrip()):
        return _cut("SELECT " + answer.lstrip()) if answer.strip() else None
    for fence in fences:
        body = fence.group("body")
        kind: Fence = "cut" if fence.end("body") == fence.end() else "closed"
        start = _begin(body)
        start = _in_text(body, kind) if start is None else start
        if start is not None and (found := _cut(body[start:], kind)):
            return Extracted(found.sql, found.closed or kind == "closed")
    return _in_answer(answer)


def _in_answer(answer: str) -> Extracted | None:
    """The statement in an answer without fences."""
    start = _begin(answer)
    if start is None:
        for code in _CODE.finditer(answer):
            if _STATEMENT.match(answer, code.end()):
                found = _marked(answer, code.end())
                if found and re.search(r"\bfrom\b", found.sql, re.I):
                    return found
        start = _in_text(answer)
    return None if start is None else _marked(answer, start)


def _begin(text: str) -> int | None:
    """Where the statement stands that a text begins with."""
    bare = _COMMENT.sub(lambda comment: " " * len(comment.group(0)), text)
    start = len(bare) - len(bare.lstrip(_MARKS))
    return start if _STATEMENT.match(bare, start) and not _is_prose(bare, start) else None


def _in_text(text: str, fence: Fence = "") -> int | None:
    """Where the most likely query of a text begins; what reads as prose counts only outside fences."""
    bare = _COMMENT.sub(lambda comment: " " * len(comment.group(0)), text)
    found = [query.start() for query in _QUERY.finditer(bare)]
    # A subquery begins no statement, whatever its case.
    found = [at for at in found[:1]] + [at for at in found[1:] if not bare[:at].rstrip().endswith("(")]
    good = [at for at in found if not _is_prose(bare, at)] or ([] if fence else found)

    def begins_line(at: int) -> bool:
        return not bare[bare.rfind("\n", 0, at) + 1 : at].strip(_MARKS)

    if fence == "cut":
        good = [at for at in good if begins_line(at)]
    return min(good, key=lambda at: (not bare[at : at + 4].isupper(), not begins_line(at), at), default=None)


def _is_prose(text: str, at: int) -> bool:
    """Whether the words around a "select" show that it is the verb."""
    if _PROSE.match(text, at):
        return True
    statement = _cut(text[at:])
    after = _QUERY.search(statement.sql, 1) if statement else None
    return after is not None and _SENTENCE.search(_unquoted(after.string[: after.start()])) is not None


def _unquoted(text: str) -> str:
    return re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"", "x", text)


def _marked(text: str, start: int) -> Extracted | None:
    """The statement at `start`, up to the mark that closes the one it was opened with."""
    rest = text[start:]
    if _TAG.search(text[:start]):
        rest = html.unescape(rest)
    closer = None
    if opener := _OPENER.search(text[:start]):
        mark = opener.group(1)
        closer = _closing(rest, _CLOSER.get(mark, mark))
    if closer is None:
        return _cut(rest)
    found = _cut(rest[:closer])
    return found and Extracted(found.sql, True)


def _closing(text: str, mark: str) -> int | None:
    """Where a mark closes what was opened before `text`, or None.

    It stands behind a word and before a space, punctuation or the end. A quote may hold quotes, so an even number
    of them must lie inside; of stars and underscores, which SQL has too, the last of the paragraph closes.
    """
    paragraph = re.split(r"\n[ \t\r]*\n", text, maxsplit=1)[0]
    places = [
        found.start()
        for found in re.finditer(re.escape(mark) + r"(?=[\s.,;:!?]|\Z)", paragraph)
        if found.start() and not paragraph[found.start() - 1].isspace()
    ]
    if mark in ("*", "_"):
        return places[-1] if places else None
    if mark in ("'", '"', "`"):
        places = [at for at in places if paragraph[:at].count(mark) % 2 == 0]
    return places[0] if places else None


def _cut(text: str, fence: Fence = "") -> Extracted | None:
    """The statement that `text` begins with; `fence` says whose text it is."""
    depth = 0
    for piece in _PIECE.finditer(text):
        if piece.group("end"):
            return _stripped(text[: piece.start()], True)
        if piece.group("paren"):
            depth += 1 if piece.group(0) == "(" else -1
            if depth < 0:
                return _stripped(text[: piece.start()], True)
        elif piece.group("line") and fence != "closed":
            blank = piece.group(0).count("\n") > 1
            if (blank and not fence and not depth) or not _goes_on(
                text[: piece.start()], text[piece.end() :], depth
            ):
                return _stripped(text[: piece.start()], True)
    return _stripped(text, False)


def _goes_on(before: str, after: str, depth: int) -> bool:
    """Whether a statement goes on behind a line break."""
    if not after.strip() or depth > 0 or _OPEN_END.search(_COMMENTS.sub("", before)):
        return True
    after = after.lstrip()
    word = re.match(r"[^\W\d]+", after)
    if word is None:
        return not re.match(r"[-*+•]\s|#|>|\d+[.)]\s|\*\*|__|<", after)
    # "From this you see" and "In short": SQL is written in capitals or without any.
    if word.group(0).istitle() and not before.lstrip()[:2].istitle():
        return False
    return _GOES_ON.match(after) is not None


def _stripped(sql: str, closed: bool) -> Extracted | None:
    return Extracted(sql.strip(), closed) if sql.strip() else None
