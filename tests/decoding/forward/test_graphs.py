"""Padding, buckets and packing of captured forwards; on a CPU the same steps run uncaptured."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.cache.buffers import SPARE
from dsbd_cli.decoding.cache.logits import dense_joint
from dsbd_cli.decoding.cache.tree_cache import Plan
from dsbd_cli.decoding.forward.capture import Captures, slot_bucket
from dsbd_cli.decoding.forward.graphs import NODE_BUCKETS, node_bucket, pad, seen_inside, why_not
from dsbd_cli.decoding.forward.kernels import DenseLinear
from dsbd_cli.decoding.forward.llama import LlamaForward
from dsbd_cli.decoding.forward.outcomes import TooLarge
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Row, joint
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.sequences import Node
from tests.builders import VOCAB, rand


def test_buckets_hold_what_they_are_for():
    for count in range(1, 65):
        bucket = node_bucket(count)
        assert count <= bucket <= max(2, 2 * count - 1)
    with pytest.raises(TooLarge, match="65 nodes"):
        node_bucket(65)
    sizes = {slot_bucket(used, 8192) for used in range(1, 8193)}
    assert sorted(sizes) == [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
    assert all(used <= slot_bucket(used, 8192) <= max(256, 1.5 * used) for used in range(1, 8193))
    assert slot_bucket(600, 700) == 700


@pytest.mark.parametrize("count", [1, 3, 40, 63, 64])
def test_padding_keeps_the_plan_and_shows_padded_nodes_only_themselves(count):
    rng = np.random.default_rng(count)
    inside = np.tril(rng.random((count, count)) < 0.5) | np.eye(count, dtype=bool)
    numbers = [list(range(base, base + count)) for base in (5, 100, 200, 300, 400)]
    plan = Plan(*numbers, inside, 512)
    size = node_bucket(count)
    packed = torch.from_numpy(pad(plan, size))
    assert packed[:5, :count].tolist() == numbers
    assert set(packed[0, count:].tolist()) <= {numbers[0][-1]}
    assert not packed[1:5, count:].any()
    assert set(packed[6].tolist()) == {512}
    seen = seen_inside(packed[5])
    assert np.array_equal(seen[:count, :count].numpy(), inside)
    assert not seen[:count, count:].any()
    assert seen[count:, count:].all()
    assert not seen[count:, :count].any()


def test_replays_of_any_size_equal_plain_forwards(tmp_path):
    model = rand(tmp_path, initializer_range=0.3, num_key_value_heads=2)
    trees = [HfTreeModel(model, vocab_size=VOCAB, graphs=graphs) for graphs in (True, False)]
    root, rng = Node(-1, None), random.Random(0)
    for tree in trees:
        tree.prefill([5, 6, 7], root, top_n=6)
    for count in [*range(1, 20), 33, 64, 65, 2, 1]:
        level = [Node(rng.randrange(VOCAB), root) for _ in range(count)]
        below = [Node(rng.randrange(VOCAB), node) for node in level[:3]]
        for nodes in (level, below):
            for tree in trees:
                tree.forward(nodes)
            for node in nodes:
                replayed, plain = (tree.best(node, 6) for tree in trees)
                assert np.array_equal(replayed[0], plain[0])
                assert np.abs(replayed[1] - plain[1]).max() < 1e-4
        for tree in trees:
            tree.retain([])
    # One capture a bucket of nodes, however often it is used; 65 nodes have none, and that is no fault.
    graphs = trees[0].graphs
    assert graphs is not None
    assert len(graphs.captures) == len(NODE_BUCKETS)
    assert not trees[0].notes
    assert trees[0].captured
    assert trees[0].calls == trees[1].calls


def test_buffers_that_grow_are_captured_anew(tmp_path, monkeypatch):
    made, capture = [], Captures._capture
    monkeypatch.setattr(Captures, "_capture", lambda self, *given: (made.append(1), capture(self, *given))[1])
    monkeypatch.setattr("dsbd_cli.decoding.model.hf_model._CAPTURED_SIZES", (16, 4))
    model = rand(tmp_path, initializer_range=0.3)
    tree, root = HfTreeModel(model, vocab_size=VOCAB, graphs=True), Node(-1, None)
    tree.prefill([1, 2, 3], root)
    node, known = root, []
    for step in range(40):
        node = Node(step, node)
        tree.forward([node])
        known.append(node)
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 2, 3, *node.tokens()]])).logits[0]
    assert (tree.log_row(node) - torch.log_softmax(logits[-1], -1)).abs().max() < 1e-4
    assert tree.graphs is not None
    assert len(made) > 2


def test_what_cannot_be_captured_runs_as_it_is(tmp_path, monkeypatch):
    def broken(self, request, steps):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Captures, "_capture", broken)
    tree, root = HfTreeModel(rand(tmp_path), vocab_size=VOCAB, graphs=True), Node(-1, None)
    tree.prefill([1, 2, 3], root, top_n=2)
    node = Node(4, root)
    tree.forward([node])
    assert tree.has_logits(node)
    assert tree.notes == [
        "target: no CUDA graphs, capturing failed (operation not permitted when stream is capturing)"
    ]


@pytest.mark.parametrize("top_n", [0, 2])
def test_a_device_short_of_memory_runs_as_it_is_until_the_next_prompt(tmp_path, monkeypatch, top_n):
    capture, short = Captures._capture, [True]

    def scarce(self, request, steps):
        if short:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return capture(self, request, steps)

    monkeypatch.setattr(Captures, "_capture", scarce)
    tree, root = HfTreeModel(rand(tmp_path), vocab_size=VOCAB, graphs=True), Node(-1, None)
    assert tree.graphs is not None
    tree.graphs.prompts = False  # the forwards behind them are meant
    note = "target: no CUDA graphs for now, no memory is left for them (CUDA out of memory. Tried to allocate 2 GiB)"
    for _ in range(2):
        tree.prefill([1, 2, 3], root, top_n=top_n)
        assert tree.captured
        node = Node(4, root)
        tree.forward([node])
        assert tree.has_logits(node)
        assert not tree.captured
    assert tree.notes == [note]
    short.clear()
    tree.prefill([1, 2, 3], root, top_n=top_n)
    tree.forward([Node(4, root)])
    assert tree.captured
    assert tree.graphs is not None
    assert len(tree.graphs.captures) == 1


def test_positions_that_depend_on_the_length_are_not_captured(tmp_path):
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "positions" in why_not(rand(tmp_path, rope_parameters=scaled))
    assert why_not(rand(tmp_path)) is None


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("levels", [3, 10**6])
def test_the_joint_on_the_device_is_the_law(temperature, top_p, levels):
    rng = np.random.default_rng(levels)
    scores = [-0.3, -2.0, -0.3]
    # Equal rows under equal scores: ties by parent and by token.
    logits = torch.tensor(rng.integers(0, levels, (2, 200)) / levels * 6, dtype=torch.float32)
    logps = torch.log_softmax(torch.cat([logits, logits[:1]]), -1)
    processor = LogitsProcessor(temperature, 0, top_p)
    rows = [Row(np.arange(200), row.numpy().astype(np.float64)) for row in logps]
    for ours, law in zip(dense_joint(scores, logps, processor), joint(scores, rows, processor), strict=True):
        assert np.allclose(ours, law, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="best entries"):
        dense_joint(scores, logps, LogitsProcessor(1.0, 5, 1.0))


def as_on_a_device(model):
    """With the forward that a device has, by tensor operations."""
    tree = HfTreeModel(model, vocab_size=VOCAB, graphs=True)
    tree._use(LlamaForward(model, DenseLinear, None))
    tree._ways.served = True
    return tree


@pytest.mark.parametrize("top_n", [0, 6])
@pytest.mark.parametrize("prompts", [True, False])
def test_whole_prompts_are_captured_when_their_bucket_comes_again(tmp_path, monkeypatch, top_n, prompts):
    """Padded behind, run as they are the first time: the model's own logits, before the tree and below it."""
    made, capture = [], Captures._capture
    monkeypatch.setattr(Captures, "_capture", lambda self, *given: (made.append(1), capture(self, *given))[1])
    model = rand(tmp_path, initializer_range=0.3)
    tree = as_on_a_device(model)
    assert tree.graphs is not None
    tree.graphs.prompts = prompts
    rng, sizes = random.Random(1), [5, 32, 33, 20, 1, 40, 64, 31]
    for size in sizes:
        ids, root = [rng.randrange(VOCAB) for _ in range(size)], Node(-1, None)
        tree.prefill(ids, root, top_n=top_n, reuse=False)
        node = Node(7, root)
        tree.forward([node])
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([[*ids, 7]])).logits[0, -2:], -1)
        for one, row in zip((root, node), rows, strict=True):
            tokens, logps = tree.best(one, 6)
            best = row.topk(6)
            assert tokens.tolist() == best.indices.tolist()
            assert np.abs(logps - best.values.numpy()).max() < 1e-4
    # Two buckets, each captured when a second prompt of it came; and one tree forward.
    assert len(made) == 1 + 2 * prompts


