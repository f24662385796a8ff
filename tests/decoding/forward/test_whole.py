"""A step in one call to C: to the bit what tensor operations, a forward and the top-n of its logits give."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.forward import amx, simd
from dsbd_cli.decoding.forward.records import Step
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.sequences import Node
from tests.decoding.forward import emulated
from tests.decoding.forward.test_amx import SIZES, KVBuffer, made_of_blocks, make

pytestmark = pytest.mark.skipif(simd.library() is None, reason="no C compiler here")
VOCAB = SIZES["vocab_size"]


@pytest.fixture(scope="module", autouse=True)
def tiles() -> Iterator[None]:
    with emulated.tiles():
        yield


def served(forward, dtype: torch.dtype, kind: str, top_n: int, vocab: int = VOCAB) -> HfTreeModel:
    model = HfTreeModel(make(kind, dtype), vocab_size=vocab, test=False, graphs=False)
    model._use(forward(model.model))
    model.logits.size = top_n
    return model


def grown(model: HfTreeModel, steps: int, seed: int) -> list[tuple]:
    """What a random tree's nodes are told, step by step: some known anew, some freed, buffers that grow."""
    rng, told = np.random.default_rng(seed), []
    root = Node(-1, None)
    model.prefill(rng.integers(3, VOCAB, 480).tolist(), root, top_n=model.logits.size)
    leaves = [root]
    for _ in range(steps):
        count = int(rng.integers(1, 25))
        nodes: list[Node] = []
        for token in rng.integers(3, VOCAB, count).tolist():
            above = [*leaves, *nodes]
            nodes.append(Node(token, above[int(rng.integers(len(above)))]))
        asked = [node for node in nodes if rng.random() < 0.7] or nodes[-1:]
        model.forward(asked)
        told += [
            (node.tokens(), *map(np.ndarray.tolist, model.best(node, model.logits.size))) for node in asked
        ]
        leaves = [asked[i] for i in rng.permutation(len(asked))[:3]] if rng.random() < 0.6 else leaves
        model.retain(leaves)
        if rng.random() < 0.3:  # a node that is known is asked anew, as for one whose logits were let go of
            model.logits.forget(leaves)
            model.forward([*sorted(leaves, key=lambda node: node.depth), Node(5, leaves[0])])
            told += [
                (node.tokens(), *map(np.ndarray.tolist, model.best(node, 1)))
                for node in leaves
                if node is not root
            ]
            model.retain(leaves)
    return told


def rows_of(model: HfTreeModel) -> dict[tuple[int, ...], list[float]]:
    """The mask row of each node that holds one, by its tokens."""
    tree = model.tree
    return {tuple(node.tokens()): tree.masks.table[tree.mask_row(node)].tolist() for node in tree._open}


