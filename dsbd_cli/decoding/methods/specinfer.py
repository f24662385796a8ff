"""SpecInfer: one sequence, a token tree, multi-step speculative sampling at every node.

Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative
Inference and Verification" (ASPLOS 2024). q and p at a node are T of that node's OWN conditional;
the `paper` rule with one draw to keep decides among its k_d iid draws, duplicates kept as draws.
Two other rules of the field can take its place at every node (docs/design.md section 3).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Sampler, draw_layer
from dsbd_cli.decoding.law.verification import Verified, accept_distinct_draws, accept_sequentially
from dsbd_cli.decoding.methods.dsbd import Accept, Run, verify_layer
from dsbd_cli.decoding.model.protocol import Compute, Need, TreeModel
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie, draft_room


def _accept_distinct(p: np.ndarray, q: np.ndarray, drafted: list[int], sampler: Sampler) -> Verified:
    return accept_distinct_draws(p, q, drafted, 1, sampler)


# Of `TREE_RULES`, those beside SpecInfer's own.
_RULES: Mapping[str, Accept] = {"spectr": accept_sequentially, "rsd": _accept_distinct}


class TreeProposer:
    """Drafts a token tree: every distinct unfinished node of depth d gets k_d draws of its q, iid or distinct ones.

    The forest has one `DraftLayer` per node with children, level by level.
    """

    def __init__(
        self,
        draft: TreeModel,
        trie: Trie,
        processor: LogitsProcessor,
        expansion: Sequence[int],
        sampler: Sampler,
        distinct: bool = False,
    ) -> None:
        self._draft, self._trie, self._processor = draft, trie, processor
        self._expansion, self._sampler, self._distinct = expansion, sampler, distinct
        self.exhausted = False

    def begin(self, beams: list[Node], depth: int) -> None:
        """Nothing: the host draws every level before the next one can be computed."""

    def propose(
        self, beams: list[Node], depth: int, width: int | None = None
    ) -> Generator[Compute, None, Forest]:
        layers: list[DraftLayer] = []
        level = [node for node in beams if self._draft.reads(node)]
        room = draft_room(self._draft.max_depth, beams)
        self.exhausted = room <= 0
        for count in self._expansion[: max(0, min(depth, room))]:
            if not level:
                break
            yield Compute(self._draft, level)
            found: dict[Node, None] = {}
            for node in level:
                support = self._draft.joint([node], [0.0], self._processor)
                sample = draw_layer(self._sampler, support.prob, count, self._distinct)
                draws = [self._trie.child(node, int(support.token[i])) for i in sample]
                layers.append(DraftLayer([node], support, draws))
                found |= dict.fromkeys(draw for draw in draws if draw.finish is None)
            level = list(found)
        return Forest(layers)

    def retain(self, leaves: list[Node]) -> None:
        self._draft.retain(leaves)


def specinfer(run: Run, rule: str) -> Iterator[Layer | Iteration | Need]:
    """Decode one sequence: an accept descends, no accept ends with one residual draw, a leaf with one
    draw of p. `rule` is one of `TREE_RULES`."""
    engine = run.engine

    def take(draws: list[Node], verdicts: list[bool] | None) -> bool:
        """Commit a layer that the engine drew (`protocol.Commit`)."""
        verified = None if verdicts is None else Verified((), tuple(verdicts), any(verdicts))
        run.commit(draws, verified, len(run.layers_taken()))
        return not run.hypotheses.stopped()

    while not run.hypotheses.stopped():
        if engine is not None and engine.begin(run, take):
            yield from run.engine_iteration(engine)
            continue
        forest = yield from run.propose()
        yield from run.advance(forest)
        yield from _descend(run, forest, _RULES.get(rule))
        yield from run.finish_iteration(forest)


def _descend(run: Run, forest: Forest, accept: Accept | None) -> Iterator[Layer]:
    below = {layer.parents[0]: layer for layer in forest.layers}
    depth = 0
    while (drafted := below.get(run.hypotheses.active[0])) is not None:
        layer = verify_layer(run, drafted, depth, accept)
        yield layer
        if run.hypotheses.stopped() or not layer.passed:
            return
        depth += 1
    yield run.sample_layer()
