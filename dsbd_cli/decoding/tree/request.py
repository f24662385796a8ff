"""One prompt being decoded: everything that belongs to it alone."""

from __future__ import annotations

from dataclasses import dataclass

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Sampler
from dsbd_cli.decoding.law.width import DistinctWidth, ThresholdWidth
from dsbd_cli.decoding.tree.sequences import Hypotheses, Trie


@dataclass
class Request:
    """A prompt, its settings, its sequences and its random numbers (docs/design.md section 10).

    Models and engines serve many of these at a time; none of them keeps anything of a request but
    what it has computed for the nodes of its trie.

    Attributes:
        trie: all sequences of this request; `trie.root` is the prompt, `trie.budget` the most tokens.
        hypotheses: active set and finished pool.
        sampler: the random numbers of `p`; the draft has its own, so that `cover` and `beam` draw alike.
        processor: temperature, top-k and top-p, applied once to the joint.
        width: W, the most beams.
        distinct: a layer's draws are distinct (draws without replacement), not iid.
        dynamic_width: the rule for W_L, or None for W in every layer.
        draft_width: W_S, draws (or, for `cover`, distinct continuations) in each layer of a forest.
        gamma: layers to draft in an iteration, at most; 0 without a draft.
        draft_sampler: the random numbers of q, where forests are drawn.
        tested: draws of q that a layer of p is tested with; so many random numbers it has before those that it
            draws with, whatever forest there is. 0: none, its draws are asked for (`cover`).
        kv_one: the memory-constrained mode: only the best beam goes on behind an iteration.
    """

    trie: Trie
    hypotheses: Hypotheses
    sampler: Sampler
    processor: LogitsProcessor
    width: int
    distinct: bool = False
    dynamic_width: ThresholdWidth | DistinctWidth | None = None
    draft_width: int = 0
    gamma: int = 0
    kv_one: bool = False
    draft_sampler: Sampler | None = None
    tested: int = 0
