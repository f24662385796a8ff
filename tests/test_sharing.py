"""Places of iterations follow the requests under way, and whoever moves says what it says alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli import Decoder, Settings
from dsbd_cli.decoding import Seat, SharedModel
from dsbd_cli.many import Batch
from dsbd_cli.prices import Curve, Prices
from dsbd_cli.prices.host import HostPrices
from dsbd_cli.sharing import Buffers, Iterations
from tests import builders
from tests.test_many import captured, told

# More than 64 nodes cost in proportion: forests for few requests only.
TARGET, DRAFT = Curve((1, 64, 128, 4096), (1.0, 1.2, 2.4, 76.8)), Curve((1, 1024), (0.01, 0.02))


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Run as a GPU would run it, with a draft that often agrees."""
    for name in "td":
        builders.rand(tmp_path / name, max_position_embeddings=256, initializer_range=0.2)
    decoder = captured(Decoder.from_pair(tmp_path / "t", tmp_path / "d", dtype="float32"))
    monkeypatch.setattr(decoder.prices, "captured", lambda *_: Prices(TARGET, DRAFT))
    monkeypatch.setattr(decoder.prices, "host", lambda *_: HostPrices(0.001, 0.0, 0.001, 0.0))
    return decoder


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Places that requests left and went to, and whether they go on with a forest."""
    found: list[tuple[int, int, bool]] = []
    real = Seat.move

    def move(self: Seat, pipeline: Any, draft: Any) -> None:
        places = [one._iteration.layout.requests for one in (self.pipeline, pipeline)]
        had = self._lane is not None and self.pipeline.has(self._lane)
        real(self, pipeline, draft)
        assert (self._lane is not None) is had
        found.append((places[0], places[1], draft is not None))

    monkeypatch.setattr(Seat, "move", move)
    return found


def places(steps: list[tuple[int, bool, bool]], size: int) -> list[int]:
    iterations, found = Iterations(None, Buffers(size, None), print), []  # type: ignore[arg-type]
    for running, more, over in steps:
        iterations.follow(running, more=more, over=over)
        found.append(iterations.places)
    return found


@pytest.mark.parametrize("size", [1, 2, 6, 64])
def test_there_is_a_place_for_everyone_and_at_a_files_end_for_few_more(size: int) -> None:
    down = places([(running, False, True) for running in range(size, 0, -1)], size)
    for running, found in zip(range(size, 0, -1), down, strict=True):
        assert running <= found <= size
        assert found < 2 * running + 1
    assert down == sorted(down, reverse=True)
    assert places([(1, True, False)], size) == [size]


def test_where_prompts_come_and_go_places_are_not_given_up_for_one_that_left() -> None:
    steps = [(8, False, False), (7, False, False), (4, False, False), (3, False, False), (2, False, False),
             (3, False, False), (9, False, False), (3, True, False)]  # fmt: skip
    assert places(steps, 16) == [8, 8, 8, 8, 2, 4, 16, 16]


@pytest.mark.parametrize("way", [
    {}, {"method": "beam"}, {"deterministic": True}, {"stop": ("e",)}, {"num_return": 3}, {"draws": "distinct"},
])  # fmt: skip
def test_at_the_end_of_a_file_few_requests_share_small_iterations_with_forests(
    decoder: Decoder, moved: list[tuple[int, int, bool]], way: dict[str, Any]
) -> None:
    drawn = {} if way.get("deterministic") else {"top_k": 12, "temperature": 0.2}
    own = [
        Settings(
            seed=i, max_new_tokens=6 + 9 * (i % 7), threshold=None, early_stopping="never", **drawn, **way
        )
        for i in range(20)
    ]
    prompts = [f"prompt {i} {'xyz' * (i % 5)}" for i in range(20)]
    with Batch(decoder, 16) as batch:
        answers = sorted(batch.answers(zip(prompts, own, strict=True)), key=lambda answer: answer.index)
        shared = batch._buffers
    many = [answer.result for answer in answers if answer.result is not None]
    for prompt, one, got in zip(prompts, own, many, strict=True):
        assert told(got) == told(decoder.generate(prompt, one))
    assert {before for before, _, _ in moved} >= {16, 8, 4}
    assert all(after < before for before, after, _ in moved)
    drafting = [forest for _, _, forest in moved]
    assert many[0].stats.draft_calls == 0
    # The draft joins in where few are left, and has read the answers so far.
    assert any(drafting) is (way.get("method") != "beam")
    if any(drafting):
        assert max(one.stats.layers - one.stats.target_calls for one in many) > 2
    for model in (shared.target, shared.draft):
        assert model is None or model.free == model.regions.capacity
        assert model is None or len(model.stores.masks._free) == len(model.stores.masks.table) - 1


def test_prompts_that_come_one_by_one_get_large_forests_and_room_when_more_come(
    decoder: Decoder, moved: list[tuple[int, int, bool]]
) -> None:
    own = Settings(seed=1, max_new_tokens=24, threshold=None, top_k=12, early_stopping="never")
    prompts = [f"prompt {i}" for i in range(14)]
    with Batch(decoder, 16) as batch:

        def source() -> Iterator[tuple[str, Settings] | None]:
            yield prompts[0], own
            for _ in range(4):
                yield None
            yield from ((prompt, own) for prompt in prompts[1:])
            while batch.load().running:
                yield None

        answers = sorted(batch.answers(source()), key=lambda answer: answer.index)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.result is not None
        assert told(answer.result) == told(decoder.generate(prompt, own))
    assert (1, 16, False) in moved
    assert answers[0].result.stats.draft_calls > 0  # type: ignore[union-attr]


def test_a_forest_of_another_load_is_another_iteration(decoder: Decoder) -> None:
    """The end of a file keeps to the forest of many; prompts that come one at a time get the one of few."""
    own = Settings(seed=1, max_new_tokens=20, threshold=None, top_k=12, early_stopping="never", gamma=4)
    with Batch(decoder, 32) as batch:
        list(batch.answers((f"prompt {i}", own) for i in range(8)))
        ended = {one.forest_shape for one in batch._buffers.pipelines.values() if one is not None}
        assert len(ended) == 1

        def source() -> Iterator[tuple[str, Settings] | None]:
            yield "alone", own
            while batch.load().running:
                yield None

        list(batch.answers(source()))
        found = {one.forest_shape for one in batch._buffers.pipelines.values() if one is not None}
        assert len(found) == 2
        assert max(width * gamma for width, gamma in found - ended) > max(w * gamma for w, gamma in ended)


def test_where_memory_has_no_room_for_a_late_draft_its_request_goes_on_without(
    decoder: Decoder, moved: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SharedModel.admit
    asked = [0]

    def admit(self: SharedModel, ids: Any, *rest: Any) -> Any:
        if self.model is decoder.draft and len(ids) > 1:
            asked[0] += 1
            return None
        return real(self, ids, *rest)

    monkeypatch.setattr(SharedModel, "admit", admit)
    own = [
        Settings(seed=i, max_new_tokens=5 + 2 * i, threshold=None, early_stopping="never") for i in range(16)
    ]
    prompts = [f"prompt {i}" for i in range(16)]
    many = list(decoder.generate_many(prompts, own, batch=16))
    assert asked[0]
    assert moved
    assert not any(forest for _, _, forest in moved)
    for prompt, one, got in zip(prompts, own, many, strict=True):
        assert got.stats.draft_calls == 0
        assert told(got) == told(decoder.generate(prompt, one))


def test_prompts_that_come_in_together_after_waiting_for_memory_are_many(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that needs all memory goes first; for those behind it no forest pays, so no draft need read them."""
    real, read = SharedModel.admit, [0]

    def admit(self: SharedModel, ids: Any, *rest: Any) -> Any:
        read[0] += self.model is decoder.draft and len(ids) > 1
        return real(self, ids, *rest)

    monkeypatch.setattr(SharedModel, "admit", admit)
    large, small = (
        Settings(
            seed=1, max_new_tokens=count, threshold=None, early_stopping="never", width=8, draft_width=16
        )
        for count in (175, 4)
    )
    asked = [("first", large), *((f"prompt {i}", small) for i in range(7))]
    found: list[tuple[int, int]] = []
    with Batch(decoder, 8, slots=1600) as batch:
        for _ in batch.answers(asked, lambda load: found.append((load().running, read[0]))):
            pass
    alone = max(drafts for running, drafts in found if running == 1)
    together = min(drafts for running, drafts in found if running == 7)
    assert found[0][0] == 1
    assert together - alone < 4


