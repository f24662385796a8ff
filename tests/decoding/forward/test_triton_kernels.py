"""The Triton kernels against tensor operations: on a GPU, or anywhere with TRITON_INTERPRET=1."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.nn.functional as F

from dsbd_cli.decoding.forward import llama
from dsbd_cli.decoding.forward.few import FewNodes
from dsbd_cli.decoding.forward.kernels import DenseLinear
from dsbd_cli.decoding.forward.llama import TorchLayer, TritonLayer
from dsbd_cli.decoding.forward.split import SplitLayers
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.group import ALONE, Group
from tests.builders import VOCAB, rand

pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from dsbd_cli.decoding.forward.triton_kernels import Kernels
from dsbd_cli.decoding.forward.triton_products import Products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter has no bfloat16 products.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device=DEVICE, dtype=dtype)


def close(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 2e-2
    return torch.allclose(ours.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("count", "groups", "shared", "size", "used", "dtype"),
    [(1, 3, 3, 64, 70, DTYPES[0]), (5, 2, 4, 128, 200, DTYPES[1]), (24, 2, 1, 80, 333, DTYPES[0]),
     (24, 2, 1, 80, 333, DTYPES[1]), (40, 1, 8, 64, 5, DTYPES[0]), (2, 1, 1, 32, 500, DTYPES[1])],
)  # fmt: skip
def test_attention_over_a_tree(count, groups, shared, size, used, dtype):
    capacity = 512
    query = noise(count * shared, groups, size, dtype=dtype)
    keys = noise(1, groups, capacity, size, dtype=dtype, seed=1)
    values = noise(1, groups, capacity, size, dtype=dtype, seed=2)
    seen = torch.rand(count, capacity, generator=torch.Generator().manual_seed(3)) < 0.3
    seen[:, 0] = True
    seen[0, 1:] = False  # a node that sees one slot, so that whole splits are hidden from it
    mask = torch.zeros(count, capacity, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min).to(DEVICE)
    length = torch.tensor([used], device=DEVICE)
    got = Kernels().attend(query, keys, values, mask, torch.zeros_like(length), length, size**-0.5)
    heads = query.view(count, shared, groups, size).permute(2, 1, 0, 3).reshape(1, -1, count, size)
    wanted = F.scaled_dot_product_attention(
        heads.float(), keys[:, :, :used].float(), values[:, :, :used].float(),
        attn_mask=mask[None, None, :, :used].float(), enable_gqa=True,
    )  # fmt: skip
    assert close(got, wanted[0].transpose(0, 1).reshape(count, -1).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_and_silu(dtype):
    x, weight = 3 * noise(5, 576, dtype=dtype), noise(576, dtype=dtype, seed=1)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert close(Kernels().rms(x, weight, 1e-5), weight * wide.to(dtype))
    both = 3 * noise(5, 3000, dtype=dtype)
    assert close(Kernels().silu(both), F.silu(both[:, :1500]) * both[:, 1500:])


@pytest.mark.parametrize("count", [3, 20, 70])  # few nodes, a head a program; more, four; a prompt, sixteen
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_turned_and_laid_where_attention_looks(count, in_order, normed):
    heads, groups, size, capacity, dtype = 14, 2, 24, 100, torch.float32  # 18 heads: more than a program's 16
    shared = heads // groups
    qkv = noise(count, (heads + 2 * groups) * size, dtype=dtype)
    cos, sin = noise(count, size, dtype=dtype, seed=1), noise(count, size, dtype=dtype, seed=2)
    weights = (noise(size, dtype=dtype, seed=3), noise(size, dtype=dtype, seed=4)) if normed else None
    slots = torch.randperm(capacity, generator=torch.Generator().manual_seed(5))[:count].to(DEVICE)
    pool = [torch.zeros(1, groups, capacity, size, device=DEVICE) for _ in range(2)]
    got = Kernels().rope(qkv, cos, sin, slots, weights, *pool, heads, 1e-5, in_order=in_order)
    rows = qkv.view(count, -1, size)
    turned, value = rows[:, : heads + groups], rows[:, heads + groups :]
    if weights is not None:
        turned = turned * torch.rsqrt(turned.pow(2).mean(-1, keepdim=True) + 1e-5)
        turned = torch.cat([turned[:, :heads] * weights[0], turned[:, heads:] * weights[1]], 1)
    low, high = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
    query = turned[:, :heads]
    if in_order:
        assert close(got.view(count, heads, size), query)
    else:
        by_group = query.view(count, groups, shared, size).transpose(1, 2)
        assert close(got.view(count, shared, groups, size), by_group)
    for buffer, wanted in zip(pool, (turned[:, heads:], value), strict=True):
        assert close(buffer[0][:, slots], wanted.transpose(0, 1))
        untouched = torch.ones(capacity, dtype=torch.bool)
        untouched[slots.cpu()] = False
        assert (buffer[0][:, untouched.to(DEVICE)] == 0).all()


def begun(model, forward: llama.LlamaForward) -> tuple[HfTreeModel, Node]:
    """A tree that `forward` computes, and its root, behind a prompt."""
    tree, root = HfTreeModel(model, vocab_size=VOCAB, graphs=False), Node(-1, None)
    tree._use(forward)
    tree._ways.served = True
    tree.prefill([5, 6, 7, 8], root)
    return tree, root


def walked(model, forward: llama.LlamaForward) -> torch.Tensor:
    """Rows of the root and of five nodes below, by `forward`."""
    tree, root = begun(model, forward)
    level = [Node(token, root) for token in (9, 10, 11)]
    below = [Node(12, level[1]), Node(13, level[1])]
    tree.forward([*below, *level])
    return torch.stack([tree.log_row(node) for node in [root, *level, *below]])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_layers_with_kernels_are_layers_without(tmp_path, kind):
    model = rand(tmp_path, kind, num_key_value_heads=2, head_dim=16, initializer_range=0.3).to(DEVICE)
    forward = llama.LlamaForward(model, DenseLinear, None)
    torch_layers = [
        TorchLayer(i, layer, DenseLinear, torch.float32, None) for i, layer in enumerate(model.model.layers)
    ]
    kernels = [
        TritonLayer(i, layer, DenseLinear, torch.float32, Kernels())
        for i, layer in enumerate(model.model.layers)
    ]
    rows = []
    for layers, reads_length in ((torch_layers, False), (kernels, True)):
        forward._layers, forward.reads_length = layers, reads_length
        rows.append(walked(model, forward))
    assert (rows[0] - rows[1]).abs().max() < 1e-4


class Halves(Group):
    """Two processes, the other of which has the same part: half of everything is this one's."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.normed = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x  # nothing is split

    def normed_sum(self, x, weight, eps, rms):
        self.normed += 1
        return super().normed_sum(x, weight, eps, rms)


