"""Numbers of things in words: `1 prompt`, `2 prompts`."""

from __future__ import annotations


def counted(count: int, thing: str, *, form: str = "") -> str:
    """`count` and the thing, in the plural but for one.

    Args:
        form: how the number is written, e.g. `,` for thousands apart.
    """
    return f"{count:{form}} {thing if count == 1 else thing + 's'}"


def all_are(count: int, thing: str) -> str:
    """`all 2 prompts are`, `the 1 prompt is`."""
    return f"the {counted(count, thing)} is" if count == 1 else f"all {counted(count, thing)} are"


def of_were(some: int, count: int, thing: str) -> str:
    """`1 of 2 prompts were`, `1 of 1 prompt was`."""
    return f"{some} of {counted(count, thing)} {'was' if count == 1 else 'were'}"
