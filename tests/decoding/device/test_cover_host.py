"""Nodes are made of what comes back."""

from __future__ import annotations

import numpy as np

from dsbd_cli.decoding.device.cover_host import layer_of, living
from dsbd_cli.decoding.device.iteration import DraftedLayer
from dsbd_cli.decoding.tree.sequences import Node, Trie


def test_draws_below_which_nothing_grows():
    root = Node(-1, None)
    first, second, third = (Node(token, root) for token in (1, 2, 3))
    second.finish = "eos"
    assert living([first, second, first, third]) == [first, None, None, third]


def test_a_layer_below_some_of_the_places():
    """Entries point at places of the device; the layer at the parents there are."""
    trie = Trie(lambda node: None, (), 9)
    parents = [trie.child(trie.root, token) for token in (5, 6)]
    drafted = DraftedLayer(
        parent=np.array([0, 2, 2, 3]), token=np.array([9, 7, 8, 1]), logp=np.array([-1.0, -2.0, -3.0, -9.0]),
        prob=np.array([0.5, 0.3, 0.2, 0.0]), draws=np.array([2, 0]), finite=np.ones(4, dtype=bool),
    )  # fmt: skip
    layer, nodes = layer_of(trie, [0, 2], parents, drafted)
    assert layer.support.parent.tolist() == [0, 1, 1]
    assert layer.support.token.tolist() == [9, 7, 8]
    assert [node.tokens() for node in layer.draws] == [[6, 8], [5, 9]]
    assert nodes == layer.draws