def test_layers_whose_sums_are_normed_at_once_are_layers_one_by_one(tmp_path):
    model = rand(tmp_path, "qwen2", num_key_value_heads=2, head_dim=16, initializer_range=0.3).to(DEVICE)
    forward = llama.LlamaForward(model, DenseLinear, None)
    group, kernels = Halves(), Kernels()
    rows = []
    for split in (False, True):
        layers = [
            TritonLayer(i, layer, DenseLinear, torch.float32, kernels, group if split else ALONE)
            for i, layer in enumerate(model.model.layers)
        ]
        forward._layers, forward.reads_length = layers, True
        forward._split = SplitLayers(layers, forward._norm, kernels.rms) if split else None
        rows.append(walked(model, forward))
    assert (rows[0] - rows[1]).abs().max() < 1e-5
    assert group.normed == 2 * 2 * len(model.model.layers)  # of the prompt and of the tree


def layer_of(kernels: Kernels, count: int) -> list[torch.Tensor]:
    """What five kernels make of the first `count` of many nodes: values, the layer's output, logits."""
    kind, many, used = DTYPES[1], 44, 150
    cos, sin = (noise(256, 64, dtype=kind, seed=i) for i in range(2))
    keys, values = (noise(1, 2, 256, 64, dtype=kind, seed=i) for i in (2, 3))
    sizes = [(60, 128), (128,), (512, 128), (128, 256), (128,), (384, 128), (128, 192), (128,), (320, 128)]
    embed, norm, qkv, out, after, gate_up, down, last, head = (
        0.3 * noise(*size, dtype=kind, seed=4 + i) for i, size in enumerate(sizes)
    )
    mask = torch.where(torch.rand(many, 256, generator=torch.Generator().manual_seed(9)) < 0.8, 0.0, -9e4)
    ids = torch.arange(many, device=DEVICE)
    begins, length = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.tensor([used], device=DEVICE)
    mask = mask.to(DEVICE, kind)[:count]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    products = kernels.products
    rows, *turns = products.start(ids[:count], ids[:count] + 99, embed, norm, (cos, sin))
    query = products.heads(rows, 1e-5, qkv, None, None, 0.0, *turns, ids[:count] + 100, keys, values, 4)
    seen = kernels.attend(query, keys, values, mask, begins, length, 0.125)
    rows = products.residual(seen, out, None, rows, after)
    rows = products.residual(products.gated(rows, 1e-5, gate_up), down, None, rows, last)
    return [values[:, :, 100 : 100 + count], rows.x, rows.scaled, products.logits(rows, 1e-5, head)]


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing starts early under the interpreter")
@pytest.mark.parametrize("count", [4, 44])
def test_what_starts_early_computes_the_same(count):
    wanted, early = layer_of(Kernels(), count), Kernels(torch.device(DEVICE))
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(wanted, layer_of(early, count), strict=True))


