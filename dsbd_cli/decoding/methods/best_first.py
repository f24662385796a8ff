"""Forests of the most probable nodes, wherever they stand, instead of layers of one width.

As the trees of EAGLE-2 (Li et al. 2024) and Sequoia (Chen et al. 2024) do, a forest follows the draft's
confidence: where it is sure the forest is deep, where it is not it is broad. Only for forests that need no q:
what is left out is chosen after deeper layers were seen (docs/design.md section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dsbd_cli.decoding.tree.sequences import DraftLayer, Node


def most_probable_nodes(
    layers: Sequence[DraftLayer], scores: Mapping[Node, float], count: int, free: Callable[[Node], bool]
) -> list[DraftLayer]:
    """The layers with the `count` nodes of the highest joint probability, and what costs nothing.

    A node is at most as probable as its parent, so none loses its parent.

    Args:
        layers: distinct draws.
        scores: log of the joint probability, of every unfinished draw.
        free: whether the target has computed a node already; finished ones are never computed.
    """
    paid = [node for layer in layers for node in layer.draws if node in scores and not free(node)]
    paid.sort(key=scores.__getitem__, reverse=True)  # stable: of equals the parent stays first
    out = set(paid[count:])
    kept = []
    for layer in layers:
        draws = [node for node in layer.draws if node not in out and node.parent not in out]
        # What stands below a node that is out is less probable; finished nodes have no score to go by.
        out.update(node for node in layer.draws if node.parent in out)
        if not draws:
            break
        kept.append(DraftLayer(layer.parents, layer.support, draws))
    return kept
