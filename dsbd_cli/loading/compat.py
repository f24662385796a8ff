"""Whether two models speak of the same tokens, and which ids end a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError

# Options of a generation config that change the law and that dsbd does not offer, with their "off".
_IGNORED: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "diversity_penalty": 0.0,
    "guidance_scale": 1.0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "watermarking_config": None,
}


def token_range(tokenizer: Any) -> int:
    """One more than the highest id that the tokenizer knows."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def check_same_tokens(target: Any, draft: Any, names: tuple[str, str]) -> list[str]:
    """Compare two tokenizers' contents over the ids both have.

    Ids that are special on either side may differ: the target's rule and the draft's are ignored, so
    such a pair works (at worst a proposal is rejected); a note says so.

    Returns:
        Notes for the user.

    Raises:
        UserError: some ordinary id means different tokens; names the first such id.
    """
    mine, theirs = _by_id(target), _by_id(draft)
    shared = min(token_range(target), token_range(draft))
    special = _special_ids(target) | _special_ids(draft)
    differing = [place for place in range(shared) if mine.get(place) != theirs.get(place)]
    ordinary = [place for place in differing if place not in special]
    if ordinary:
        first = ordinary[0]
        raise UserError(
            f"target {names[0]} and draft {names[1]} do not share a vocabulary: token {first} is "
            f"{_shown(mine.get(first))} in the target and {_shown(theirs.get(first))} in the draft"
        )
    if differing:
        first = differing[0]
        return [f"{counted(len(differing), 'special token')} {'differs' if len(differing) == 1 else 'differ'}, the "
                f"target's are used: {first} is {_shown(mine.get(first))}, in the draft "
                f"{_shown(theirs.get(first))}"]  # fmt: skip
    return []


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text: generation config, model config and tokenizer together, ascending."""
    found: set[int] = set()
    config = model.config
    for owner in (getattr(model, "generation_config", None), config, config.get_text_config(), tokenizer):
        found.update(_ids(getattr(owner, "eos_token_id", None)))
    return tuple(sorted(found))


def ignored_options(generation_config: Any) -> list[str]:
    """One line for each option in a generation config that would change the law and is not applied."""
    lines = []
    for name, off in _IGNORED.items():
        value = getattr(generation_config, name, None)
        if value is not None and value != off:
            shown = " ".join(str(value).split())
            shown = shown if len(shown) <= 40 else shown[:37] + "..."
            lines.append(
                f"ignored from the target's generation config: {name} {shown} (dsbd keeps the model's law)"
            )
    return lines


def _ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    values = value if isinstance(value, (list, tuple)) else [value]
    return [int(one) for one in values if isinstance(one, int) and one >= 0]


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {place: token for token, place in tokenizer.get_vocab().items()}


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {place for place, token in added.items() if getattr(token, "special", False)}
    return marked | {place for place in tokenizer.all_special_ids if place is not None}


def _shown(token: str | None) -> str:
    return "nothing" if token is None else repr(token if len(token) <= 40 else token[:37] + "...")
