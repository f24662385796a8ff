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


@pytest.mark.parametrize("of_blocks", [False, True])
def test_a_row_does_not_depend_on_the_other_rows(of_blocks):
    model = made_of_blocks() if of_blocks else make("llama")
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


FOUR, FOUR_HALF, EIGHT, EIGHT_HALF = range(1, 5)


def blocks(kind: int, *shape: int, seed: int = 0) -> Tensor:
    """Random weights that were in 4-bit or 8-bit blocks of 32, some in half precision since, in bfloat16."""
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).view(-1, 32) * 0.1
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    if kind < EIGHT:
        scale, offset = ((high - low) / 15).half().float(), low.half().float()
        w = ((w - offset) / scale).round().clamp(0, 15) * scale + offset
    else:
        scale = (w.abs().amax(-1, keepdim=True) / 127).half().float()
        w = (w / scale).round().clamp(-127, 127) * scale
    return (w.half() if kind in (FOUR_HALF, EIGHT_HALF) else w).view(*shape).bfloat16()


def given_back(weight: Tensor) -> tuple[Tensor | None, int]:
    """A weight packed and unpacked again, and the place of its format."""
    found = amx.blocks_of(weight)
    if found is None:
        return None, 0
    packed, kind = found
    rows, inputs = weight.shape
    units, steps = -(-rows // 32), inputs // 32
    raw = torch.zeros(len(packed) + 64 + units * steps * 2048 + 64, dtype=torch.uint8)
    at = -raw.data_ptr() % 64
    raw[at : at + len(packed)] = packed
    to = at + -(-len(packed) // 64) * 64
    amx.library().steps_of(raw.data_ptr() + at, units * steps, kind, raw.data_ptr() + to)
    out = raw[to : to + units * steps * 2048].clone().view(torch.bfloat16)
    return out.view(units, steps, 32, 32).transpose(1, 2).reshape(-1, inputs)[:rows], kind


def grid(scale: float, offset: float, steps: list[int]) -> Tensor:
    """One block with these whole numbers first, the others in between."""
    q = torch.tensor(steps + [steps[i % len(steps)] for i in range(32 - len(steps))]).float()
    return (torch.tensor(scale).half().float() * q + torch.tensor(offset).half().float()).bfloat16()[None]


FOURS = {
    "Q4_1": grid(0.0123, -0.0911, list(range(16))),
    "Q4_1 far from zero": grid(0.0123, 0.511, list(range(16))),
    "Q4_1 of few steps": grid(0.0123, -0.0911, [0, 1, 15]),
    "Q4_0": grid(0.0123, -8 * 0.01229858, list(range(15))),
    "Q4_0, most far above": grid(-0.0123, 8 * 0.01229858, [0, 1, 5, 8, 11]),
    "half precision at its smallest": grid(2.0**-24, -5 * 2.0**-24, list(range(16))),
    "large": grid(300.0, -4000.0, list(range(16))),
    "one value": grid(0.0, 0.0913, [0]),
    "zeros": grid(0.0, 0.0, [0]),
}


@pytest.mark.parametrize("name", FOURS)
def test_blocks_of_every_shape_are_found_and_give_back_every_weight(name):
    weight = FOURS[name]
    back, kind = given_back(weight)
    assert amx.FORMATS[kind] == "4-bit blocks"
    assert torch.equal(back, weight)


@pytest.mark.parametrize("kind", [FOUR, FOUR_HALF, EIGHT, EIGHT_HALF])
@pytest.mark.parametrize("shape", [(1, 32), (33, 64), (80, 288), (8000, 96)])
def test_weights_from_blocks_are_given_back(kind, shape):
    weight = blocks(kind, *shape)
    back, found = given_back(weight)
    assert found == kind or (len(weight) == 1 and found < kind)  # a single block may have another's numbers
    assert torch.equal(back, weight)


def test_whatever_no_block_gives_back_stays_as_it_is():
    for kind in (FOUR, EIGHT):
        weight = blocks(kind, 48, 96)
        block = weight[17, 32:64]
        step = (block.max() - block.min()) / 15 if kind == FOUR else block.abs().max() / 127
        block[block.abs().argmin()] += 0.4 * step
        assert given_back(weight)[1] == 0
    for odd in (float("nan"), float("inf")):
        weight = blocks(FOUR, 48, 96)
        weight[17, 40] = odd
        assert given_back(weight)[1] == 0
    assert given_back(blocks(FOUR, 4, 64)[:, :48])[1] == 0
    assert given_back(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))[1] == 0


def made_of_blocks(kind: str = "llama"):
    """A model with matrices in every kind of blocks, most of 4 bits, and one that is in none."""
    others = {
        "lm_head": EIGHT,
        "model.layers.2.mlp.down_proj": EIGHT_HALF,
        "model.layers.2.self_attn.o_proj": FOUR_HALF,
    }
    model = make(kind)
    for i, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "model.layers.1.mlp.down_proj":
            module.weight.data = blocks(others.get(name, FOUR), *module.weight.shape, seed=i)
    return model


def test_a_model_of_blocks_says_so_and_reads_fewer_bytes():
    model = made_of_blocks()
    forward, usual = amx.AmxForward(model), amx.AmxForward(model, blocks=False)
    assert {piece.format for piece in forward._pieces} == set(range(5))
    assert set(forward.formats) == set(amx.FORMATS)
    assert forward.describe() == "AMX forward, bfloat16, weights in 4-bit blocks"
    assert usual.describe() == "AMX forward, bfloat16"
    assert amx.AmxForward(model, int8=True).describe() == "AMX forward, int8"
    assert 2.2 < usual.bytes_read / forward.bytes_read < 3.2
    assert forward.relative_node_cost > 2 * usual.relative_node_cost
    assert forward._layout() != usual._layout()


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_compute_the_bits_of_bfloat16(kind):
    model = made_of_blocks(kind)
    forward, usual = amx.AmxForward(model), amx.AmxForward(model, blocks=False)
    whole = tree(100, 0)
    for count in (1, 2, 4, 5, 16, 17, 33, 48, 49, 100):
        nodes = [part[:count] for part in whole]
        got, wanted = (run(one, model, KVBuffer(250), *nodes) for one in (forward, usual))
        assert torch.equal(got, wanted), count
    cache, ids = KVBuffer(72), torch.arange(70) + 5
    cache.slots, cache.used = torch.arange(1, 71), 71
    got, wanted = (one(cache, ids, torch.arange(70), None, 3) for one in (forward, usual))
    assert torch.equal(got, wanted)


@pytest.mark.skipif(amx.library() is None, reason="this processor has no matrix tiles")
def test_emulated_tiles_are_the_processors():
    """Up to the order of sums within a tile, which no manual promises."""
    model = made_of_blocks()
    whole = tree(40, 0)
    got = run(amx.AmxForward(model), model, KVBuffer(250), *whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx, "library", emulated.library)
        assert far(run(amx.AmxForward(model), model, KVBuffer(250), *whole), got.float()) < 0.02


@pytest.mark.parametrize("count", [37, 70])  # few rows share out units beforehand, many take them in turns
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads, count):
    model = made_of_blocks()
    forward = amx.AmxForward(model)
    ids, parents, slots = tree(count, 4)
    usual = run(forward, model, KVBuffer(192), ids, parents, slots)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(run(forward, model, KVBuffer(192), ids, parents, slots), usual)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
