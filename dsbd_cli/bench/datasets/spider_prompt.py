"""Spider (text to SQL): schemas, what is asked about one, and the worked example of a prompt without shots.

Layout and licence: Yu et al., EMNLP 2018. Prompt form: worked examples, then the schema table by table, then
the question, as in the paper's experiment section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsbd_cli.bench.datasets.prompts import Example

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


def ask(schema: Schema, question: str) -> str:
    """One question, up to the place where its query goes."""
    return f"Tables:\n{schema.listing()}\nQuestion: {question.strip()}\nSQL:"


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
EXAMPLE = Example(ask(EXAMPLE_SCHEMA, EXAMPLE_QUESTION), EXAMPLE_SQL)
