"""Spider (text to SQL): official layout `dev.json`, `tables.json`, `database/DB/DB.sqlite`, one-shot prompts.

Layout and licence: Yu et al., EMNLP 2018. Prompt form: one worked example, then the schema table by
table, then the question, as in the paper's experiment section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INSTRUCTION = "Write one SQLite query that answers the question. Reply with the SQL only."


@dataclass(frozen=True)
class Schema:
    """One database: table name -> column names, and foreign keys as (`table.column`, `table.column`)."""

    db_id: str
    tables: tuple[tuple[str, tuple[str, ...]], ...]
    foreign_keys: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_official(cls, entry: Mapping[str, Any]) -> Schema:
        """One entry of `tables.json`; SQLite's own tables (`sqlite_...`) are left out.

        Raises:
            KeyError, IndexError, TypeError: the entry does not follow the layout.
        """
        names = entry["table_names_original"]
        columns: list[list[str]] = [[] for _ in names]
        for table, column in entry["column_names_original"]:
            if table >= 0:
                columns[table].append(column)
        own = {i for i, name in enumerate(names) if name.lower().startswith("sqlite_")}

        def full(index: int) -> str:
            table, column = entry["column_names_original"][index]
            return f"{names[table]}.{column}"

        return cls(
            db_id=entry["db_id"],
            tables=tuple((name, tuple(columns[i])) for i, name in enumerate(names) if i not in own),
            foreign_keys=tuple((full(a), full(b)) for a, b in entry["foreign_keys"]),
        )

    def listing(self) -> str:
        """The schema as text, a table a line, then the foreign keys."""
        lines = [f"{name}({', '.join(columns)})" for name, columns in self.tables]
        if self.foreign_keys:
            lines.append("Foreign keys: " + ", ".join(f"{a} = {b}" for a, b in self.foreign_keys))
        return "\n".join(lines)


# The worked example is a database of its own, so it helps no question of any split more than another.
EXAMPLE_SCHEMA = Schema(
    db_id="bakery",
    tables=(
        ("baker", ("baker_id", "name", "town")),
        ("cake", ("cake_id", "baker_id", "flavour", "price")),
    ),
    foreign_keys=(("cake.baker_id", "baker.baker_id"),),
)
EXAMPLE_QUESTION = "List the names of bakers from York with the number of cakes each one makes."
EXAMPLE_SQL = (
    "SELECT T1.name, count(*) FROM baker AS T1 JOIN cake AS T2 ON T1.baker_id = T2.baker_id "
    "WHERE T1.town = 'York' GROUP BY T1.baker_id"
)


def _shot(schema: Schema, question: str) -> str:
    return f"Tables:\n{schema.listing()}\nQuestion: {question}\nSQL:"


def build_messages(schema: Schema, question: str) -> list[dict[str, str]]:
    """The one-shot prompt as chat turns (for models with a chat template): example asked, answered, question.

    Small chat models stop after the query in this form; given the same text in one user turn they go on
    writing further examples.
    """
    return [
        {"role": "user", "content": f"{INSTRUCTION}\n\n{_shot(EXAMPLE_SCHEMA, EXAMPLE_QUESTION)}"},
        {"role": "assistant", "content": EXAMPLE_SQL},
        {"role": "user", "content": _shot(schema, question.strip())},
    ]


def build_prompt(schema: Schema, question: str) -> str:
    """The same one-shot prompt as plain text (for base models): ends in `SQL:`."""
    example = f"{_shot(EXAMPLE_SCHEMA, EXAMPLE_QUESTION)} {EXAMPLE_SQL}"
    return f"{INSTRUCTION}\n\n{example}\n\n{_shot(schema, question.strip())}"


def schemas_by_id(entries: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    """All schemas of a parsed `tables.json`, by `db_id`."""
    return {entry["db_id"]: Schema.from_official(entry) for entry in entries}
