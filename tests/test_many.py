"""Many prompts at a time: each gets what it gets alone, whoever shares its forwards, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli import Decoder, Settings
from dsbd_cli.decoding import HfTreeModel, most_nodes
from dsbd_cli.decoding.cache.buffers import KVBuffer
from dsbd_cli.decoding.model.shared import SharedModel
from dsbd_cli.errors import UserError
from dsbd_cli.many import Batch, Load, in_order
from dsbd_cli.member import Member
from tests import builders

WAYS: list[dict[str, Any]] = [
    {},
    {"method": "beam", "width": 3},
    {"method": "multinomial"},
    {"method": "speculative", "gamma": 3, "forest": "full"},  # what a device drafts
    {"method": "specinfer", "tree": (2, 2)},
    {"method": "specinfer", "tree": (3, 2), "tree_rule": "spectr"},
    {"method": "specinfer", "tree": (3, 2), "tree_rule": "rsd"},
    {"verify": "paper", "forest": "full"},
    {"verify": "continue", "threshold": None, "forest": "full"},
    {"threshold": 0.9, "min_width": 1, "forest": "full"},
    {"kv": "one", "forest": "full"},
    {"deterministic": True, "width": 3},
    {"method": "beam", "deterministic": True, "width": 2, "early_stopping": "never"},
    {"temperature": 0.0},
    {"top_k": 0, "top_p": 0.9},
    {"num_return": 3, "width": 4},
    {"stop": ("e", "a")},
    {"max_new_tokens": 1},
    {"max_new_tokens": 0},
    {"verify": "continue", "draws": "distinct", "threshold": None, "forest": "full"},
]


def settings_of(number: int) -> Settings:
    way = WAYS[number % len(WAYS)]
    base: dict[str, Any] = {"max_new_tokens": 5 + number % 14, "seed": 100 + number}
    drawn = {} if way.get("deterministic") else {"top_k": 12, "top_p": 0.95}
    return Settings(**(base | drawn | way))


def asked(count: int) -> list[tuple[str, Settings]]:
    return [(f"prompt {i} {'xyz' * (i % 7)}", settings_of(i)) for i in range(count)]


MIXED = asked(len(WAYS) * 3)


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> list[Any]:
    """What each of `MIXED` gives by itself."""
    return [told(decoder.generate(*one)) for one in MIXED]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = tmp_path_factory.mktemp("pair")
    builders.rand(base / "t", max_position_embeddings=256, initializer_range=0.2)
    builders.rand(base / "d", seed=1, max_position_embeddings=256, initializer_range=0.2)
    return Decoder.from_pair(base / "t", base / "d", dtype="float32")


def captured(decoder: Decoder) -> Decoder:
    """The same pair, run as a GPU would run it."""
    other = Decoder(decoder.pair, decoder.settings)
    vocab = decoder.pair.vocab_size
    assert decoder.pair.draft is not None
    assert decoder.draft is not None
    other.target = HfTreeModel(decoder.pair.target, vocab_size=vocab, graphs=True)
    # In the decoder's own arithmetic: what `speculative` keeps depends on what the draft thinks.
    int8 = decoder.draft.tree_forward.int8
    other.draft = HfTreeModel(decoder.pair.draft, vocab_size=vocab, role="draft", graphs=True, int8=int8)
    return other


def told(result: Any) -> Any:
    beams = [(beam.token_ids, beam.text, beam.finished) for beam in result.beams]
    return result.text, result.token_ids, result.finish_reason, result.seed, beams


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("device", [False, True])
def test_every_prompt_gets_what_it_gets_alone(
    decoder: Decoder, alone: list[Any], size: int, device: bool
) -> None:
    """All methods and settings beside each other; prompts of several lengths join and leave all the time."""
    order = list(range(len(MIXED)))
    random.Random(size).shuffle(order)
    one = captured(decoder) if device else decoder
    prompts, settings = zip(*(MIXED[i] for i in order), strict=True)
    many = list(one.generate_many(prompts, settings, batch=size))
    assert len(many) == len(MIXED)
    for i, got in zip(order, many, strict=True):
        assert told(got) == alone[i], MIXED[i][1]


@pytest.mark.parametrize("size", [1, 4, 60])
@pytest.mark.parametrize("heads", [8, 16])
def test_what_prompts_share_is_read_once_and_each_gets_what_it_gets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, heads: int
) -> None:
    """All methods beside each other, two stems in turns; heads of 16 are those of the forward in C."""
    for name, seed in (("t", 0), ("d", 1)):
        builders.rand(tmp_path / name, seed=seed, hidden_size=4 * heads, initializer_range=0.2)
    one = Decoder.from_pair(tmp_path / "t", tmp_path / "d", dtype="float32")
    stems = ["Some instruction with an example, and then", "SQL over tables a(b, c) and d(e, f): write"]
    mixed = [(f"{stems[i % 2]} {i} {'xyz' * (i % 7)}", settings_of(i)) for i in range(2 * len(WAYS))]
    wanted = [told(one.generate(*pair)) for pair in mixed]
    read = {one.target: 0, one.draft: 0}
    run = SharedModel._run

    def noted(self: SharedModel, plans: Any, spans: Any, slots: Any, mask: Any, head: Any) -> Any:
        if isinstance(head, int):  # a prompt
            read[self.model] += sum(map(len, plans))
        return run(self, plans, spans, slots, mask, head)

    monkeypatch.setattr(SharedModel, "_run", noted)
    prompts, settings = zip(*mixed, strict=True)
    assert [told(result) for result in one.generate_many(prompts, settings, batch=size)] == wanted
    ids = [one.plan(*pair).ids for pair in mixed]
    once = sum(map(len, ids)) - sum(len(stems[i % 2]) for i in range(2, len(ids)))
    # (One token shows the buffers their shape, and not every request asks a draft.)
    assert read[one.target] <= once + 1
    assert 0 < read[one.draft] <= once + 1


@pytest.mark.parametrize("at", [1, 5, 6, 9])
def test_an_interrupt_while_a_prompt_is_copied_ends_the_batch_and_the_next_is_whole(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Copied it is where one joins, and where one ends."""
    own = Settings(method="beam", width=3, top_k=12, max_new_tokens=6, seed=1)
    prompts = [f"What many prompts begin with, and number {i}" for i in range(6)]
    copy, left = KVBuffer.copy, [at]

    def interrupted(self: KVBuffer, *slots: int) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        copy(self, *slots)

    monkeypatch.setattr(KVBuffer, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(decoder.generate_many(prompts, own, batch=3))
    many = list(decoder.generate_many(prompts, own, batch=3))
    assert left[0] < 0
    assert [told(one) for one in many] == [told(decoder.generate(prompt, own)) for prompt in prompts]


@pytest.mark.parametrize("way", [0, 1, 2, 4, 9])
def test_counts_and_caches_are_those_of_the_prompt_alone(decoder: Decoder, way: int) -> None:
    settings = [dataclasses.replace(settings_of(way), seed=i, forest="full") for i in range(5)]
    prompts = [f"some prompt {'y' * i}" for i in range(5)]
    for prompt, own, got in zip(
        prompts, settings, decoder.generate_many(prompts, settings, batch=4), strict=True
    ):
        alone = decoder.generate(prompt, own)
        for name in (
            "new_tokens",
            "layers",
            "target_calls",
            "draft_calls",
            "drafts_accepted",
            "kv_slots_peak",
        ):
            assert getattr(got.stats, name) == getattr(alone.stats, name), name
        assert got.stats.energy_j is None


def test_how_things_stand_is_told_from_the_first_round_on(decoder: Decoder) -> None:
    loads: list[Load] = []
    settings = Settings(seed=1, max_new_tokens=12)
    asked = [(f"prompt {i}", settings) for i in range(5)]
    with Batch(decoder, 3) as batch:
        for _ in batch.answers(asked, lambda load: loads.append(load())):
            pass
    assert (loads[0].running, loads[0].reading, loads[0].tokens) == (3, 3, 0)
    assert max(load.running for load in loads) == 3
    # One by one they begin, and every one of them goes on to be counted.
    first = [load.tokens for load in loads if load.running == 3][:6]
    assert first == sorted(first)
    assert any(load.reading == 0 and load.tokens >= 3 for load in loads)
    assert loads[-1].reading == 0


def test_what_memory_has_no_room_for_waits_and_what_it_never_has_is_refused(decoder: Decoder) -> None:
    lines: list[str] = []
    own = Settings(max_new_tokens=20, width=2, gamma=2, draft_width=2, seed=0)
    prompts = ["a", "b" * 30, "c", "d" * 100, "e"]
    with Batch(decoder, 4, slots=150, tell=lines.append) as batch:
        answers = list(in_order(batch.answers((prompt, own) for prompt in prompts)))
    assert [answer.index for answer in answers] == [0, 1, 2, 3, 4]
    for answer, prompt in zip(answers, prompts, strict=True):
        if len(prompt) == 100:
            assert answer.error is not None
            assert "--max-new-tokens" in str(answer.error)
        else:
            assert answer.result is not None
            assert told(answer.result) == told(decoder.generate(prompt, own))
    assert len(lines) == 1
    assert "wait" in lines[0]


def test_a_prompt_that_waits_for_memory_is_made_a_member_once_and_is_timed_from_when_it_is_let_in(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, enter = Member.__init__, Member.enter
    made: list[int] = []
    tries: list[int] = []

    def counted(self: Member, index: int, *given: Any) -> None:
        made.append(index)
        began(self, index, *given)

    def timed(self: Member, shared: SharedModel) -> bool:
        tries.append(self.index)
        before = time.perf_counter()
        found = enter(self, shared)
        assert before <= self._began
        return found

    monkeypatch.setattr(Member, "__init__", counted)
    monkeypatch.setattr(Member, "enter", timed)
    own = Settings(max_new_tokens=20, width=2, gamma=2, draft_width=2, seed=0)
    with Batch(decoder, 4, slots=150) as batch:
        answers = list(batch.answers((prompt, own) for prompt in "abcdef"))
    assert all(answer.result is not None for answer in answers)
    assert sorted(made) == sorted(set(tries)) == list(range(6))
    assert len(tries) > 6


def test_what_is_kept_of_prompts_that_ended_counts_as_free(decoder: Decoder) -> None:
    own = Settings(max_new_tokens=4, width=2, gamma=2, draft_width=2, seed=0)
    with Batch(decoder, 2, slots=400) as batch:
        for number, _ in enumerate(
            batch.answers((f"a prompt of some length, number {i}", own) for i in range(6))
        ):
            shared = batch._buffers.target
            assert shared is not None
            assert shared.free == shared.regions.free + shared.prefixes.slots
            assert (shared.prefixes.slots > 0) or number == 0
        assert shared is not None
        assert shared.free == shared.regions.capacity <= 400


@pytest.mark.parametrize("device", [False, True])
def test_a_dynamic_width_at_the_end_of_a_context_is_that_of_the_prompt_alone(
    tmp_path: Path, device: bool
) -> None:
    """There an iteration cannot be launched ahead; what it may propose from must not depend on the others."""
    draft = builders.rand(tmp_path / "t", max_position_embeddings=64, initializer_range=0.3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # a draft that mostly agrees: iterations end with most beams in the forest
        for weight in draft.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=generator)
    builders.tok(tmp_path / "d")
    draft.save_pretrained(tmp_path / "d")
    one = Decoder.from_pair(tmp_path / "t", tmp_path / "d", dtype="float32")
    one = captured(one) if device else one
    prompts = [[2 + i % 50 for i in range(64 - left)] for left in (14, 17, 30, 12, 19)]
    own = Settings(
        threshold=0.9, forest="full", max_new_tokens=30, early_stopping="never", gamma=3, top_p=0.9, seed=0
    )
    for prompt, got in zip(prompts, one.generate_many(prompts, own, batch=3), strict=True):
        assert told(got) == told(one.generate(prompt, own))


@pytest.mark.parametrize("device", [False, True])
def test_leaving_in_the_middle_leaves_nothing_behind(decoder: Decoder, device: bool) -> None:
    one = captured(decoder) if device else decoder
    mixed = asked(30)
    with Batch(one, 5) as batch:
        answers = batch.answers(iter(mixed))
        for _ in range(7):
            next(answers)
        shared = batch._buffers
        assert batch.load().running
        batch.close()
        for model in (shared.target, shared.draft):
            assert model is not None
            assert model.free == model.regions.capacity
            assert len(model.stores.masks._free) == len(model.stores.masks.table) - 1


def test_a_prompt_that_cannot_be_served_stops_no_other(decoder: Decoder) -> None:
    prompts = ["fine", "q" * 500, "also fine"]
    own = Settings(max_new_tokens=5, seed=1)
    with Batch(decoder, 2) as batch:
        answers = list(in_order(batch.answers((prompt, own) for prompt in prompts)))
    assert [answer.error is None for answer in answers] == [True, False, True]
    many = decoder.generate_many(prompts, own, batch=2)
    assert next(many).text == decoder.generate("fine", own).text
    with pytest.raises(UserError, match="no room"):
        next(many)


def test_prompts_that_come_late_are_waited_for(decoder: Decoder) -> None:
    """A source may have none just now: those under way go on."""
    own = Settings(max_new_tokens=6, seed=1)
    seen: list[int] = []

    with Batch(decoder, 3) as batch:

        def source() -> Iterator[tuple[str, Settings] | None]:
            yield "first", own
            while batch.load().running:
                seen.append(batch.load().running)
                yield None
            yield "second", own

        answers = list(batch.answers(source()))
    assert [answer.index for answer in answers] == [0, 1]
    assert len(seen) > 3


def test_prompts_that_come_one_by_one_while_others_are_read_pile_nothing_up(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in every round, so that reading never ends before the last has come."""
    run, depths = SharedModel._run, []

    def noted(self: SharedModel, plans: Any, spans: Any, slots: Any, mask: Any, head: Any) -> Any:
        if isinstance(head, int):  # a prompt
            depths.append(len(inspect.stack(0)))
        return run(self, plans, spans, slots, mask, head)

    own = Settings(method="beam", max_new_tokens=1, seed=1)
    asked = [one for i in range(12) for one in ((f"{i} prompt", own), None)]
    with Batch(decoder, 20) as batch:
        answers = batch.answers([("first", own), None, None, None, *asked])
        next(answers)
        monkeypatch.setattr(SharedModel, "_run", noted)
        monkeypatch.setattr("dsbd_cli.decoding.model.shared._CHUNK", 4)  # each is read in several forwards
        assert len(list(answers)) == 12
    assert len(depths) >= 24
    assert len(set(depths)) == 1


@pytest.mark.parametrize("device", [False, True])
def test_prompts_that_come_one_a_round_begin_when_they_are_read(decoder: Decoder, device: bool) -> None:
    """Not when all are that have come meanwhile."""
    own = [Settings(max_new_tokens=20, seed=i, method="beam") for i in range(12)]
    generated: list[int] = []

    with Batch(captured(decoder) if device else decoder, 12) as batch:

        def source() -> Iterator[tuple[str, Settings] | None]:
            for i, one in enumerate(own):
                generated.append(batch.load().tokens)
                yield f"prompt {i}", one
                yield None

        answers = sorted(batch.answers(source()), key=lambda answer: answer.index)
    assert generated[6] > 0
    for i, (one, answer) in enumerate(zip(own, answers, strict=True)):
        assert told(answer.result) == told(decoder.generate(f"prompt {i}", one))


def test_two_batches_and_a_prompt_between_them_do_not_touch_each_other(decoder: Decoder) -> None:
    mixed = asked(12)
    prompts, settings = zip(*mixed, strict=True)
    wanted = [told(decoder.generate(*one)) for one in mixed]
    first = decoder.generate_many(prompts, settings, batch=3)
    second = decoder.generate_many(prompts, settings, batch=2)
    for number in range(12):
        assert told(next(first)) == wanted[number]
        assert told(decoder.generate(*mixed[number])) == wanted[number]
        assert told(next(second)) == wanted[number]


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gemma2"])
def test_models_without_a_forward_of_ours_share_too(kind: str, tmp_path: Path) -> None:
    from tests.decoding.real import tiny

    model = tiny(kind if kind != "gemma2" else "qwen2", builders.VOCAB, 3)
    builders.tok(tmp_path / "t")
    model.save_pretrained(tmp_path / "t")
    decoder = Decoder.from_pair(tmp_path / "t", dtype="float32")
    own = [Settings(method="beam", width=3, max_new_tokens=8, seed=i, top_k=9) for i in range(4)]
    prompts = ["ab", "abcdefg", "a", "hello you"]
    for prompt, one, got in zip(prompts, own, decoder.generate_many(prompts, own, batch=3), strict=True):
        assert told(got) == told(decoder.generate(prompt, one))


def test_threads_share_a_decoder(tmp_path: Path) -> None:
    """On the forwards in C, which work without Python's lock: batches beside each other, and single prompts."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.2}  # heads of 16
    for name, seed in (("t", 0), ("d", 1)):
        builders.rand(tmp_path / name, seed=seed, **sizes)
    one = Decoder.from_pair(tmp_path / "t", tmp_path / "d", dtype="float32")
    own = [Settings(seed=i, max_new_tokens=12, top_k=0, top_p=1.0, prices="off") for i in range(6)]
    prompts = [f"prompt {i} {'xyz' * i}" for i in range(6)]
    wanted = [told(one.generate(*pair)) for pair in zip(prompts, own, strict=True)]

    def many() -> Any:
        return [told(result) for result in one.generate_many(prompts, own, batch=3)]

    def singly() -> Any:
        return [told(one.generate(*pair)) for pair in zip(prompts, own, strict=True)]

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(work) for work in (many, singly, many, singly, many, many)]
        assert [work.result(timeout=60) for work in running] == [wanted] * 6


def test_a_run_that_lost_its_caches_says_so(decoder: Decoder) -> None:
    own = Settings(seed=1, max_new_tokens=12, top_k=0, top_p=1.0)
    wanted = told(decoder.generate("one", own))
    left = decoder.stream("two", own)
    next(left)
    assert told(decoder.generate("one", own)) == wanted
    with pytest.raises(UserError, match="another prompt was begun"):
        list(left)
    assert told(decoder.generate("one", own)) == wanted


def test_prompts_and_settings_have_to_match(decoder: Decoder) -> None:
    own = Settings(seed=1, max_new_tokens=3)
    for prompts, settings, said in ((["a", "b", "c"], [own, own], "more prompts"), (["a"], [own] * 2, "more settings"),
                                    (["a"], [], "more prompts"), ("abc", own, "one text")):  # fmt: skip
        done: list[Any] = []
        with pytest.raises(UserError, match=said):
            done.extend(decoder.generate_many(prompts, settings))
        assert len(done) == (0 if said == "one text" else min(len(prompts), len(settings)))
    for batch in (0, -1, 1.5, True):
        with pytest.raises(UserError, match="batch must be"):
            next(decoder.generate_many(["a"], own, batch=batch))  # type: ignore[arg-type]
    assert len(list(decoder.generate_many(["a", "b"], iter([own] * 3)))) == 2  # type: ignore[arg-type]


def test_a_mapping_changes_the_decoders_settings_and_settings_take_their_place(decoder: Decoder) -> None:
    """`Settings(seed=1)` drops whatever the preset says, and somebody meant a seed."""
    own = Decoder(decoder.pair, dataclasses.replace(decoder.settings, width=3, max_new_tokens=5))
    result = own.generate("one", {"seed": 7})
    assert (result.settings.width, result.settings.max_new_tokens, result.seed) == (3, 5, 7)
    assert own.generate("one", Settings(seed=7, max_new_tokens=2)).settings.width == Settings().width
    (*_, finished) = own.stream("one", {"max_new_tokens": 2, "seed": 7})
    assert finished.result.settings == dataclasses.replace(own.settings, max_new_tokens=2, seed=7)
    for given in ({"seed": 7}, [{"seed": 7}, dataclasses.replace(own.settings, seed=7)]):
        assert [one.settings.width for one in own.generate_many(["one", "two"], given)] == [3, 3]
        assert [one.seed for one in own.generate_many(["one", "two"], given)] == [7, 7]
    with pytest.raises(UserError, match="unknown setting 'witdh'"):
        own.generate("one", {"witdh": 2})
    for call in (own.generate, lambda *given: list(own.generate_many(*given))):
        with pytest.raises(UserError, match="a mapping of names to values, or Settings, not int"):
            call(["one"] if call is not own.generate else "one", 3)


def prices_of(tmp_path: Path, draft_ms: float) -> str:
    """A file of prices with drafted layers that cost so much beside a target call of 1."""
    curve = {"nodes": [1, 64], "ms": [1.0, 1.2]}
    draft = {"nodes": [1, 64], "ms": [draft_ms, draft_ms]}
    path = tmp_path / f"{draft_ms}.json"
    path.write_text(
        json.dumps({"format": 1, "target": curve, "draft": draft, "layer_ms": 0.0, "origin": "a test"})
    )
    return str(path)


@pytest.mark.parametrize("draft_ms", [0.01, 0.3, 0.6, 5.0])
def test_forests_that_follow_prices_are_those_of_the_prompt_alone(
    decoder: Decoder, tmp_path: Path, draft_ms: float
) -> None:
    """Where the text depends on the forest it must not depend on who shares it, nor on when the draft reads."""
    ways: list[dict[str, Any]] = [
        {"verify": "paper"},
        {"verify": "continue"},
        {"threshold": 0.9, "min_width": 2},
    ]
    prompts = [f"prompt {i} {'xyz' * i}" for i in range(6)]
    settings = [
        Settings(
            max_new_tokens=24,
            seed=i,
            top_k=12,
            top_p=0.95,
            prices=prices_of(tmp_path, draft_ms),
            **ways[i % 3],
        )
        for i in range(6)
    ]
    alone = [decoder.generate(*one) for one in zip(prompts, settings, strict=True)]
    many = list(decoder.generate_many(prompts, settings, batch=4))
    assert [told(one) for one in many] == [told(one) for one in alone]
    assert [one.stats.draft_calls for one in many] == [one.stats.draft_calls for one in alone]


@pytest.mark.parametrize("way", [{"deterministic": True}, {"draws": "distinct", "top_k": 12}, {"top_k": 12}])
@pytest.mark.parametrize("width", [1, 2])
def test_forests_without_a_draft_keep_to_what_a_batch_reserves(
    decoder: Decoder, tmp_path: Path, way: dict[str, Any], width: int
) -> None:
    """Narrow forests are the hard case: a layer of distinct beams may want more nodes than W_S."""
    prompts = ["abcabdacbadbcdcab" * 2, "aabbcc" * 5, "ab" * 12]
    both = {"width": width, "max_new_tokens": 20, "seed": 0, "threshold": None} | way
    if not way.get("deterministic"):
        both["temperature"] = 0.5
    own = Settings(draft_width=width, gamma=4, prices=prices_of(tmp_path, 50.0), **both)
    plain = [told(decoder.generate(prompt, Settings(method="beam", **both))) for prompt in prompts]
    many = list(decoder.generate_many(prompts, own, batch=3))
    assert [told(one) for one in many] == plain
    assert all("without the draft" in one.stats.paths["forests"] for one in many)
    for prompt, one in zip(prompts, many, strict=True):
        plan = decoder.plan(prompt, own)
        assert one.stats.kv_slots_peak <= most_nodes(own, len(plan.ids), plan.budget)


@pytest.mark.parametrize(("draft_ms", "read"), [(50.0, 0), (0.01, 4)])
def test_a_draft_that_is_not_asked_reads_no_prompt(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft_ms: float, read: int
) -> None:
    done: list[tuple[SharedModel, int]] = []
    prefill = SharedModel.prefill

    def noted(self: SharedModel, requests: Any) -> Iterator[None]:
        done.append(
            (self, sum(len(one.ids) > 1 for one in requests))
        )  # (one token shows the buffers their shape)
        return prefill(self, requests)

    monkeypatch.setattr(SharedModel, "prefill", noted)
    settings = Settings(max_new_tokens=6, seed=1, prices=prices_of(tmp_path, draft_ms))
    many = list(decoder.generate_many(["aa", "bb", "cc", "dd"], settings, batch=4))
    assert sum(count for model, count in done if model.model is decoder.draft) == read
    assert (sum(one.stats.draft_calls for one in many) > 0) is (read > 0)
