"""A forward over a tree is a forward over each of its paths, on one pool, for every served family."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsbd_cli.decoding.forward import backends, kernels, llama
from dsbd_cli.decoding.forward.backends import why_not_fused
from dsbd_cli.decoding.forward.kernels import DenseLinear, Int8Linear, PrepackedLinear, can_pack
from dsbd_cli.decoding.forward.llama import LlamaForward
from dsbd_cli.decoding.law.distribution import LogitsProcessor
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import RunError, UserError
from dsbd_cli.loading import processor
from tests.builders import VOCAB, markov, rand
from tests.decoding.spy import Spy

# Weights large enough that attention decides; a window that is crossed.
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "opt": {},
    "gpt2": {},
    "gpt_neox": {},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": 8},
    "phi": {},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8},
}


def family(folder, name, attention):
    kind = name.split("-")[0]
    wide = {"init_std": 0.3} if kind == "opt" else {"initializer_range": 0.3}
    model = rand(folder, kind, **(wide | FAMILIES[name]))
    try:
        model.set_attn_implementation(attention)
    except ValueError as error:
        pytest.skip(f"{kind} has no {attention}: {str(error)[:60]}")
    return model


def plain(model, ids):
    """Raw log-probabilities after `ids`, by an ordinary forward."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, -1, :VOCAB].float(), -1)


def children(rng, node, count):
    return [Node(rng.randrange(VOCAB), node) for _ in range(count)]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "replayed", "lean", "lean replayed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tree_forward_is_path_by_path_through_hundreds_of_rounds(tmp_path, name, attention):
    fast, replayed = "lean" in attention, "replayed" in attention
    model = family(tmp_path, name, attention if attention in ("eager", "sdpa") else "eager")
    if fast and why_not_fused(model) is not None:
        pytest.skip(f"{name} is left to its own modelling code")
    tree = HfTreeModel(model, vocab_size=VOCAB, fast=fast, graphs=replayed)
    tree.require_tree()
    assert isinstance(tree._forward, llama.LlamaForward) == fast
    rng = random.Random(1)
    ids = [rng.randrange(VOCAB) for _ in range(10)]
    root = Node(-1, None)
    tree.prefill(ids, root)
    leaves, most = [root], 0
    # Hundreds where our own code decides most (a grown pool, slots used again and again); enough to see a family's.
    for step in range(200 if name in ("llama", "gpt2") else 60):
        # Grow by levels, some of them computed together with their missing parents.
        level = [child for leaf in leaves for child in children(rng, leaf, rng.randint(1, 2))]
        deeper = [child for node in level[:3] for child in children(rng, node, 1)]
        tree.forward([*level[:2], *deeper] if step % 3 else [*deeper, *level])
        known = [node for node in [*level, *deeper] if tree.has_logits(node)]
        most = max(most, len(known))
        for node in rng.sample(known, 2) if step % 20 == 0 else []:
            got = tree.log_row(node)
            assert (got - plain(model, ids + node.tokens())).abs().max() < 1e-4
        leaves = rng.sample(known, min(len(known), rng.randint(1, 3)))
        if rng.random() < 0.05:
            leaves = [child for leaf in leaves for child in children(rng, leaf, 1)]  # not computed yet
        tree.retain(leaves)
        depth = max(leaf.depth for leaf in leaves)
        assert tree.tree.slots.live <= len(ids) + 3 * depth
        if depth > 60:
            tree.prefill(ids, root := Node(-1, None))
            leaves = [root]
    assert tree.tree.slots.capacity <= (2048 if replayed else 512)
    assert not tree.notes
    tree.prefill(ids, Node(-1, None))
    assert tree.tree.slots.live == len(ids)


def test_live_slots_are_exactly_the_nodes_of_the_kept_paths(tmp_path):
    tree = HfTreeModel(rand(tmp_path), vocab_size=VOCAB)
    rng, root = random.Random(2), Node(-1, None)
    tree.prefill([5, 6, 7], root, top_n=4)
    leaves = [root]
    for _ in range(100):
        level = [child for leaf in leaves for child in children(rng, leaf, 2)]
        tree.forward(level)
        leaves = rng.sample(level, min(3, len(level)))
        tree.retain(leaves)
        kept = set()
        for node in leaves:
            while node.parent is not None:
                kept.add(node)
                node = node.parent
        assert tree.tree.slots.live == 3 + len(kept)
        # Rows and mask rows are held for the leaves and the root alone.
        assert set(tree.logits) == {*leaves, root}
    assert tree.slots_peak >= tree.tree.slots.live
    assert tree.bytes_peak == tree.slots_peak * 2 * 2 * 32 * 4  # layers, keys and values, width, float32


