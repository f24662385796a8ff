"""On a GPU: are captured forwards and iterations right, and what do they cost?

    python -m benchmarks.gpu_check [--json FILE] [--shapes 8b,135m] [--long] [--quick]

Checks, on random models: (1) float32: every method says the same tokens with CUDA graphs, Triton
kernels or neither; (2) a tree forward is a forward path by path; (3) bfloat16: the rows that leave the
device are the exact best of the rows on it, ties to the lower id, and close to those of the plain
forward; (4) a long prompt that makes buffers grow is captured anew; (5) float32: every method says in a batch what it
says alone, and the kernels verify what they are there for. Then times, as medians: one forward
of N nodes over 300 slots in each way of running it, beside the time that reading the weights once takes.
Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import (
    Choice,
    Engines,
    HfTreeModel,
    Node,
    SeededSampler,
    Trie,
    decode,
    demand_of,
    draft_processor,
    start,
    top_n_needed,
)
from dsbd_cli.decoding.cache.logits import log_probabilities
from dsbd_cli.decoding.forward.graphs import node_bucket
from dsbd_cli.loading.model import LoadedModel
from dsbd_cli.loading.pair import Pair
from dsbd_cli.loading.source import Source
from dsbd_cli.settings import Settings

# hidden, intermediate, layers, heads, key/value heads, vocabulary, tied
SHAPES = {
    "8b": (4096, 14336, 32, 32, 8, 128256, False),
    "1b": (2048, 8192, 16, 32, 8, 128256, True),
    "135m": (576, 1536, 30, 9, 3, 49152, True),
    "draft": (576, 1536, 4, 9, 3, 49152, True),
    "toy": (64, 128, 2, 4, 2, 500, True),
}
# What `HfTreeModel` is told, and whether compiled kernels are allowed.
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "model's own code": ({"fast": False, "graphs": False}, True),
    "its own, captured": ({"fast": False, "graphs": True}, True),
    "lean": ({"graphs": False}, True),
    "lean, captured, no kernels": ({"graphs": True}, False),
    "lean, captured": ({"graphs": True}, True),
}
NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48)
METHODS = {
    "beam": {"method": "beam"},
    "multinomial": {"method": "multinomial"},
    "cover": {"verify": "cover", "threshold": None},
    "dynamic": {"verify": "cover", "threshold": 0.9, "min_width": 2},
    "distinct width": {"verify": "cover", "threshold": 0.9, "width_rule": "distinct"},
    "paper": {"verify": "paper"},
    "continue": {"verify": "continue"},
    "paper, fixed": {"verify": "paper", "threshold": None},
    "continue, dynamic": {"verify": "continue", "threshold": 0.7, "min_width": 1, "draft_width": 7},
    "paper, distinct draws": {"verify": "paper", "draws": "distinct", "threshold": None},
    "continue, distinct draws": {
        "verify": "continue",
        "draws": "distinct",
        "threshold": None,
        "draft_width": 6,
    },
    "paper, distinct width": {"verify": "paper", "threshold": 0.7, "min_width": 1, "width_rule": "distinct"},
    "kv one": {"verify": "cover", "kv": "one", "threshold": None},
    "speculative": {"method": "speculative"},
    "specinfer": {"method": "specinfer"},
    "specinfer, wide": {"method": "specinfer", "tree": (4, 2, 1, 1)},
    "specinfer, many nodes": {"method": "specinfer", "tree": (5, 4, 3)},  # by the host
    "spectr": {"method": "specinfer", "tree": (3, 2), "tree_rule": "spectr"},
    "rsd": {"method": "specinfer", "tree": (3, 2, 1), "tree_rule": "rsd"},
    "deterministic": {"method": "dsbd", "deterministic": True},
    "deterministic beam": {"method": "beam", "deterministic": True},
    "no top-k": {"verify": "cover", "top_k": 0, "threshold": None},
}


def build(shape: str, device: str, dtype: torch.dtype, spread: float = 0.02, seed: int = 0) -> Any:
    """A random Llama of a shape, made on the device."""
    hidden, inner, layers, heads, groups, vocab, tied = SHAPES[shape]
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, vocab_size=vocab, tie_word_embeddings=tied,
        max_position_embeddings=131072, rope_theta=500000.0, initializer_range=spread,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    finally:
        torch.set_default_dtype(before)


def tree_model(way: str, model: Any, role: str = "target") -> HfTreeModel:
    """`model` run in one of the `WAYS`."""
    options, kernels = WAYS[way]
    os.environ["DSBD_NATIVE"] = "1" if kernels else "0"
    try:
        return HfTreeModel(model, vocab_size=model.config.vocab_size, role=role, **options)
    finally:
        del os.environ["DSBD_NATIVE"]


def decoded(
    target: HfTreeModel, draft: HfTreeModel, settings: Settings, prompt: list[int], seed: int, engines: Engines | None
) -> Any:  # fmt: skip
    """All tokens of all ranked sequences, and how many target calls it took; without `engines` step by step."""
    budget = 40
    trie = Trie(lambda node: "length" if node.depth >= budget else None, [], budget)
    target.prefill(prompt, trie.root, top_n=top_n_needed(settings, 0))
    draft.prefill(prompt, trie.root, top_n=draft_processor(settings).top_n)
    samplers = SeededSampler(seed, 0), SeededSampler(seed, 1)
    choice = Choice()
    if engines is not None:
        choice = engines.choose(target, draft, demand_of(settings, True), trie, samplers[1])
    run = start(settings, target, draft, trie, *samplers, choice.engine, choice.proposer)
    for _ in decode(run, settings):
        pass
    return [node.tokens() for node in run.hypotheses.ranking()], target.calls


def comparable(settings: Settings, got: Any) -> Any:
    """What `decoded` gives alike in every way: no calls where a pipeline alone proposes from what the target said."""
    return got[0] if demand_of(settings, True).recalls else got


def check_tokens(device: str, quick: bool) -> list[str]:
    """(1) The same tokens in every way, float32."""
    toys = [build("toy", device, torch.float32, 0.08, seed=seed) for seed in (0, 1)]
    pair = toys
    if not quick:
        pair = [
            build("135m", device, torch.float32, 0.08),
            build("draft", device, torch.float32, 0.08, seed=1),
        ]
    wrong = []
    rng = random.Random(0)
    prompts = [[rng.randrange(400) for _ in range(40)] for _ in range(2)]
    said: dict[str, Any] = {}
    for way in WAYS:
        models = [tree_model(way, model, role) for model, role in zip(pair, ("target", "draft"), strict=True)]
        small = [tree_model(way, model, role) for model, role in zip(toys, ("target", "draft"), strict=True)]
        engines = {id(models): Engines(), id(small): Engines()}
        for name, options in METHODS.items():
            base = {} if options.get("deterministic") else {"temperature": 1.0, "top_k": 10, "top_p": 0.9}
            settings = Settings(
                **(base | {"width": 4, "draft_width": 4, "gamma": 3, "forest": "full"} | options)
            )
            for i, prompt in enumerate(prompts):
                # A whole row of a random model is flat: among 49,152 borders of the cumulative sum some
                # draw is within rounding of one, so whole rows are compared on the small vocabulary.
                used = models if settings.top_k else small
                got = comparable(settings, decoded(*used, settings, prompt, i, engines[id(used)]))
                if said.setdefault(f"{name} {i}", got) != got:
                    wrong.append(f"tokens: {name}, prompt {i}: {way!r} differs from {next(iter(WAYS))!r}")
        wrong += [f"note: {way}: {note}" for part in (*models, *engines.values()) for note in part.notes]
        print(f"  {way}: {len(METHODS) * len(prompts)} runs", flush=True)
    return wrong


def check_paths(device: str, quick: bool) -> list[str]:
    """(2) Tree forward against plain forwards of the paths: float32 to 1e-4, bfloat16 to its rounding.

    How much bfloat16 rounds depends on the model: other ways may be off twice as far as the model's
    own code, which rounds in another order for a tree than for a path too.
    """
    wrong = []
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, None)):
        model = build("toy" if quick else "135m", device, dtype, 0.05)
        vocab = model.config.vocab_size
        rng = random.Random(1)
        ids = [rng.randrange(vocab) for _ in range(300)]
        for way in WAYS:
            tree, root = tree_model(way, model), Node(-1, None)
            tree.prefill(ids, root)
            level = [root]
            worst = 0.0
            for _ in range(12):
                level = [Node(rng.randrange(vocab), rng.choice(level)) for _ in range(rng.randint(1, 9))]
                tree.forward(level)
                node = rng.choice(level)
                with torch.inference_mode():
                    plain = model(torch.tensor([ids + node.tokens()], device=device)).logits[0, -1].float()
                worst = max(worst, float((torch.log_softmax(plain, -1) - tree.log_row(node)).abs().max()))
                tree.retain(level)
            print(f"  {dtype} {way}: worst {worst:.2g}", flush=True)
            limit = limit or 2 * worst
            if not worst < limit:
                wrong.append(f"paths: {way} in {dtype} is off by {worst:.3g}")
    return wrong


def check_growth(device: str, quick: bool) -> list[str]:
    """(4) A prompt that makes the buffers grow is captured anew, and says what the model's own code says."""
    models = [build("toy", device, torch.float32, 0.08, seed=seed) for seed in (0, 1)]
    rng = random.Random(3)
    prompts = [[rng.randrange(400) for _ in range(length)] for length in (40, 2500, 40)]
    wrong, said = [], {}
    for way in ("model's own code", "lean, captured"):
        pair = [tree_model(way, model, role) for model, role in zip(models, ("target", "draft"), strict=True)]
        engines = Engines()
        for name in ("multinomial", "beam", "cover", "paper", "continue"):
            options = {
                "temperature": 1.0,
                "top_k": 10,
                "top_p": 0.9,
                "width": 4,
                "draft_width": 4,
                "gamma": 3,
                "forest": "full",
            }
            settings = Settings(**(options | METHODS[name]))
            for i, prompt in enumerate(prompts):
                got = comparable(settings, decoded(*pair, settings, prompt, i, engines))
                if said.setdefault((name, i), got) != got:
                    wrong.append(f"growth: {name}, {len(prompt)} tokens: {way!r} differs")
        wrong += [f"growth: {way}: {note}" for part in (*pair, engines) for note in part.notes]
    return wrong


