"""The forward in one call: the model's own answer up to rounding, whatever the tree's shape and slots."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dsbd_cli.decoding.cache.buffers import KVBuffer, Span
from dsbd_cli.decoding.forward import amx, llama
from dsbd_cli.decoding.forward.backends import why_no_amx
from dsbd_cli.decoding.forward.kernels import DenseLinear, PrepackedLinear, c_kernels, can_pack
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.sequences import Node
from tests.decoding.forward import emulated


@pytest.fixture(scope="module", autouse=True)
def tiles() -> Iterator[None]:
    with emulated.tiles():
        yield


SIZES = {
    "vocab_size": 272, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
KINDS = {
    "llama": {},
    "wide heads": {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "one group": {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 3},
    "qwen2": {"head_dim": 32},  # biases
    "qwen3": {"head_dim": 64},  # norms of heads
}


def make(kind: str, dtype: torch.dtype = torch.bfloat16, **sizes: int):
    """A random model in which attention matters."""
    torch.manual_seed(1)
    family = kind if kind.startswith("qwen") else "llama"
    config = AutoConfig.for_model(family, **(SIZES | KINDS[kind] | sizes), initializer_range=0.12)
    model = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    for name, weight in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            weight.data = (weight.data.float() + 0.3 * torch.randn_like(weight.float())).to(dtype)
    return model


@torch.inference_mode()
def run(forward, model, cache: KVBuffer, ids: Tensor, parents: list[int], slots: list[int]) -> Tensor:
    """Logits of a tree whose node i hangs below node `parents[i]` (-1: nothing), in `slots`."""
    count, depth = len(ids), []
    mask = torch.full((count, cache.capacity), torch.finfo(forward.dtype).min, dtype=forward.dtype)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] = mask[parent]
        mask[i, slots[i]] = 0
        depth.append(0 if parent < 0 else depth[parent] + 1)
    cache.slots, cache.used = torch.tensor(slots), max(slots) + 1
    cache.spans = (Span(0, count, 0, cache.used),)
    return forward(cache, ids, torch.tensor(depth), mask[:, : cache.used], 0)


def tree(count: int, seed: int) -> tuple[Tensor, list[int], list[int]]:
    """A random tree, and slots out of order with gaps."""
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, count))]
    slots = [int(slot) for slot in rng.permutation(np.arange(1, 2 * count + 20))[:count]]
    return torch.from_numpy(rng.integers(3, 272, count)), parents, slots


def paths(parents: list[int]) -> list[list[int]]:
    """Each node's path from the root, itself included."""
    found: list[list[int]] = []
    for i, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), i])
    return found


@torch.inference_mode()
def plain(model, ids: Tensor, parents: list[int]) -> Tensor:
    """The same logits in float32, path by path."""
    exact = model.float()
    return torch.stack([exact(ids[path][None]).logits[0, -1] for path in paths(parents)])