def test_a_forward_begins_with_embeddings_and_turns_of_tensors_of_any_stride():
    embed, norm = noise(50, 96, dtype=DTYPES[1]), noise(96, dtype=DTYPES[1], seed=1)
    turns = noise(40, 24, dtype=DTYPES[1], seed=2), noise(40, 24, dtype=DTYPES[1], seed=3)
    ids = torch.arange(0, 50, 5, device=DEVICE)[::2]
    one_for_all = torch.tensor([[7]], device=DEVICE).expand(-1, 5).flatten()
    assert one_for_all.stride() == (0,)
    for positions in (one_for_all, torch.tensor([39, 0, 1, 7, 7], device=DEVICE)):
        rows, cos, sin = Products(False).start(ids, positions, embed, norm, turns)
        assert torch.equal(rows.x, embed[ids])
        assert torch.equal(rows.scaled, embed[ids] * norm)
        assert torch.allclose(rows.squares, embed[ids].float().pow(2).sum(1)[None])
        assert torch.equal(cos, turns[0][positions])
        assert torch.equal(sin, turns[1][positions])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_few_nodes_of_a_small_model_are_what_its_layers_compute(tmp_path, monkeypatch, kind):
    """Five kernels a layer round no more than tensor operations do, by float32: a tree, biases, norms of heads."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = rand(tmp_path, kind, head_dim=64, initializer_range=0.2, **sizes).to(DEVICE)
    for name, weight in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            weight.data = weight.data + 0.3 * torch.randn_like(weight)
    half = copy.deepcopy(model).to(DTYPES[1])
    rounded = copy.deepcopy(half).float()  # the same weights
    rows = []
    for one, few in ((rounded, False), (half, False), (half, True)):
        forward = llama.LlamaForward(one, DenseLinear, None)
        if few:
            kernels = Kernels()
            forward.kernels, forward._products, forward.reads_length = kernels, kernels.products, True
            forward._layers = [
                TritonLayer(i, layer, DenseLinear, half.dtype, kernels)
                for i, layer in enumerate(half.model.layers)
            ]
            forward._few = FewNodes(forward._layers, forward._norm, forward._head, kernels.products)
        tree, root = begun(one, forward)
        level = [Node(token, root) for token in range(9, 30)]  # more than 16
        below = [Node(12, level[1]), Node(13, level[1])]
        with monkeypatch.context() as patch:
            patch.setattr(
                TritonLayer if few else TorchLayer, "__call__", None if few else TorchLayer.__call__
            )
            tree.forward(level)  # not by layers as such
            tree.forward(below)
        rows.append(torch.stack([tree.log_row(node).float() for node in [*level, *below]]))
    theirs, ours = ((one - rows[0]).abs() for one in rows[1:])
    assert ours.mean() < 1.2 * theirs.mean()
    assert ours.max() < 2 * theirs.max()