@pytest.mark.parametrize("of_blocks", [False, True])
def test_a_prompt_without_a_mask_in_one_or_more_passes(of_blocks):
    """The same bits, whatever rows share a pass: few and many are laid out and multiplied in different orders."""
    model = made_of_blocks() if of_blocks else make("llama")
    forward = amx.AmxForward(model)
    ids, found = torch.arange(70) + 5, []
    for parts in ([70], [33, 37], [1, 69], [4, 12, 54]):
        cache, end, got = KVBuffer(72), 0, []
        for part in parts:
            begin, end = end, end + part
            cache.slots, cache.used = torch.arange(begin + 1, end + 1), end + 1
            got.append(forward(cache, ids[begin:end], torch.arange(begin, end), None, 0))
        found.append(torch.cat(got))
    exact = model.float()(ids[None]).logits[0]
    assert far(found[0], exact) < 0.03
    assert all(torch.equal(one, found[0]) for one in found[1:])


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


def off_behind_a_long_path(model, forward: type) -> torch.Tensor:
    """How far the last node's row is from the model's own in float32: of a runner that takes `forward` by itself."""
    runner = HfTreeModel(model, vocab_size=272)
    root = Node(-1, None)
    runner.prefill(list(range(5, 95)), root)
    assert isinstance(runner._forward, forward)
    assert not runner.notes
    node, nodes = root, []
    for i in range(450):  # beyond the first 512 slots
        node = Node(5 + i % 200, node)
        nodes.append(node)
    runner.forward(nodes[:-1])
    runner.forward(nodes)
    tokens = [*range(5, 95), *nodes[-1].tokens()]
    exact = torch.log_softmax(model.float()(torch.tensor([tokens])).logits[0, -1], -1)
    return (runner.log_row(nodes[-1]) - exact).abs()


def test_the_runner_takes_it_and_its_pool_may_grow():
    assert off_behind_a_long_path(make("llama"), amx.AmxForward).mean() < 0.05
