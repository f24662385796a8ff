"""SQuAD (reading comprehension): what is asked about a paragraph, and the worked example of a prompt without shots.

Layout and licence: Rajpurkar et al., 2016 and 2018. Prompt form: worked examples, then context and question, as
in the paper's experiment section.
"""

from __future__ import annotations

from dsbd_cli.bench.datasets.prompts import Example

INSTRUCTION = "Answer the question with a short phrase copied from the context."


def ask(context: str, question: str) -> str:
    """One question, up to the place where its answer goes."""
    return f"Context: {context.strip()}\nQuestion: {question.strip()}\nAnswer:"


# Written for this project: it helps no article of the data set more than another.
EXAMPLE = Example(
    ask(
        "The Harrow Mill stands on the river Lune. It was built in 1823 by Ann Pickering, who made paper "
        "there until a flood broke the wheel in 1861.",
        "Who built the Harrow Mill?",
    ),
    "Ann Pickering",
)
