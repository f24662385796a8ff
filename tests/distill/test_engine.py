"""The sampler: rows of different lengths must behave as single sequences do, and draws must follow the law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dsbd_cli.distill.engine import CHUNK, WINDOW, Engine, Request, draw, top_window
from dsbd_cli.distill.metrics import Warp, dense, warp_rows
from dsbd_cli.errors import UserError

VOCAB = 64


def model_of(kind: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | options))).eval()


def prompts(count: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [tuple(torch.randint(3, VOCAB, (size,), generator=generator).tolist()) for size in sizes]


@torch.no_grad()
def greedy(model: Any, prompt: tuple[int, ...], budget: int, eos: int) -> list[int]:
    ids = list(prompt)
    for _ in range(budget):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox", "phi"])
def test_greedy_rows_equal_single_sequences(kind: str) -> None:
    model = model_of(kind)
    eos = greedy(model, (5, 6, 7), 6, -1)[4]  # a token that ends some answers early
    engine = Engine(model, rows=4, size=40, eos=[eos], vocab=VOCAB)
    # More requests than rows, repeats among them, budgets of all kinds: rows are refilled and prefills shared.
    asked = [Request(p, 3 + i % 9, top_k=1) for i, p in enumerate(prompts(11) + prompts(3))]
    found = dict(engine.run(asked, seed=0))
    assert sorted(found) == list(range(len(asked)))
    for index, request in enumerate(asked):
        assert found[index] == greedy(model, request.prompt, request.max_new, eos)


def test_the_model_gets_its_own_attention_back() -> None:
    model = model_of()
    before = model.config._attn_implementation
    engine = Engine(model, rows=2, size=20, eos=[1], vocab=VOCAB)
    list(engine.run([Request((3, 4), 2)], seed=0))
    assert model.config._attn_implementation == before


def test_draws_follow_the_warped_law() -> None:
    model = model_of()
    prompt, count = (9, 8, 7), 8000
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1:]
    engine = Engine(model, rows=2000, size=8, eos=[1], vocab=VOCAB)
    for warp in (Warp(1.0, 10, 0.8), Warp(0.6, 0, 1.0)):
        asked = [Request(prompt, 1, warp.temperature, warp.top_k, warp.top_p) for _ in range(count)]
        seen = torch.zeros(VOCAB)
        for _, line in engine.run(asked, seed=3):
            seen[line[0]] += 1
        law = dense(*warp_rows(logits, warp), VOCAB)[0]
        # Expected total variation of n draws over k outcomes is about sqrt(k / (2 pi n)).
        support = int((law > 0).sum())
        assert 0.5 * (seen / count - law).abs().sum() < 4 * (support / (6.28 * count)) ** 0.5
        assert seen[law == 0].sum() == 0


def test_a_seed_repeats_and_another_differs() -> None:
    engine = Engine(model_of(), rows=3, size=40, eos=[1], vocab=VOCAB)
    asked = [Request(p, 12) for p in prompts(7)]
    first, second, other = (dict(engine.run(asked, seed)) for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_padding_of_the_head_is_never_drawn() -> None:
    engine = Engine(model_of(), rows=50, size=8, eos=[1], vocab=VOCAB - 40)
    lines = dict(engine.run([Request((3, 4), 4, 5.0, 0, 1.0) for _ in range(200)], seed=0))
    assert max(max(line) for line in lines.values()) < VOCAB - 40


def test_what_does_not_fit_is_refused() -> None:
    engine = Engine(model_of(), rows=2, size=10, eos=[1], vocab=VOCAB)
    with pytest.raises(UserError, match="does not fit in 10"):
        list(engine.run([Request((1,) * 8, 3)], seed=0))
    with pytest.raises(UserError, match="does not fit"):
        list(engine.run([Request((), 3)], seed=0))


def test_an_architecture_that_attends_otherwise_is_refused() -> None:
    # Two layers of a window of 4: attention over whole rows differs from the model's own.
    windowed = model_of("mistral", sliding_window=4)
    with pytest.raises(UserError, match="cannot be sampled"):
        Engine(windowed, rows=2, size=20, eos=[1], vocab=VOCAB)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7])
def test_a_head_of_exactly_top_p_is_all_that_is_drawn_from(count: int) -> None:
    """Eight equal tokens, each once the one that the noise favours: as many as fill p can be drawn."""
    noise = torch.full((8, 8), 0.1) + 0.8 * torch.eye(8)
    drawn = draw(torch.zeros(8, 8), torch.ones(8), torch.full((8,), 8), torch.full((8,), count / 8), noise)
    assert len(set(drawn.tolist())) == count


def test_top_window_is_exact_in_chunks() -> None:
    wide = torch.randn(6, CHUNK * 300, generator=torch.Generator().manual_seed(0))
    values, ids = top_window(wide, WINDOW)
    want = wide.topk(WINDOW)
    assert torch.equal(values, want.values)
    assert torch.equal(wide.gather(1, ids), want.values)
