"""The target's own log-probability of answers, by teacher-forced forwards, outside any timing window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dsbd_cli.loading import Pair

# Logits of one forward, in numbers: half a gigabyte in float32 on a card, 64 MB elsewhere.
_MOST_ON_GPU, _MOST_ON_CPU = 1 << 27, 1 << 24
# Lengths are rounded up to this: on a card each new shape is planned anew.
_ROUND = 64


def answer_logprob(pair: Pair, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float | None:
    """l(x): sum of the target's raw log-softmax over the answer's tokens, by one forward.

    Float32 log-softmax over the tokenizer's vocabulary, summed in float64; None for an empty answer. The
    same count for every method.
    """
    return _forced(pair, [[*prompt_ids, *token_ids]], [len(token_ids)])[0] if token_ids else None


def answer_logprobs(
    pair: Pair, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[float | None]:
    """l(x) of each answer as `answer_logprob` gives it, several a forward.

    Rows are padded on the right, where nothing that a causal model computes can see it.
    """
    found: list[float | None] = [None] * len(answers)
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    for places in _groups(pair, whole, [len(answer) for answer in answers]):
        rows = _forced(pair, [whole[place] for place in places], [len(answers[place]) for place in places])
        for place, value in zip(places, rows, strict=True):
            found[place] = value
    return found


def _groups(pair: Pair, whole: Sequence[Sequence[int]], counts: Sequence[int]) -> Iterator[list[int]]:
    """Places of rows of about the same length, as many as one forward may have."""
    most = _MOST_ON_GPU if pair.target.device.type == "cuda" else _MOST_ON_CPU
    group: list[int] = []
    # From the longest on: the first of a group says how long its rows are.
    for place in sorted(
        (p for p, count in enumerate(counts) if count), key=lambda p: len(whole[p]), reverse=True
    ):
        longest = _rounded(len(whole[group[0]] if group else whole[place]))
        first = min(len(whole[p]) - counts[p] for p in [*group, place])
        if group and (len(group) + 1) * (longest - first + 1) * pair.vocab_size > most:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _rounded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


@torch.inference_mode()
def _forced(pair: Pair, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[float]:
    """Log-probability of the last `counts` tokens of each row."""
    model, device = pair.target.model, pair.target.device
    length = max(map(len, rows))
    if len(rows) > 1:  # no position beyond those that the model has
        length = max(length, min(_rounded(length), pair.target.max_positions or _rounded(length)))
    ids = torch.zeros((len(rows), length), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(list(row))
    # The logits that tell of an answer's first token are those of the token before it.
    first = min(len(row) - count for row, count in zip(rows, counts, strict=True)) - 1
    ids = ids.to(device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=length - first).logits
    logps = torch.log_softmax(logits[:, :-1, : pair.vocab_size].float(), dim=-1)
    wanted = ids[:, first + 1 :].to(logps.device)
    # Padding may be a token that the vocabulary has not; it is not counted.
    taken = logps.gather(2, wanted[:, :, None])[:, :, 0].double().cpu()
    return [
        float(taken[place, len(row) - count - first - 1 : len(row) - first - 1].sum())
        for place, (row, count) in enumerate(zip(rows, counts, strict=True))
    ]
