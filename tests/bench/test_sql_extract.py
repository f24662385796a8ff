"""Getting the SQL out of an answer: the rule, and the forms in which models write a right one."""

from __future__ import annotations

import pytest

from dsbd_cli.bench.scoring.spider import SpiderScorer
from dsbd_cli.bench.scoring.sql_extract import extract_sql

CASES = [
    ("SELECT name FROM singer", "SELECT name FROM singer", False),
    ("SELECT name FROM singer;", "SELECT name FROM singer", True),
    ("```sql\nSELECT name\nFROM singer\n```\nHope it helps", "SELECT name\nFROM singer", True),
    ("Sure!\n```\nselect 1\n```", "select 1", True),
    ("```sql\nSELECT name FROM", "SELECT name FROM", False),
    ("```python\nprint(1)\n```\n```sql\nSELECT 2\n```", "SELECT 2", True),
    ("Here is the query: SELECT a FROM t; Hope it helps", "SELECT a FROM t", True),
    ("select lower from t", "select lower from t", False),
    ("WITH x AS (SELECT 1) SELECT * FROM x", "WITH x AS (SELECT 1) SELECT * FROM x", False),
    (
        "with recursive r(n) as (select 1) select n from r",
        "with recursive r(n) as (select 1) select n from r",
        False,
    ),
    ("With this query we get it: SELECT 1", "SELECT 1", False),
    ("You can select the rows so:\nSELECT a FROM t", "SELECT a FROM t", False),
    ("SELECT 1; SELECT 2", "SELECT 1", True),
    ("SELECT ';' || '--' FROM t; chatter", "SELECT ';' || '--' FROM t", True),
    ("SELECT 'it''s; fine' FROM t", "SELECT 'it''s; fine' FROM t", False),
    ('SELECT "a;b" FROM t;', 'SELECT "a;b" FROM t', True),
    ("SELECT a -- first; second\nFROM t", "SELECT a -- first; second\nFROM t", False),
    ("SELECT a FROM t /* ; */ WHERE b;", "SELECT a FROM t /* ; */ WHERE b", True),
    ("SELECT a FROM t\n\nThis returns the names.", "SELECT a FROM t", True),
    ("SELECT a FROM t ```", "SELECT a FROM t", True),
    ("DROP TABLE singer", "DROP TABLE singer", False),
    ("DELETE FROM singer; SELECT 1", "DELETE FROM singer", True),
    ("PRAGMA writable_schema=1", "PRAGMA writable_schema=1", False),
    ("Create a list first. SELECT 3", "SELECT 3", False),
    ("SELECT 'no end", "SELECT 'no end", False),
]


@pytest.mark.parametrize(("answer", "sql", "closed"), CASES)
def test_rule(answer, sql, closed):
    found = extract_sql(answer)
    assert (found.sql, found.closed) == (sql, closed)


@pytest.mark.parametrize("answer", ["", "   ", "I do not know.", "```python\nprint(1)\n```", "selection"])
def test_no_sql_is_none(answer):
    assert extract_sql(answer) is None


def test_a_prompt_that_ends_in_select_is_completed():
    assert extract_sql(" name FROM singer;", "Question: names?\nSELECT").sql == "SELECT name FROM singer"
    assert extract_sql("SELECT name FROM singer", "x SELECT ").sql == "SELECT name FROM singer"
    assert extract_sql("```sql\nSELECT 1\n```", "x SELECT").sql == "SELECT 1"
    assert extract_sql(" ", "x SELECT") is None