def test_a_prompt_in_chunks_is_the_prompt(tmp_path, monkeypatch):
    model = rand(tmp_path, initializer_range=0.3)
    monkeypatch.setattr("dsbd_cli.decoding.model.hf_model._CHUNK", 7)
    tree, root = HfTreeModel(model, vocab_size=VOCAB), Node(-1, None)
    ids = [(11 * i) % VOCAB for i in range(40)]
    tree.prefill(ids, root)
    assert (tree.log_row(root) - plain(model, ids)).abs().max() < 1e-4
    assert tree.calls == 0


def test_the_next_turn_reuses_prompt_and_answer(tmp_path):
    model = rand(tmp_path, initializer_range=0.3)
    tree, root, rng = HfTreeModel(model, vocab_size=VOCAB), Node(-1, None), random.Random(3)
    ids = [(11 * i) % VOCAB for i in range(20)]
    tree.prefill(ids, root)
    good, bad = children(rng, root, 2)
    last = children(rng, good, 1)[0]
    tree.forward([last, bad])
    computed = []
    tree._forward = Spy(tree._forward, lambda cache, tokens, *rest: computed.append(len(tokens)))
    turn = [*ids, good.token, last.token, 9, 8]
    tree.prefill(turn, root := Node(-1, None))
    assert computed == [2]
    assert tree.tree.slots.live == len(turn)
    assert (tree.log_row(root) - plain(model, turn)).abs().max() < 1e-4
    node = children(rng, root, 1)[0]
    tree.forward([node])
    assert (tree.log_row(node) - plain(model, turn + node.tokens())).abs().max() < 1e-4
    # The same prompt again: only its last token; a shorter one: likewise.
    for again in (turn, ids[:7]):
        tree.prefill(again, root := Node(-1, None))
        assert (tree.log_row(root) - plain(model, again)).abs().max() < 1e-4
        assert tree.tree.slots.live == len(again)
    assert computed == [2, 1, 1, 1]


def test_known_nodes_cost_no_call(tmp_path):
    tree, root = HfTreeModel(rand(tmp_path), vocab_size=VOCAB), Node(-1, None)
    tree.prefill([1, 2], root, top_n=3)
    node = Node(4, root)
    tree.forward([node])
    tree.forward([root, node])
    tree.forward([])
    assert tree.calls == 1


def test_max_depth_counts_from_the_prompt(tmp_path):
    tree = HfTreeModel(rand(tmp_path, max_position_embeddings=64), vocab_size=VOCAB)
    tree.prefill([1] * 10, Node(-1, None))
    assert tree.max_depth == 54
    assert HfTreeModel(rand(tmp_path, "opt"), vocab_size=VOCAB).max_positions == 512


def test_padded_columns_have_no_probability(tmp_path):
    model = rand(tmp_path, vocab=320)
    tree, root = HfTreeModel(model, vocab_size=VOCAB), Node(-1, None)
    tree.prefill([1, 2], root)
    assert tree.log_row(root).shape == (VOCAB,)
    assert float(tree.log_row(root).exp().sum()) == pytest.approx(1)
    support = tree.joint([root], [0.0], LogitsProcessor())
    assert len(support.token) == VOCAB


@pytest.mark.parametrize(
    "processor", [LogitsProcessor(0.7, 5, 0.9), LogitsProcessor(1.0, 5, 1.0), LogitsProcessor(temperature=0)]
)
def test_the_joint_of_best_entries_is_that_of_whole_rows(tmp_path, processor):
    model = rand(tmp_path, initializer_range=0.3)
    supports = []
    for size in (0, 5):
        tree, root = HfTreeModel(model, vocab_size=VOCAB), Node(-1, None)
        tree.prefill([1, 2, 3], root, top_n=size)
        nodes = [Node(7, root), Node(9, root)]
        tree.forward(nodes)
        supports.append(tree.joint(nodes, [-0.5, -0.2], processor))
    whole, best = supports
    # Which continuations, exactly; their numbers come from two log-softmaxes of different rounding.
    assert np.array_equal(whole.parent, best.parent)
    assert np.array_equal(whole.token, best.token)
    assert np.allclose(whole.logp, best.logp, rtol=0, atol=1e-5)
    assert np.allclose(whole.prob, best.prob, rtol=0, atol=1e-5)


