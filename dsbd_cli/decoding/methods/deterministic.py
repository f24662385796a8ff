"""Lossless speculative beam search: token for token Hugging Face's `generate(num_beams=W, do_sample=False)`.

Here pool, scores and stopping are Hugging Face's own (transformers `GenerationMixin._beam_search`),
float32 sums included; a drafted layer is accepted when it holds the W running beams that go on.
Without a forest this is plain beam search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dsbd_cli.decoding.law.beam_search import best_candidates, candidates_kept
from dsbd_cli.decoding.law.distribution import Row
from dsbd_cli.decoding.law.verification import Verified
from dsbd_cli.decoding.methods.dsbd import Run
from dsbd_cli.decoding.model.protocol import Need
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
        self._keep = candidates_kept(run.width, len(run.trie.eos_ids))

    @property
    def running(self) -> list[Node]:
        return [node for node, _ in self._running]

    @property
    def finished(self) -> list[Node]:
        """Best first."""
        return [node for node, _ in self._finished]

    def candidates(self) -> list[Node]:
        """The next layer's, best first."""
        running = self.running
        rows = [Row(*self._run.target.best(node, self._keep)) for node in running]
        best = best_candidates([float(score) for _, score in self._running], rows, self._keep)
        nodes = []
        for parent, token, score in zip(*(part.tolist() for part in best), strict=True):
            nodes.append(self._run.trie.child(running[parent], token))
            nodes[-1].score = score
        return nodes

    def take(self, candidates: Sequence[Node]) -> None:
        """One layer: its kept candidates, best first, `score` their sums. Sets `done`."""
        run = self._run
        kept = [(node, np.float32(node.score)) for node in candidates]
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


def beam_search(run: Run, early_stopping: str, length_penalty: float) -> Iterator[Layer | Iteration | Need]:
    """Decode to the end; afterwards `run.hypotheses` ranks Hugging Face's own finished beams."""
    state, engine = BeamSearch(run, early_stopping, length_penalty), run.engine

    def take(candidates: list[Node], held: list[bool] | None) -> bool:
        """Commit a layer (`protocol.Commit`)."""
        state.take(candidates)
        verified = None
        if held is not None:
            inside = dict(zip(candidates, held, strict=True))
            verdicts = tuple(inside[node] for node in state.running)
            verified = Verified((), verdicts, all(verdicts))
        # Where no beam goes on, the layer is what all of them ended with.
        run.commit(state.running or candidates[: run.width], verified, len(run.layers_taken()))
        run.hypotheses.pool = state.finished
        return not state.done

    while not state.done:
        if engine is not None and engine.begin(run, take):
            yield from run.engine_iteration(engine)
            continue
        # The first layer's law is known from prefill: nothing to draft for.
        forest = Forest() if run.logits_known() else (yield from run.propose())
        yield from run.advance(forest)
        for depth in range(len(forest.layers) + 1):
            nodes = state.candidates()
            held = [run.target.has_logits(node) for node in nodes] if depth < len(forest.layers) else None
            goes_on = take(nodes, held)
            yield run.layers_taken()[-1]
            if not goes_on or not run.logits_known():
                break
        yield from run.finish_iteration(forest)
    run.hypotheses.active = [] if state.finished else run.hypotheses.active
