"""Getting the SQL out of an answer."""

from __future__ import annotations

import pytest

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