FORWARDS = {"vectors": (simd.SimdForward, torch.float32), "tiles": (amx.AmxForward, torch.bfloat16)}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("way", FORWARDS)
def test_a_step_in_c_is_the_same_to_the_bit(way, kind, threads, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        steps = served(*FORWARDS[way], kind, 7)
        assert steps._forward.takes_plans
        calls = []
        best = steps._forward.best
        monkeypatch.setattr(steps._forward, "best", lambda *args: calls.append(0) or best(*args))
        tensors = served(*FORWARDS[way], kind, 7)
        tensors._forward.takes_plans = False
        assert grown(steps, 20, 1) == grown(tensors, 20, 1)
        assert len(calls) >= 20
        assert rows_of(steps) == rows_of(tensors)
        assert steps.tree.cache.capacity > 512
        for layer, keys in steps.tree.cache.keys.items():
            assert torch.equal(keys, tensors.tree.cache.keys[layer])
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("way", ["vectors", "vectors, bytes", "tiles", "tiles, blocks"])
def test_rows_that_nobody_asks_for_end_behind_the_last_attention(way, threads):
    """Those that are asked for, few or many, are the same to the bit, and so is whatever looks at the others later."""
    model = made_of_blocks() if way.endswith(("bytes", "blocks")) else make("llama")
    if way.startswith("vectors"):
        forward = simd.SimdForward(model.float(), int8_activations=way.endswith("bytes"))
    else:
        forward = amx.AmxForward(model)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (5, 19, 70):
            ids, places = torch.arange(count + 1) + 5, torch.arange(count)
            found = []
            for keep in (0, 1, [count - 1, 0], [*range(0, count, 2)], [*range(2, count)], []):
                cache = KVBuffer(80)
                cache.slots, cache.used = places + 1, count + 1
                rows = torch.tensor(keep, dtype=torch.int64) if isinstance(keep, list) else keep
                got = forward(cache, ids[:count], places, None, rows)
                cache.slots, cache.used = torch.tensor([count + 1]), count + 2
                found.append((keep, got, forward(cache, ids[count:], torch.tensor([count]), None, 0)))
            (_, whole, after), *others = found
            for keep, got, behind in others:
                assert torch.equal(got, whole[-1:] if keep == 1 else whole[keep])
                assert torch.equal(behind, after)
    finally:
        torch.set_num_threads(before)


def test_what_c_cannot_look_up_is_left_to_tensors():
    model = served(*FORWARDS["vectors"], "llama", 3).model
    assert not simd.SimdForward(model.to(torch.bfloat16)).takes_plans  # the table is in another format
    model.float()
    model.model.rotary_emb.rope_type = "dynamic"
    assert not simd.SimdForward(model).takes_plans


def test_a_vocabulary_that_is_smaller_than_the_head_and_than_the_count():
    model = served(*FORWARDS["vectors"], "llama", 40, vocab=19)
    root = Node(-1, None)
    model.prefill([3, 4, 5], root, top_n=40)
    node = Node(7, root)
    model.forward([node])
    tokens, logps = model.best(node, 40)
    assert sorted(tokens.tolist()) == list(range(19))
    assert np.exp(logps.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


def test_a_token_without_an_embedding_is_an_error_and_no_other_memory():
    model = served(*FORWARDS["vectors"], "llama", 3)
    root = Node(-1, None)
    model.prefill([3, 4, 5], root, top_n=3)
    with pytest.raises(IndexError, match=f"token {VOCAB} of {VOCAB}"):
        model.forward([Node(VOCAB, root)])
    model.forward([Node(VOCAB - 1, root)])
    with pytest.raises(IndexError, match=f"token -5 of {VOCAB}"):
        model.forward([Node(VOCAB - 2, root), Node(-5, root)])


@pytest.mark.parametrize("way", FORWARDS)
def test_a_model_that_is_cast_or_moved_takes_no_memory_away_that_c_reads(way):
    model = served(*FORWARDS[way], "llama", 3)
    forward = model._forward
    own = [one.data_ptr() for one in forward._kept if isinstance(one, torch.Tensor)]
    model.model.to(torch.float64)
    assert forward._step.embedding in own
    assert [one.data_ptr() for one in forward._kept if isinstance(one, torch.Tensor)] == own


def told(model: HfTreeModel, root: Node) -> list[float]:
    model.prefill([3, 4, 5], root, top_n=3)
    nodes = [Node(6, root), Node(7, root)]
    model.forward(nodes)
    return [logp for node in nodes for logp in model.best(node, 3)[1].tolist()]


class Interrupted(ctypes.Structure):
    """A step in which writing down one of the addresses is interrupted, once."""

    _fields_ = Step._fields_
    at: str | None = None

    def __setattr__(self, name, value):
        if name == Interrupted.at:
            Interrupted.at = None
            raise KeyboardInterrupt
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    "at", ["best", "best_ids", "best_logps", "finite", "cos", "table", "width", "positions"]
)
def test_an_interruption_leaves_no_addresses_of_what_is_gone(at):
    model, other = (served(*FORWARDS["vectors"], "llama", 3) for _ in range(2))
    wanted = told(model, Node(-1, None))
    forward = model._forward
    step = Interrupted.from_buffer_copy(forward._step)
    forward._step, forward._request = step, step.request
    assert told(model, Node(-1, None)) == wanted
    own = model.tree
    other._use(forward)  # another tree, with buffers of its own
    Interrupted.at = at
    root = Node(-1, None)
    other.prefill([9, 8], root, top_n=5)
    with pytest.raises(KeyboardInterrupt):
        other.forward([Node(7, root) for _ in range(9)])
    nodes = [Node(7, root) for _ in range(9)]
    other.forward(nodes)
    assert len({tuple(other.best(node, 5)[1].tolist()) for node in nodes}) == 1
    assert model.tree is own
    assert told(model, Node(-1, None)) == wanted


def test_a_tree_made_in_inference_mode_goes_on_outside_of_it():
    with torch.inference_mode():
        model = served(*FORWARDS["vectors"], "llama", 3)
    root = Node(-1, None)
    model.prefill([3, 4, 5], root, top_n=3)
    above = Node(6, root)
    below = Node(7, above)
    model.forward([above, below])
    model.retain([below])
    model.forward([Node(8, above)])  # its row is drawn anew


@pytest.mark.parametrize("takes_plans", [True, False])
def test_known_nodes_that_are_asked_anew_say_the_same_whatever_stands_between_them(takes_plans):
    model = served(*FORWARDS["vectors"], "llama", 3)
    model._forward.takes_plans = takes_plans
    root = Node(-1, None)
    model.prefill([3, 4, 5], root, top_n=3)
    path = [Node(6, root)]
    for token in (7, 8, 9):
        path.append(Node(token, path[-1]))
    model.forward(path)
    wanted = [model.best(node, 3)[1].tolist() for node in path]
    for places in ((0, 2), (3, 1), (3, 0), (1, 0)):
        anew = [path[place] for place in places]
        model.logits.forget(anew)
        model.forward([Node(5, path[1]), *anew])
        assert np.allclose([model.best(node, 3)[1] for node in path], wanted, atol=1e-5)


@pytest.mark.parametrize("torn", ["slots", "positions", "mask_rows", "base"])
def test_a_plan_that_lies_outside_the_buffers_is_an_error_and_no_other_memory(torn):
    model = served(*FORWARDS["vectors"], "llama", 3)
    root = Node(-1, None)
    model.prefill([3, 4, 5], root, top_n=3)
    plan = model.tree.plan([Node(6, root)])
    wrong = dataclasses.replace(plan, **{torn: [4096]})
    with pytest.raises(IndexError, match="outside the buffers"):
        model._forward.best(model.tree.stores, wrong, [0], VOCAB, 3)
    with pytest.raises(IndexError, match="outside the buffers"):
        model._forward.best(model.tree.stores, dataclasses.replace(plan, used=4096), [0], VOCAB, 3)
    assert model._forward.best(model.tree.stores, plan, [0], VOCAB, 3).finite.all()


@torch.inference_mode()
@pytest.mark.parametrize("keep", [[0, 1, 1], [2], [-1, 0]])
@pytest.mark.parametrize("way", FORWARDS)
def test_logits_of_nodes_that_are_none_are_an_error_and_no_other_memory(way, keep):
    """More than there are nodes too: what C lays their rows out in has room for each node once."""
    model = served(*FORWARDS[way], "llama", 3)
    root = Node(-1, None)
    model.prefill([3, 4, 5], root, top_n=3)
    plan = model.tree.plan([Node(6, root), Node(7, root)])
    with pytest.raises(IndexError, match="outside the forward, which has 2"):
        model._forward.best(model.tree.stores, plan, keep, VOCAB, 3)
    assert model._forward.best(model.tree.stores, plan, [1, 1], VOCAB, 3).finite.all()
    ids, places, cache = torch.tensor([5, 6]), torch.arange(2), KVBuffer(8)
    cache.slots, cache.used = places + 1, 3
    for wrong in (torch.tensor(keep), len(keep) + 2):
        with pytest.raises(IndexError, match="outside the forward, which has 2"):
            model._forward(cache, ids, places, None, wrong)
    assert len(model._forward(cache, ids, places, None, torch.tensor([1, 1]))) == 2