def test_asking_for_more_than_was_prepared_is_an_error(tmp_path):
    tree, root = HfTreeModel(rand(tmp_path), vocab_size=VOCAB), Node(-1, None)
    tree.prefill([1, 2], root, top_n=3)
    with pytest.raises(ValueError, match="were prepared"):
        tree.best(root, 4)
    with pytest.raises(ValueError, match="were prepared"):
        tree.joint([root], [0.0], LogitsProcessor())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("size", [0, 2])
def test_logits_that_are_not_finite_stop_the_run_and_leave_no_trace(tmp_path, value, size):
    table = torch.full((VOCAB, VOCAB), 1 / VOCAB)
    model = markov(tmp_path, table)
    tree, root = HfTreeModel(model, vocab_size=VOCAB, role="draft"), Node(-1, None)
    with torch.no_grad():
        # Only after token 7 are the hidden states, and with them everything computed from them, broken.
        model.model.embed_tokens.weight[7] = value
    tree.prefill([1, 2], root, top_n=size)
    node = Node(7, root)
    tree.forward([node])
    tree.best(root, 2)
    with pytest.raises(RunError, match=r"draft model .* step 1 in float32: check"):
        tree.best(node, 2)
    tree.prefill([1, 2, 3], root := Node(-1, None), top_n=size)
    assert np.isfinite(tree.best(root, 2)[1]).all()


def test_a_model_that_ignores_the_mask_is_refused_by_name(tmp_path):
    model = rand(tmp_path, initializer_range=0.3)
    inner = model.model.forward
    model.model.forward = lambda *args, attention_mask=None, **rest: inner(
        *args, attention_mask=None if attention_mask is None else torch.zeros_like(attention_mask), **rest
    )
    with pytest.raises(UserError, match=r"llama .*off by"):
        HfTreeModel(model, vocab_size=VOCAB, fast=False).require_tree()
    # By the name that its user gave it, not by the folder of a cache that it was read from.
    loaded: Any = SimpleNamespace(model=model, name="mine.gguf")
    with pytest.raises(UserError, match=r"^mine\.gguf: a tree"):
        HfTreeModel(loaded, vocab_size=VOCAB, fast=False).require_tree()


def test_a_fast_forward_that_disagrees_is_not_used(tmp_path, monkeypatch):
    model = rand(tmp_path, initializer_range=0.3)
    inner = llama.LlamaForward.__call__
    monkeypatch.setattr(
        llama.LlamaForward, "__call__", lambda *args: inner(*args) + torch.arange(VOCAB) / 100
    )
    tree, root = HfTreeModel(model, vocab_size=VOCAB), Node(-1, None)
    tree.prefill([1, 2, 3], root)
    assert "LlamaForward is not used" in tree.notes[0]
    assert (tree.log_row(root) - plain(model, [1, 2, 3])).abs().max() < 1e-4


def test_a_fast_forward_leaves_the_model_usable(tmp_path):
    model = rand(tmp_path, "qwen2", initializer_range=0.3, num_key_value_heads=2)
    before = plain(model, [1, 2, 3])
    for kind in (DenseLinear, PrepackedLinear):
        if kind is PrepackedLinear and not can_pack(torch.float32):
            pytest.skip("no packed products here")
        forward = llama.LlamaForward(model, kind, None)
        assert (plain(model, [1, 2, 3]) - before).abs().max() < 1e-6
        tree, root = HfTreeModel(model, vocab_size=VOCAB), Node(-1, None)
        tree._use(forward)
        tree.prefill([1, 2, 3], root)
        assert (tree.log_row(root) - before).abs().max() < 1e-4


