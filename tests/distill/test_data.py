"""Shards, batches and prompts: nothing lost, nothing doubled, losses where the target wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dsbd_cli.distill import batches, prompts, shards
from dsbd_cli.errors import UserError
from dsbd_cli.prompts import encode
from dsbd_cli.settings import Settings
from tests import builders


def some(count: int, vocab: int = 300, seed: int = 0) -> shards.Sequences:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        size = int(rng.integers(3, 90))
        start = int(rng.integers(1, size))
        rows.append((rng.integers(vocab, size=size).tolist(), start, start))
    return shards.pack(rows, {"seed": seed})


@pytest.mark.parametrize(("vocab", "kind"), [(300, np.uint16), (2**17, np.uint32)])
def test_a_shard_comes_back_whole_and_compact(tmp_path: Path, vocab: int, kind: type) -> None:
    from safetensors.numpy import load_file

    whole = some(20, vocab)
    path = tmp_path / f"a{shards.SUFFIX}"
    shards.save(whole, path)
    back = shards.load(path)
    for name in shards.COLUMNS:
        assert np.array_equal(getattr(back, name), getattr(whole, name))
    assert back.meta == {"seed": 0}
    assert load_file(str(path))["tokens"].dtype == kind
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_folder_joins_its_shards_and_skips_half_written_ones(tmp_path: Path) -> None:
    parts = [some(5, seed=1), some(7, seed=2)]
    for place, part in enumerate(parts):
        shards.save(part, tmp_path / f"s{place}{shards.SUFFIX}")
    (tmp_path / f".s2{shards.SUFFIX}.123").write_bytes(b"half")
    whole = shards.load_folder(tmp_path)
    assert len(whole) == 12
    assert np.array_equal(whole.sequence(8), parts[1].sequence(3))
    with pytest.raises(UserError, match="no token shards"):
        shards.load_folder(tmp_path / "none")
    (tmp_path / f"x{shards.SUFFIX}").write_bytes(b"not a shard")
    with pytest.raises(UserError, match="not a token shard"):
        shards.load_folder(tmp_path)


def test_every_sequence_is_in_one_batch_within_the_budget() -> None:
    length = np.random.default_rng(0).integers(3, 200, size=3000)
    plan = batches.order(length, 2048, np.random.default_rng(1))
    assert np.array_equal(np.sort(np.concatenate(plan)), np.arange(3000))
    sizes = [len(part) * batches.padded(length[part]).max() for part in plan]
    assert max(sizes) <= 2048
    # Only the very last remainder may be small: a small batch steps as far as a full one.
    assert sum(size < 1024 for size in sizes) <= 1
    assert [p.tolist() for p in plan] == [
        p.tolist() for p in batches.order(length, 2048, np.random.default_rng(1))
    ]


def test_a_sequence_longer_than_the_budget_still_has_its_batch() -> None:
    plan = batches.order(np.array([10, 500, 10]), 64, np.random.default_rng(0))
    assert sorted(i for part in plan for i in part) == [0, 1, 2]


def test_losses_are_taken_where_the_target_wrote() -> None:
    whole = shards.pack([([5, 6, 7, 8], 2, 2), (list(range(40)), 1, 30)])
    batch = batches.Store(whole, torch.device("cpu")).batch(np.array([0, 1]))
    assert batch.ids.shape == (2, 64)
    assert batch.ids[0, :4].tolist() == [5, 6, 7, 8]
    # Position t predicts t + 1: tokens 2, 3 of the first, 1 .. 39 of the second.
    assert batch.positions.tolist() == [1, 2, *range(64, 64 + 39)]


def test_the_split_is_fixed_and_disjoint() -> None:
    train, held = batches.split(500, 0.02, 768, 3)
    assert len(held) == 10
    assert sorted([*train, *held]) == list(range(500))
    assert np.array_equal(held, batches.split(500, 0.02, 768, 3)[1])
    assert [len(part) for part in batches.split(1, 0.02, 768, 0)] == [1, 0]


def test_prompts_of_all_forms(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [json.dumps({"prompt": "hello", "set": "x", "id": 7}), "", json.dumps({"messages": turns})]
    lines.append(json.dumps({"prompt": turns}))
    (tmp_path / "p.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = prompts.read_prompts(tmp_path / "p.jsonl")
    assert [(p.text, p.group, p.id) for p in found] == [
        ("hello", "x", "7"), (tuple(turns), "prompts", "3"), (tuple(turns), "prompts", "4")
    ]  # fmt: skip
    (tmp_path / "p.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    assert [p.text for p in prompts.read_prompts(tmp_path / "p.txt")] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "not JSON"),
        ("[]", "must be an object"),
        ("{}", "must have either prompt or messages"),
        ('{"prompt": 3}', "prompt must be a text or a list of messages"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no content"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": " "}', "the prompt is empty"),
        ('{"prompt": [{"role": "user", "content": ""}]}', "the prompt is empty"),
    ],
)
def test_a_bad_prompt_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(UserError, match=rf"p\.jsonl:2: {words}"):
        prompts.read_prompts(tmp_path / "p.jsonl")


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[bot]{% endif %}"
)


def test_the_chat_form_is_what_stands_around_the_user_text(tmp_path: Path) -> None:
    tokenizer = builders.tok(tmp_path)
    base = prompts.chat_form(tokenizer)
    assert base == prompts.Form((0,), None)
    tokenizer.chat_template = TEMPLATE
    form = prompts.chat_form(tokenizer)
    assert tokenizer.decode(form.header) == "[user]"
    assert form.suffix is not None
    assert tokenizer.decode(form.suffix) == "</s>[bot]"
    text = prompts.encode_prompt(tokenizer, "hi")
    assert text == form.header + tuple(tokenizer("hi", add_special_tokens=False).input_ids) + form.suffix
    turns = (
        {"role": "user", "content": "a"},
        {"role": "bot", "content": "b"},
        {"role": "user", "content": "c"},
    )
    assert (
        tokenizer.decode(prompts.encode_prompt(tokenizer, turns)) == "[user]a</s>[bot]b</s>[user]c</s>[bot]"
    )


def test_special_words_in_a_turn_are_text_as_in_decoding(tmp_path: Path) -> None:
    tokenizer = builders.tok(tmp_path)
    tokenizer.chat_template = TEMPLATE
    for said in ("a</s>b", "<s>", "x<|eot|></s>"):
        ids = prompts.encode_prompt(tokenizer, said)
        assert [token for token in ids if token < 3] == [1], said  # the template's own </s>
        assert tokenizer.decode(ids) == f"[user]{said}</s>[bot]"
        assert prompts.encode_prompt(tokenizer, ({"role": "user", "content": said},)) == ids
        assert list(ids) == encode(said, tokenizer, Settings(), len(tokenizer))[0]
    tokenizer.chat_template = None
    assert [token for token in prompts.encode_prompt(tokenizer, "a</s>b") if token < 3] == [1]