def test_a_prompt_that_cannot_be_captured_is_read_as_it_is(tmp_path, monkeypatch):
    capture = Captures._capture

    def broken(self, request, steps):
        if len(request) == 5:  # a prompt's
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(self, request, steps)

    monkeypatch.setattr(Captures, "_capture", broken)
    model = rand(tmp_path, initializer_range=0.3)
    tree = as_on_a_device(model)
    for _ in range(3):
        root = Node(-1, None)
        tree.prefill([1, 2, 3], root, top_n=2, reuse=False)
        tree.forward([Node(4, root)])
        with torch.inference_mode():
            best = model(torch.tensor([[1, 2, 3]])).logits[0, -1].topk(2).indices.tolist()
        assert tree.best(root, 2)[0].tolist() == best
    assert tree.captured
    assert tree.notes == [
        "target: prompts are read without CUDA graphs, capturing failed (operation not permitted when stream is "
        "capturing)"
    ]


def test_a_prompt_for_whose_capture_no_memory_is_left_is_read_as_it_is(tmp_path, monkeypatch):
    def scarce(self, request, steps):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    model = rand(tmp_path, initializer_range=0.3)
    tree = as_on_a_device(model)
    monkeypatch.setattr(Captures, "_capture", scarce)
    told = []
    for _ in range(2):
        root = Node(-1, None)
        tree.prefill([1, 2, 3], root, top_n=2, reuse=False)
        told.append((tree.best(root, 2)[0].tolist(), tree.captured))
    assert told == [(told[0][0], True), (told[0][0], False)]


