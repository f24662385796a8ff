"""Lossless speculative beam search: token for token Hugging Face's `generate(num_beams=W, do_sample=False)`.

Here pool, scores and stopping are Hugging Face's own (transformers `GenerationMixin._beam_search`),
float32 sums included; a drafted layer is accepted when it holds the W running beams that go on.
Without a forest this is plain beam search.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dsbd_cli.decoding.law.verification import Verified
from dsbd_cli.decoding.methods.dsbd import Run
from dsbd_cli.decoding.model.protocol import Compute
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.sequences import Forest, Node

_NONE = np.float32(-1e9)


class BeamSearch:
    """Hugging Face's beam state: running beams and finished ones with their float32 scores.

    Args:
        run: the run whose hypotheses this state drives.
        early_stopping: `first`, `heuristic`, `never` for Hugging Face's True, False, "never".
        length_penalty: exponent of the length.
    """

    def __init__(self, run: Run, early_stopping: str, length_penalty: float) -> None:
        self._run, self._rule, self._alpha = run, early_stopping, length_penalty
        self._running: list[tuple[Node, np.float32]] = [(run.trie.root, np.float32(0))]
        self._finished: list[tuple[Node, np.float32]] = []
        self.done = run.trie.budget == 0
        # Enough candidates that W unfinished ones are left even if every beam ends in each EOS.
        self._keep = max(2, 1 + len(run.trie.eos_ids)) * run.width

    @property
    def running(self) -> list[Node]:
        return [node for node, _ in self._running]

    def ranking(self) -> list[Node]:
        """Finished sequences, best first; before any has finished, the running ones."""
        return [node for node, _ in self._finished] or self.running

    def step(self) -> list[Node]:
        """One layer: the kept candidates, best first. Sets `done`."""
        run = self._run
        candidates = []
        for order, (node, score) in enumerate(self._running):
            tokens, logps = run.target.best(node, self._keep)
            totals = logps.astype(np.float32) + score
            candidates += [
                (-float(total), order, int(token), node) for token, total in zip(tokens, totals, strict=True)
            ]
        candidates.sort(key=lambda entry: entry[:3])
        kept: list[tuple[Node, np.float32]] = []
        for negative, _, token, parent in candidates[: self._keep]:
            child = run.trie.child(parent, token)
            child.score = -negative
            kept.append((child, np.float32(-negative)))
        length = kept[0][0].depth
        # Only the W best candidates may finish; the others are spares for the running beams.
        self._finished += [
            (node, score / np.float32(length**self._alpha))
            for node, score in kept[: run.width]
            if node.finish is not None
        ]
        self._finished.sort(key=lambda entry: -float(entry[1]))
        self._finished = self._finished[: run.width]
        self._running = [(node, score) for node, score in kept if node.finish is None][: run.width]
        self.done = self._over(length)
        return [node for node, _ in kept]

    def _over(self, length: int) -> bool:
        if not self._running:
            return True
        full = len(self._finished) == self._run.width
        # One beam is Hugging Face's greedy search, which ends at the first EOS whatever the rule.
        if full and (self._rule == "first" or self._run.width == 1):
            return True
        hopeful = self._run.trie.budget if self._rule == "never" and self._alpha > 0 else length
        best = self._running[0][1] / np.float32(hopeful**self._alpha)
        worst = self._finished[-1][1] if full else _NONE
        return not best > worst


def beam_search(
    run: Run, early_stopping: str, length_penalty: float
) -> Iterator[Layer | Iteration | Compute]:
    """Decode to the end; afterwards `run.hypotheses` ranks Hugging Face's own finished beams."""
    state = BeamSearch(run, early_stopping, length_penalty)
    while not state.done:
        # The first layer's law is known from prefill: nothing to draft for.
        forest = Forest() if run.logits_known() else (yield from run.propose())
        yield from run.advance(forest)
        for depth in range(len(forest.layers) + 1):
            state.step()
            running = state.running
            verified = None
            if depth < len(forest.layers):
                verdicts = tuple(run.target.has_logits(node) for node in running)
                verified = Verified((), verdicts, all(verdicts))
            yield run.commit(running, verified, depth)
            run.hypotheses.pool = [node for node, _ in state._finished]
            if state.done or not run.logits_known():
                break
        yield from run.finish_iteration(forest)
    run.hypotheses.active = [] if state._finished else run.hypotheses.active