def far(got: Tensor, wanted: Tensor) -> float:
    """Distance on the scale of what is wanted."""
    return float((got.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_its_paths(kind):
    model = make(kind)
    assert why_no_amx(model, False) is None
    linear = PrepackedLinear if can_pack(torch.bfloat16) else DenseLinear
    forward, other = amx.AmxForward(model), llama.LlamaForward(model, linear, c_kernels())
    whole = tree(100, 0)
    exact = plain(copy.deepcopy(model), *whole[:2])
    for count in (1, 5, 16, 17, 33, 48, 49, 100):
        nodes = [part[:count] for part in whole]
        got = run(forward, model, KVBuffer(250), *nodes)
        usual = run(other, model, KVBuffer(250), *nodes)
        assert got.dtype == torch.bfloat16
        assert far(got, exact[:count]) < max(0.03, 1.5 * far(usual, exact[:count])), count


def test_a_row_does_not_depend_on_the_other_rows():
    model = make("llama")
    forward = amx.AmxForward(model)
    ids, parents, slots = tree(60, 3)
    whole = run(forward, model, KVBuffer(256), ids, parents, slots)
    cache = KVBuffer(256)
    first = run(forward, model, cache, ids[:20], parents[:20], slots[:20])
    assert torch.equal(first, whole[:20])


@torch.inference_mode()
@pytest.mark.parametrize("counts", [(5, 5), (20, 3, 40), (1, 70)])
def test_requests_with_slots_of_their_own_are_as_if_alone(counts):
    """Bit for bit, whatever numbers lie in slots that none of them sees."""
    model = make("llama")
    forward = amx.AmxForward(model)
    trees = [tree(count, seed) for seed, count in enumerate(counts)]
    alone = [run(forward, model, KVBuffer(256), *one) for one in trees]
    cache = KVBuffer(32 * 32)
    run(forward, model, cache, *tree(1, 0))  # buffers show their shape
    for buffers in (cache.keys, cache.values):
        for buffer in buffers.values():
            buffer.fill_(1e4)
    ids, parents, slots = [], [], []
    for at, (own, above, places) in enumerate(trees):
        begin, first = 256 * at + 32, len(slots)
        for buffers in (cache.keys, cache.values):
            for buffer in buffers.values():
                buffer[:, :, begin : begin + 192] = 0
        ids.append(own)
        parents += [parent if parent < 0 else parent + first for parent in above]
        slots += [begin + place for place in places]
    got = run(forward, model, cache, torch.cat(ids), parents, slots)
    assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads):
    model = make("llama")
    forward = amx.AmxForward(model)
    ids, parents, slots = tree(37, 4)
    usual = run(forward, model, KVBuffer(128), ids, parents, slots)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(run(forward, model, KVBuffer(128), ids, parents, slots), usual)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("parts", [[70], [33, 37], [1, 69]])
def test_a_prompt_without_a_mask_in_one_or_more_passes(parts):
    model = make("llama")
    forward = amx.AmxForward(model)
    ids, cache, end, got = torch.arange(70) + 5, KVBuffer(72), 0, []
    for part in parts:
        begin, end = end, end + part
        cache.slots, cache.used = torch.arange(begin + 1, end + 1), end + 1
        got.append(forward(cache, ids[begin:end], torch.arange(begin, end), None, 0))
    exact = model.float()(ids[None]).logits[0]
    assert far(torch.cat(got), exact) < 0.03


@torch.inference_mode()
def test_only_wanted_rows_come_back():
    model = make("llama")
    forward = amx.AmxForward(model)
    cache, ids = KVBuffer(64), torch.arange(9) + 5
    cache.slots, cache.used = torch.arange(1, 10), 10
    whole = forward(cache, ids, torch.arange(9), None, 0)
    assert torch.equal(forward(cache, ids, torch.arange(9), None, 1), whole[-1:])
    assert torch.equal(forward(cache, ids, torch.arange(9), None, torch.tensor([4, 0])), whole[[4, 0]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [3, 40])
def test_int8_is_close_and_a_large_token_matters_only_to_itself(dtype, count):
    model = make("llama", dtype)
    model.model.embed_tokens.weight.data[7] *= 300
    assert why_no_amx(model, True) is None
    ids, parents, slots = tree(count, 5)
    ids[1], parents[2:] = 7, [0 if parent == 1 else parent for parent in parents[2:]]
    got = run(amx.AmxForward(model, int8=True), model, KVBuffer(128), ids, parents, slots)
    assert far(got, plain(model, ids, parents)) < 0.05


def test_int8_weights_come_back_from_their_tiles():
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    packed, scale = amx.packed(weight, True)
    assert packed.shape == (2, 1, 2, 16, 16, 4)
    rows = packed.permute(0, 2, 4, 1, 3, 5).reshape(64, 64)
    assert (rows[:40] * scale[:, None] - weight).abs().max() <= scale.max() / 2 + 1e-6
    assert not rows[40:].any()


def test_whatever_the_tiles_cannot_take_is_left_to_others():
    assert why_no_amx(make("llama", torch.float32), False) is not None
    assert why_no_amx(make("llama", vocab_size=259), False) is not None
    assert why_no_amx(make("llama", hidden_size=96), True) is not None  # int8 takes 64 inputs a step


def test_not_a_number_shows_in_its_rows():
    model = make("llama")
    model.model.embed_tokens.weight.data[7] = float("nan")
    ids, parents, slots = torch.tensor([5, 7, 9, 11]), [-1, 0, 0, 1], [3, 1, 2, 6]
    got = run(amx.AmxForward(model), model, KVBuffer(64), ids, parents, slots)
    assert got[[1, 3]].isnan().all()


def test_the_runner_takes_it_and_its_pool_may_grow():
    model = make("llama")
    runner = HfTreeModel(model, vocab_size=272)
    root = Node(-1, None)
    runner.prefill(list(range(5, 95)), root)
    assert isinstance(runner._forward, amx.AmxForward)
    assert not runner.notes
    node, nodes = root, []
    for i in range(450):  # beyond the first 512 slots
        node = Node(5 + i % 200, node)
        nodes.append(node)
    runner.forward(nodes[:-1])
    runner.forward(nodes)
    tokens = [*range(5, 95), *nodes[-1].tokens()]
    exact = torch.log_softmax(model.float()(torch.tensor([tokens])).logits[0, -1], -1)
    assert (runner.log_row(nodes[-1]) - exact).abs().mean() < 0.05