def test_int8_products_are_close_and_their_own_tokens_matter_only_to_themselves(tmp_path):
    if set(torch.backends.quantized.supported_engines) <= {"none"}:
        pytest.skip("no int8 products here")
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(64, 32)
    x = torch.randn(5, 64, generator=generator)
    x[2] *= 1000  # one token far larger than the rest
    exact = layer(x)
    got = Int8Linear(layer.weight.detach(), layer.bias.detach())(x)
    scale = exact.abs().amax(1, keepdim=True)
    assert ((got - exact).abs() / scale).max() < 0.03
    for bias in (layer.bias.detach(), None):
        product = Int8Linear(layer.weight.detach(), bias)
        assert torch.equal(product(x), torch.cat([product(one[None]) for one in x]))
    tree = HfTreeModel(rand(tmp_path, initializer_range=0.3), vocab_size=VOCAB, int8=True)
    tree.require_tree()
    assert not tree.notes


@pytest.mark.parametrize("vnni", [True, False])
def test_int8_products_are_tried_only_where_they_have_eight_bits(tmp_path, monkeypatch, vnni):
    if set(torch.backends.quantized.supported_engines) <= {"none"}:
        pytest.skip("no int8 products here")
    monkeypatch.setattr(kernels, "_has_vnni", lambda: vnni)
    monkeypatch.setattr(processor, "amx_likely", lambda: False)
    ways = list(backends.candidates(rand(tmp_path), int8=True))
    assert any(way.int8 for way in ways) == vnni
    told = [(way.describe(), way.int8) for way in ways]
    assert len(set(told)) == len(told)  # nothing is tried, and noted, twice


def test_architectures_without_a_tree_are_refused_by_name(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    for kind, options in (
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4}),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}),
    ):
        config = AutoConfig.for_model(kind, vocab_size=VOCAB, **options)
        model = AutoModelForCausalLM.from_config(config).eval()
        with pytest.raises(UserError, match=kind):
            HfTreeModel(model, vocab_size=VOCAB).require_tree()


@pytest.mark.parametrize("graphs", [None, True])
@pytest.mark.parametrize("where", ["prompt", "tree"])
def test_what_an_interrupted_forward_left_is_not_reused(tmp_path, graphs, where):
    """Slots were given out for tokens whose keys were never computed: the next prompt shares none of them."""
    model = rand(tmp_path, initializer_range=0.3)
    tree = HfTreeModel(model, vocab_size=VOCAB, graphs=graphs)
    tree.require_tree()
    forward = tree._forward
    prompt, answer = list(range(3, 40)), [50, 51]

    def interrupted(*given):
        raise KeyboardInterrupt

    stop = Spy(forward, interrupted)
    root = Node(-1, None)
    tree.prefill([9, 8, 7], root)
    if where == "tree":
        tree.prefill(prompt, root)
    tree._forward = stop
    if tree.graphs is not None:
        tree.graphs.forward = stop
        tree.graphs.captures.release()
    node = Node(answer[1], Node(answer[0], root))
    with pytest.raises(KeyboardInterrupt):
        tree.prefill(prompt, root) if where == "prompt" else tree.forward([node])
    tree._forward = forward
    if tree.graphs is not None:
        tree.graphs.forward = forward
    ids, root = [*prompt, *answer, 60], Node(-1, None)
    tree.prefill(ids, root)
    assert torch.allclose(tree.log_row(root), plain(model, ids), atol=1e-4)


@pytest.mark.parametrize("graphs", [None, True])
def test_a_prompt_behind_buffers_that_could_not_grow(tmp_path, monkeypatch, graphs):
    """No slot stays given out, and nothing is taken over: the next prompt lies in slots 1, 2, ... again."""
    model = rand(tmp_path, initializer_range=0.3)
    tree = HfTreeModel(model, vocab_size=VOCAB, graphs=graphs)
    tree._use(LlamaForward(model, DenseLinear, None))
    tree._ways.served = True
    ids = [3 + i for i in range(40)]
    grow = Tensor.new_zeros
    sizes = []

    def scarce(self, *shape, **options):
        sizes.append(shape)
        if len(sizes) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grow(self, *shape, **options)

    root = Node(-1, None)
    tree.prefill(ids[:30], root)
    tree.forward([Node(5, root)])
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_zeros", scarce)
        with pytest.raises(torch.OutOfMemoryError):
            tree.tree.plan([Node(1, root) for _ in range(tree.tree.cache.capacity)])
    for count in (33, 40):
        root = Node(-1, None)
        tree.prefill(ids[:count], root)
        assert tree.tree.straight(count)
        assert torch.allclose(tree.log_row(root), plain(model, ids[:count]), atol=1e-4)