SQL = "SELECT title FROM book WHERE year > 2000 ORDER BY title"
LINES = "SELECT title\nFROM book\nWHERE year > 2000\nORDER BY title"
# What surrounds the SQL of a right answer in practice; `{}` is where it stands.
FORMS = {
    "bare": "{}",
    "space before": "\n\n  {}",
    "semicolon": "{};",
    "full stop": "{}.",
    "label": "SQL: {}",
    "label on its own line": "SQL:\n{}",
    "sentence before": "Here is the query:\n\n{}",
    "sentence before, same line": "The answer is {}",
    "sentence behind a blank line": "{}\n\nThis query selects the titles.",
    "sentence behind a CRLF blank line": "{}\r\n\r\nThis query selects the titles.",
    "sentence on the next line": "{}\nThis query selects the titles.",
    "sentence with a capital keyword on the next line": "{}\nIn short, it sorts by title.",
    "explanation on the next line": "{}\nExplanation: we SELECT the title from book.",
    "heading on the next line": "{}\n### Explanation",
    "list on the next line": "{}\n- it filters the years\n- it sorts",
    "numbers on the next line": "{}\n1. It filters.",
    "a further question behind": "{}\nQuestion: How many books are there?",
    "fence": "```sql\n{}\n```",
    "fence without language": "```\n{}\n```",
    "fence on one line": "```{}```",
    "fence with language on one line": "```sql {}```",
    "fence with text around": "Sure!\n\n```sql\n{}\n```\n\nIt selects the titles.",
    "fence cut": "```sql\n{}",
    "fence cut, text behind": "```sql\n{}\n\nThis selects the titles.",
    "fence, four marks": "````sql\n{}\n````",
    "fence with CRLF": "```sql\r\n{}\r\n```\r\n",
    "tilde fence": "~~~sql\n{}\n~~~",
    "tilde fence cut": "~~~\n{}",
    "fence with a comment first": "```sql\n-- select the titles\n{}\n```",
    "fence behind one of another language": "```python\nprint(1)\n```\n```sql\n{}\n```",
    "fence behind inline code": "Use `SELECT title FROM book`, or rather:\n```sql\n{}\n```",
    "inline code": "The query is `{}`.",
    "inline code alone": "`{}`",
    "inline code, two marks": "Use ``{}`` here.",
    "inline code behind the bare keyword": "The `SELECT` statement does it: `{}`",
    "inline code before a sentence that selects": "`{}` will SELECT the right rows from book.",
    "code tag": "<code>{}</code>",
    "code tag in a sentence": "Try <code>{}</code> and see.",
    "pre and code tags": "<pre><code>{}</code></pre>",
    "sql tag": "<sql>\n{}\n</sql>",
    "bold": "**{}**",
    "bold in a sentence": "The answer is **{}**, I think.",
    "italic": "*{}*",
    "double quotes": '"{}"',
    "double quotes in a sentence": 'Use "{}" to get them.',
    "single quotes": "'{}'",
    "typographic quotes": "“{}”",
    "parentheses": "({})",
    "quotation mark of a mail": "> {}",
    "comment first": "/* select the titles */ {}",
    "comment first, own line": "/* all that\nwe select */\n{}",
    "line comment first": "-- select the titles\n{}",
    "prose that selects before": "You can select the titles with {}",
    "prose that selects before a colon": "To select titles do this: {}",
    "prose that selects at the start": "Select the title of each book:\n{}",
    "prose that selects in capitals": "We SELECT the titles: {}",
    "prose that selects, and with": "With this you select what you want.\n\n{}",
}
MULTILINE = {
    "blank line inside a closed fence": "```sql\nSELECT title\nFROM book\n\nWHERE year > 2000\nORDER BY title\n```",
    "blank line inside a cut fence": "```sql\nSELECT title\nFROM book\n\nWHERE year > 2000\nORDER BY title",
    "CRLF blank line inside a fence": "```sql\r\nSELECT title\r\n\r\nFROM book WHERE year > 2000 ORDER BY title\r\n```",
    "comma at the line's end": "SELECT title\nFROM book\nWHERE year >\n2000\nORDER BY\ntitle",
    "comment at the line's end": "SELECT -- what is wanted\ntitle FROM book WHERE year > 2000 ORDER BY title",
    "parenthesis over lines": "SELECT title FROM book WHERE year IN (\nSELECT year FROM book\n\nWHERE year > 2000\n)"
    "\nORDER BY title",
    "common table expression": "WITH new AS (\n  SELECT * FROM book WHERE year > 2000\n)\n"
    "SELECT title FROM new\nORDER BY title",
    "quotes inside quotes": "\"SELECT \"title\" FROM book WHERE year > 2000 ORDER BY title\"",
    "stars inside stars": "*SELECT book.title, book.* FROM book WHERE year > 2000*",
    "entities inside a tag": "<code>SELECT title FROM book WHERE year &gt; 2000 ORDER BY title</code>",
    "lower case": "it is: select title from book where year > 2000 order by title",
}  # fmt: skip


@pytest.mark.parametrize("sql", [SQL, LINES], ids=["one line", "lines"])
@pytest.mark.parametrize("form", FORMS)
def test_the_sql_of_every_form_is_found(form, sql):
    found = extract_sql(FORMS[form].replace("{}", sql))
    assert found is not None
    assert " ".join(found.sql.split()) == SQL


@pytest.fixture(scope="module")
def library(sample_spider):
    return sample_spider / "database" / "library" / "library.sqlite"


@pytest.mark.parametrize("form", [*FORMS, *MULTILINE])
def test_the_official_verdict_on_every_form_is_correct(form, runner, library):
    gold = SQL if "stars" not in form else "SELECT title, * FROM book WHERE year > 2000"
    answer = MULTILINE.get(form) or FORMS[form].replace("{}", SQL)
    assert SpiderScorer(runner).score(answer, gold, library).outcome == "correct"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("SELECT title FROM book\nWHERE year >> = 2000", "error"),
        ("SELECT title FROM book\nWHERE WHERE year > 2000", "error"),
        ("```sql\nSELECT title FROM book\nyear > 2000\n```", "error"),
        ("SELECT title FROM book\nORDER BY", "error"),
        ("`DROP TABLE book`", "error"),
    ],
)
def test_a_broken_query_is_not_mended_by_leaving_its_end_out(answer, outcome, runner, library):
    assert SpiderScorer(runner).score(answer, "SELECT title FROM book", library).outcome == outcome


def test_the_first_statement_counts_whatever_is_said_behind_it():
    assert extract_sql("SELECT a FROM t;\nExplanation: we SELECT b FROM u").sql == "SELECT a FROM t"
    assert extract_sql("SELECT a FROM t\n\nThe part `SELECT a FROM t` picks.").sql == "SELECT a FROM t"
    assert extract_sql("Answer: SELECT a FROM t WHERE b IN (SELECT c FROM u)").sql.startswith("SELECT a")
