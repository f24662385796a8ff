"""Prompt lookup: what followed a beam's last tokens where they stood before, added to the draft's forest.

Only for forests that need no q (`cover`, the deterministic mode): nothing here is a draw. Saxena 2023
(prompt-lookup-decoding), for several beams (docs/design.md section 2).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from dsbd_cli.decoding.law.distribution import Support
from dsbd_cli.decoding.methods.proposers import Proposer
from dsbd_cli.decoding.model.protocol import Compute
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie

# Tokens that must agree, the most first: one alone stands before nearly anything.
_GRAMS = (4, 3, 2)
# Continuations of a beam, at most.
CHAINS = 2


def continuations(tokens: np.ndarray, length: int, most: int = CHAINS) -> list[list[int]]:
    """What followed the last tokens where they stood before, the latest place first.

    The longest agreement that occurs at all decides; a continuation that begins another is left out.

    Args:
        tokens: int64 [n], a prompt and the text behind it.
        length: tokens of a continuation, at most.
        most: continuations, at most.
    """
    for size in _GRAMS:
        places = len(tokens) - size  # where such a stretch may begin, itself left out
        if places < 1:
            continue
        same = np.ones(places, dtype=bool)
        for i in range(size):
            same &= tokens[i : places + i] == tokens[places + i]
        found: list[list[int]] = []
        for place in np.flatnonzero(same)[::-1]:
            text = tokens[place + size : place + size + length].tolist()
            if not any(other[: len(text)] == text for other in found):
                found.append(text)
            if len(found) == most:
                break
        if found:
            return found
    return []


class LookupProposer:
    """Another proposer's forests, with the continuations of each beam as chains beside them.

    Args:
        inner: whose forests these are.
        trie: of the request.
        prompt: token ids that `trie.root` stands for.
        length: tokens of a chain, at most; deeper than gamma it costs no draft forward.
    """

    def __init__(self, inner: Proposer, trie: Trie, prompt: Sequence[int], length: int) -> None:
        self._inner, self._trie, self._length = inner, trie, length
        self._prompt = np.array(prompt, dtype=np.int64)
        self.exhausted = False

    def begin(self, beams: list[Node], depth: int) -> None:
        self._inner.begin(beams, depth)

    def propose(
        self, beams: list[Node], depth: int, width: int | None = None
    ) -> Generator[Compute, None, Forest]:
        forest = yield from self._inner.propose(beams, depth, width)
        self.exhausted = self._inner.exhausted
        # The last token of the budget is drawn from logits that are there without it.
        length = min(self._length, self._trie.budget - beams[0].depth - 1)
        chains: list[list[Node]] = [[] for _ in range(length)]  # nodes by layer
        for beam in beams:
            tokens = np.concatenate([self._prompt, np.array(beam.tokens(), dtype=np.int64)])
            for text in continuations(tokens, length):
                node = beam
                for place, token in enumerate(text):
                    node = self._trie.child(node, token)
                    chains[place].append(node)
                    if node.finish is not None:
                        break
        return Forest(_joined(forest.layers, [layer for layer in chains if layer]))

    def retain(self, leaves: list[Node]) -> None:
        self._inner.retain(leaves)


def _joined(layers: Sequence[DraftLayer], chains: Sequence[Sequence[Node]]) -> list[DraftLayer]:
    """Layers with the chains' nodes behind their own draws, and further layers of those alone."""
    found = []
    for place in range(max(len(layers), len(chains))):
        layer = layers[place] if place < len(layers) else DraftLayer([], NOTHING, [])
        nodes = chains[place] if place < len(chains) else ()
        parents = [node.parent for node in nodes if node.parent is not None]
        found.append(
            DraftLayer(
                list(dict.fromkeys([*layer.parents, *parents])),
                layer.support,
                list(dict.fromkeys([*layer.draws, *nodes])),
            )
        )
    return found


NOTHING = Support(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))