def toy_decoder(device: str) -> Decoder:
    """Two toys that agree about as often as strangers, float32, and a word for every token."""
    toys = [build("toy", device, torch.float32, 0.08, seed=seed) for seed in (0, 1)]
    target, draft = (
        LoadedModel(
            model, "toy", torch.device(device), torch.float32, 4096, model.config.vocab_size, None, None,
            Source("toy", "hub"),
        )
        for model in toys
    )  # fmt: skip
    words = {f"w{token}": token for token in range(target.vocab_rows)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")))
    return Decoder(Pair(target, draft, tokenizer, (), target.vocab_rows))


def check_batches(device: str, quick: bool) -> list[str]:
    """(5) Three prompts of every method, five at a time: tokens as alone; and who verifies them."""
    decoder, rng, wrong = toy_decoder(device), random.Random(6), []
    asked: list[tuple[str, list[int], Settings]] = []
    for name, options in METHODS.items():
        base = {} if options.get("deterministic") else {"temperature": 1.0, "top_k": 10, "top_p": 0.9}
        sizes = {
            "width": 4,
            "draft_width": 4,
            "gamma": 3,
            "forest": "full",
            "prices": "off",
            "max_new_tokens": 24,
        }
        for seed in range(3):
            prompt = [rng.randrange(400) for _ in range(rng.randint(5, 60))]
            asked.append((name, prompt, Settings(**(base | sizes | options | {"seed": seed}))))
    alone, engines = [], {}
    for name, prompt, settings in asked:
        alone.append(decoder.generate(prompt, settings, energy=False).token_ids)
        engines[name] = decoder.describe()["engine"]
    for name, engine in engines.items():
        print(f"  {name}: {engine}", flush=True)
        kernels = device != "cpu" and METHODS[name].get("verify") in ("paper", "continue")
        if kernels and "TritonLaw" not in engine:
            wrong.append(f"batches: {name}: {engine}")
    # Once side by side with its like, once among the others.
    for order in (range(len(asked)), rng.sample(range(len(asked)), len(asked))):
        results = decoder.generate_many([asked[i][1] for i in order], [asked[i][2] for i in order], batch=5)
        for i, result in zip(order, results, strict=True):
            if result.token_ids != alone[i]:
                wrong.append(f"batches: {asked[i][0]}, prompt {i}: not what it says alone")
    return wrong + [f"note: batches: {note}" for note in decoder.engines.notes]


def check_rows(device: str, quick: bool) -> list[str]:
    """(3) In bfloat16, what leaves the device is the stable sort of the row that is on it."""
    model = build("toy" if quick else "135m", device, torch.bfloat16, 0.05)
    vocab = model.config.vocab_size
    tree, root, rng = tree_model("lean, captured", model), Node(-1, None), random.Random(2)
    tree.prefill([rng.randrange(vocab) for _ in range(100)], root, top_n=10)
    wrong, ties, seen = [], 0, 0
    for count in (1, 3, 8, 24, 48, 60):
        level = [Node(rng.randrange(vocab), root) for _ in range(count)]
        tree.forward(level)
        assert tree.graphs is not None
        key = node_bucket(count), 10
        captures = tree.graphs.captures
        capture = next(captures[found] for found in captures if (found[0], found[2]) == key)
        rows = log_probabilities(capture.outputs[1][:count], vocab).cpu().numpy()
        for node, row in zip(level, rows, strict=True):
            tokens, logps = tree.best(node, 10)
            exact = np.argsort(-row, kind="stable")[:10]
            seen += 1
            ties += len(set(row[exact].tolist())) < 10
            if not np.array_equal(tokens, exact) or not np.array_equal(logps, row[exact]):
                wrong.append(f"rows: {count} nodes: {tokens.tolist()} is not {exact.tolist()}")
        tree.retain([])
    print(f"  {seen} rows, {ties} with ties among the best ten", flush=True)
    return wrong


def timed(tree: HfTreeModel, count: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one forward of `count` nodes, as the caller sees it, and on the device alone."""
    vocab, root, rng = tree.vocab_size, Node(-1, None), random.Random(3)
    tree.prefill([rng.randrange(vocab) for _ in range(300)], root, top_n=10)
    walls, device = [], []
    for _ in range(rounds + 3):
        nodes = [Node(rng.randrange(vocab), root) for _ in range(count)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        tree.forward(nodes)
        walls.append(time.perf_counter() - begin)
        tree.retain([])
    if tree.graphs is not None:
        captures = tree.graphs.captures
        capture = captures[list(captures)[-1]]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(rounds):
            events[0].record()
            capture.replay()
            events[1].record()
            torch.cuda.synchronize()
            device.append(events[0].elapsed_time(events[1]))
    result = {"wall_ms": 1e3 * statistics.median(walls[3:])}
    if device:
        result["device_ms"] = statistics.median(device)
    return result


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a device copy moves, read and write together."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * source.numel() / min(times)


def times(shape: str, device: str, quick: bool) -> dict[str, Any]:
    """Forward times of one shape in every way."""
    model = build(shape, device, torch.bfloat16)
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    if not SHAPES[shape][-1]:
        weights -= model.model.embed_tokens.weight.numel() * 2  # one row of it is read
    floor = 1e3 * weights / copy_bandwidth(device)
    result: dict[str, Any] = {"weights_bytes": weights, "floor_ms": floor, "ways": {}}
    print(f"{shape}: {weights / 1e9:.2f} GB of weights, {floor:.2f} ms to read them")
    print("  " + " " * 28 + "".join(f"{f'N={n}':>16}" for n in NODES))
    for way in WAYS:
        tree = tree_model(way, model)
        row = {}
        for count in NODES:
            row[str(count)] = timed(tree, count, 5 if quick else 20)
        result["ways"][way] = row | {"notes": tree.notes}
        cells = (
            f"{c['wall_ms']:.2f}" + (f" ({c['device_ms']:.2f})" if "device_ms" in c else "")
            for c in row.values()
        )
        print(f"  {way:28}" + "".join(f"{cell:>16}" for cell in cells), *tree.notes, flush=True)
        del tree
        gc.collect()
        torch.cuda.empty_cache()
    return result


def iterations(device: str) -> dict[str, Any]:
    """Milliseconds a target call of whole methods: 8B-shaped target, 1B-shaped draft, random weights."""
    target, draft = build("8b", device, torch.bfloat16), build("1b", device, torch.bfloat16, seed=1)
    models = tree_model("lean, captured", target), tree_model("lean, captured", draft, "draft")
    rng = random.Random(5)
    prompt = [rng.randrange(128256) for _ in range(256)]
    base = {"temperature": 1.0, "top_k": 10, "top_p": 0.8, "width": 4, "draft_width": 8, "gamma": 3}
    arms: dict[str, dict[str, Any]] = {
        "multinomial": {"method": "multinomial"},
        "beam": {"method": "beam"},
        "cover": {"verify": "cover", "threshold": None},
        "paper": {"verify": "paper"},
        "speculative": {"method": "speculative"},
    }
    result = {}
    for steps in (False, True):  # step by step, to compare
        engines = None if steps else Engines()
        for name, options in arms.items():
            if steps and name in ("multinomial", "beam"):
                continue
            settings = Settings(**(base | options))
            walls = []
            for seed in (0, 1, 2):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                _, calls = decoded(*models, settings, prompt, seed, engines)
                walls.append(1e3 * (time.perf_counter() - begin) / calls)
            title = name + (", step by step" if steps else "")
            result[title] = min(walls[1:])
            print(
                f"  {title:28} {result[title]:.2f} ms a target call, first prompt {walls[0]:.0f}", flush=True
            )
    print("  ", *models[0].notes, *models[1].notes)
    return result


def long_prompts(device: str) -> dict[str, Any]:
    """Prefill and one forward of 8 nodes behind prompts up to 32k tokens, 8B-shaped."""
    model = build("8b", device, torch.bfloat16)
    tree = tree_model("lean, captured", model)
    rng, result = random.Random(4), {}
    for length in (512, 2048, 8192, 32768):
        torch.cuda.reset_peak_memory_stats()
        prompt = [rng.randrange(128256) for _ in range(length)]
        seconds = []
        for _ in range(2):
            root = Node(-1, None)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            tree.prefill(prompt, root, top_n=10, reuse=False)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        walls = []
        for _ in range(8):
            nodes = [Node(rng.randrange(128256), root) for _ in range(8)]
            begin = time.perf_counter()
            tree.forward(nodes)
            walls.append(time.perf_counter() - begin)
            tree.retain([])
        result[str(length)] = {
            "prefill_s": min(seconds),
            "forward_ms": 1e3 * statistics.median(walls[3:]),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        print(f"  {length}: {result[str(length)]}", *tree.notes, flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--shapes", default="135m,draft,8b", help="shapes to time, of " + ", ".join(SHAPES))
    parser.add_argument("--long", action="store_true", help="also prompts up to 32k tokens on the 8B shape")
    parser.add_argument("--quick", action="store_true", help="toy models for the checks, fewer rounds")
    parser.add_argument("--device", default="cuda", help="cpu tries the checks out, without times")
    options = parser.parse_args()
    device = options.device
    report: dict[str, Any] = {"torch": torch.__version__, "wrong": []}
    if device != "cpu":
        report["device"] = torch.cuda.get_device_name(device)
    for title, check in (
        ("growth", check_growth),
        ("tokens", check_tokens),
        ("paths", check_paths),
        ("rows", check_rows),
        ("batches", check_batches),
    ):
        print(f"check {title}", flush=True)
        begin = time.perf_counter()
        report["wrong"] += check(device, options.quick)
        print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    print(*report["wrong"] or ["all checks passed"], sep="\n", flush=True)
    if device != "cpu":
        report["times"] = {}
        for shape in filter(None, options.shapes.split(",")):
            report["times"][shape] = times(shape, device, options.quick)
            gc.collect()
            torch.cuda.empty_cache()
        if "8b" in options.shapes:
            print("whole methods, prefill of 256 tokens included")
            report["iterations"] = iterations(device)
            gc.collect()
            torch.cuda.empty_cache()
        if options.long:
            report["long_prompts"] = long_prompts(device)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