def test_two_prompts_are_under_way_before_either_is_waited_for(tmp_path):
    model = rand(tmp_path, initializer_range=0.3)
    trees = [as_on_a_device(model) for _ in range(2)]
    root = Node(-1, None)
    trees[0].prefill([1, 2, 3], root, top_n=2, wait=False)
    assert not trees[0].has_logits(root)
    trees[1].prefill([1, 2, 3], root, top_n=2, idle=False)
    trees[0].settle()
    assert trees[0].best(root, 2)[0].tolist() == trees[1].best(root, 2)[0].tolist()


def test_what_lies_behind_a_prompt_does_not_reach_the_spare_slot(tmp_path):
    """Padded tokens look at slots behind the prompt, where a run that broke may have left anything."""
    model = rand(tmp_path, initializer_range=0.3)
    tree = as_on_a_device(model)
    tree.prefill([1, 2, 3], Node(-1, None), top_n=2)
    buffers = [*tree.tree.cache.keys.values(), *tree.tree.cache.values.values()]
    for _ in range(2):
        with torch.inference_mode():
            for buffer in buffers:
                buffer[:, :, 6:] = float("nan")
        root = Node(-1, None)
        tree.prefill([4, 5, 6, 7, 8], root, top_n=2, reuse=False)
        assert all(buffer[:, :, SPARE].isfinite().all() for buffer in buffers)
        with torch.inference_mode():
            best = model(torch.tensor([[4, 5, 6, 7, 8]])).logits[0, -1].topk(2).indices.tolist()
        assert tree.best(root, 2)[0].tolist() == best


def test_padding_is_of_tokens_that_were_asked_for(tmp_path):
    """A model may have rows that nobody trained, and 0 x NaN is NaN."""
    model = rand(tmp_path, initializer_range=0.3, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = float("nan")
    tree = as_on_a_device(model)
    for _ in range(2):
        root = Node(-1, None)
        tree.prefill([1, 2, 3], root, top_n=2, reuse=False)
        nodes = [Node(token, root) for token in (4, 5, 6)]
        tree.forward(nodes)
        below = Node(7, nodes[0])
        tree.forward([below])
        with torch.inference_mode():
            best = model(torch.tensor([[1, 2, 3, 4, 7]])).logits[0, -1].topk(2).indices.tolist()
        assert tree.best(below, 2)[0].tolist() == best
