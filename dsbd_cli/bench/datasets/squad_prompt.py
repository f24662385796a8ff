"""SQuAD (reading comprehension): official v1.1 / v2.0 JSON or JSONL, one-shot prompts.

Layout and licence: Rajpurkar et al., 2016 and 2018. Prompt form: one worked example, then context and
question, as in the paper's experiment section.
"""

from __future__ import annotations

INSTRUCTION = "Answer the question with a short phrase copied from the context."
# Written for this project: it helps no article of the data set more than another.
EXAMPLE_CONTEXT = (
    "The Harrow Mill stands on the river Lune. It was built in 1823 by Ann Pickering, who made paper "
    "there until a flood broke the wheel in 1861."
)
EXAMPLE_QUESTION = "Who built the Harrow Mill?"
EXAMPLE_ANSWER = "Ann Pickering"


def _shot(context: str, question: str) -> str:
    return f"Context: {context}\nQuestion: {question}\nAnswer:"


def build_messages(context: str, question: str) -> list[dict[str, str]]:
    """The one-shot prompt as chat turns (for models with a chat template): example asked, answered, question."""
    return [
        {"role": "user", "content": f"{INSTRUCTION}\n\n{_shot(EXAMPLE_CONTEXT, EXAMPLE_QUESTION)}"},
        {"role": "assistant", "content": EXAMPLE_ANSWER},
        {"role": "user", "content": _shot(context.strip(), question.strip())},
    ]


def build_prompt(context: str, question: str) -> str:
    """The same one-shot prompt as plain text (for base models): ends in `Answer:`."""
    example = f"{_shot(EXAMPLE_CONTEXT, EXAMPLE_QUESTION)} {EXAMPLE_ANSWER}"
    return f"{INSTRUCTION}\n\n{example}\n\n{_shot(context.strip(), question.strip())}"