def test_whose_text_depends_on_where_iterations_end_stays_where_it_is(
    decoder: Decoder, moved: list[tuple[int, int, bool]]
) -> None:
    ways: list[dict[str, Any]] = [
        {"verify": "paper"},
        {"verify": "continue"},
        {"threshold": 0.9},
        {"kv": "one"},
    ]
    own = [
        Settings(seed=i, max_new_tokens=8 + 7 * i, top_k=12, forest="full", **way)
        for i, way in enumerate(ways * 2)
    ]
    prompts = [f"prompt {i}" for i in range(8)]
    many = list(decoder.generate_many(prompts, own, batch=8))
    for prompt, one, got in zip(prompts, own, many, strict=True):
        assert told(got) == told(decoder.generate(prompt, one))
    assert not moved


def test_iterations_that_nobody_is_in_are_let_go_of(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsbd_cli.sharing._MOST_PIPELINES", 3)
    own = [Settings(seed=i, max_new_tokens=4 + 3 * i, threshold=None, width=1 + i % 4) for i in range(12)]
    prompts = [f"prompt {i}" for i in range(12)]
    with Batch(decoder, 6) as batch:
        answers = sorted(batch.answers(zip(prompts, own, strict=True)), key=lambda answer: answer.index)
        assert len(batch._buffers.pipelines) == 3
    for prompt, one, answer in zip(prompts, own, answers, strict=True):
        assert told(answer.result) == told(decoder.generate(prompt, one))


def test_what_is_measured_once_a_machine_is_told_before(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_: list[str] = []

    def captured_prices(_: Settings, measure: Any) -> Prices:
        assert not told_
        found: Prices = measure()
        assert "once" in told_[-1]
        return found

    monkeypatch.setattr(decoder.prices, "captured", captured_prices)
    monkeypatch.setattr("dsbd_cli.sharing.measure_captured", lambda *_: Prices(TARGET, DRAFT))
    with Batch(decoder, 2, tell=told_.append) as batch:
        list(batch.answers([("hello", Settings(max_new_tokens=3, threshold=None))]))
    assert len(told_) == 1


@pytest.mark.parametrize("way", [{"deterministic": True}, {"draws": "distinct"}])
def test_a_layer_narrower_than_its_distinct_beams_is_not_drafted(
    decoder: Decoder, way: dict[str, Any]
) -> None:
    """None of them would ever be passed."""
    own = Settings(width=4, draft_width=8, gamma=4, threshold=None, **way)
    with Batch(decoder, 4) as batch:
        list(batch.answers([("hello", own)]))
        iterations, (kind, *_) = batch._iterations, next(iter(batch._buffers.fitting))
        for requests in (1, 2, 4, 8, 16, 32, 64):
            found = iterations._fit(kind, own, requests)
            assert found.gamma == 0 or found.draft_width >= 4


def test_a_draft_whose_context_is_full_is_not_asked_late(
    tmp_path: Path, decoder: Decoder, moved: list[tuple[int, int, bool]]
) -> None:
    builders.rand(tmp_path / "small", max_position_embeddings=40, initializer_range=0.2)
    pair = Decoder.from_pair(tmp_path / "t", tmp_path / "small", dtype="float32")
    other = captured(pair)
    other.prices.captured, other.prices.host = decoder.prices.captured, decoder.prices.host  # type: ignore[method-assign]
    own = [
        Settings(seed=i, max_new_tokens=4 + 4 * i, threshold=None, early_stopping="never") for i in range(16)
    ]
    prompts = [f"prompt {i}" for i in range(16)]
    many = list(other.generate_many(prompts, own, batch=16))
    for prompt, one, got in zip(prompts, own, many, strict=True):
        assert told(got) == told(other.generate(prompt, one))
    assert moved
    assert not any(forest for before, after, forest in moved if after <= 2)


def test_a_draft_that_can_never_be_asked_takes_no_memory_and_the_device_goes_on_without(
    tmp_path: Path, decoder: Decoder, moved: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind some prompts its context has room for an iteration, and not to the end; behind others for none."""
    builders.rand(tmp_path / "small", max_position_embeddings=40, initializer_range=0.2)
    other = captured(Decoder.from_pair(tmp_path / "t", tmp_path / "small", dtype="float32"))
    other.prices.captured, other.prices.host = decoder.prices.captured, decoder.prices.host  # type: ignore[method-assign]
    admit, compute, asked, by_host = SharedModel.admit, SharedModel.compute, [0], [0]

    def admitted(self: SharedModel, ids: Any, *rest: Any) -> Any:
        asked[0] += self.model is other.draft and len(ids) > 1
        return admit(self, ids, *rest)

    def computed(self: SharedModel, needs: Any) -> None:
        if self.model is other.target:
            by_host[0] += sum(any(not need.model.has_logits(node) for node in need.nodes) for need in needs)
        compute(self, needs)

    monkeypatch.setattr(SharedModel, "admit", admitted)
    monkeypatch.setattr(SharedModel, "compute", computed)
    own = Settings(seed=1, max_new_tokens=40, threshold=None, top_k=12, early_stopping="never", gamma=4)
    prompts = ["x" * 8, "x" * 38, "x" * 9]
    with Batch(other, 4) as batch:
        answers = sorted(batch.answers((prompt, own) for prompt in prompts), key=lambda answer: answer.index)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.result is not None
        assert told(answer.result) == told(other.generate(prompt, own))
        assert len(answer.notes) == 1
        assert "context is full" in answer.notes[0]
    assert asked[0] == 2
    assert answers[0].result.stats.draft_calls > 0  # type: ignore[union-attr]
    assert [forest for _, _, forest in moved] == [False, False]
    assert by_host[0] <= 2  # where an iteration ended past the context
