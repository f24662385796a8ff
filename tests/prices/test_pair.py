"""Prices of a loaded pair: measured once and kept, assumed, or a file; one seed gives one text with each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import Notice
from dsbd_cli.decoding.methods.proposers import ForestShape
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import UserError
from dsbd_cli.loading.ready import key
from dsbd_cli.prices import Curve, Prices, host, measure, store
from dsbd_cli.prices import pair as pair_module
from dsbd_cli.prices.pair import ONCE
from dsbd_cli.settings import Settings
from tests import builders

DEAR = Prices(Curve((1,), (1.0,)), Curve((1,), (9.0,)), 0.0, "by hand")
CHEAP = Prices(Curve((1,), (1.0,)), Curve((1,), (0.01,)), 0.0, "by hand")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("pair")
    for name, seed in (("target", 1), ("draft", 2)):
        builders.rand(base / name, seed=seed)
    return str(base / "target"), str(base / "draft")


@pytest.fixture
def decoder(folders: tuple[str, str]) -> Decoder:
    return Decoder.from_pair(*folders, device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prices are measured here, in a cache of the test's own; how often stands in the list."""
    monkeypatch.delenv("DSBD_PRICES", raising=False)
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    times: list[int] = []

    def counted(*models: Any) -> Prices:
        times.append(1)
        return measure.measure(*models, budget=0.01)

    monkeypatch.setattr(pair_module, "measure", counted)
    return times


def settings(**given: Any) -> Settings:
    return Settings(**({"max_new_tokens": 12, "seed": 3, "verify": "paper"} | given))


def notes(decoder: Decoder, given: Settings) -> list[str]:
    return [event.text for event in decoder.stream("hello", given) if isinstance(event, Notice)]


def test_they_are_measured_once_and_kept_for_the_next_start(
    folders: tuple[str, str], decoder: Decoder, measured: list[int]
) -> None:
    assert ONCE in notes(decoder, settings())
    assert ONCE not in notes(decoder, settings())
    again = Decoder.from_pair(*folders, device="cpu", dtype="float32")
    assert ONCE not in notes(again, settings())
    assert sum(measured) == 1
    assert again.prices.look_up(settings()).prices == decoder.prices.look_up(settings()).prices
    ((facts, prices),) = store.listed()
    assert {facts["target"]["device"], facts["target"]["dtype"]} == {"cpu", "float32"}
    assert prices.origin.startswith("measured ")


def test_where_nothing_can_be_kept_no_measuring_is_announced(
    folders: tuple[str, str],
    decoder: Decoder,
    measured: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "file" / "cache"))
    assert ONCE not in notes(decoder, settings())
    assert not measured


def test_what_was_measured_is_said_in_the_result(decoder: Decoder) -> None:
    prices = decoder.generate("hello", settings()).stats.paths["prices"]
    assert prices.startswith("measured ")
    assert "target" in prices
    assert "prices" not in decoder.generate("hello", settings(forest="full")).stats.paths


@pytest.mark.parametrize(
    "given",
    [{"forest": "full"}, {"method": "beam"}, {"method": "specinfer"}, {"gamma": 0}, {"prices": "off"}],
)
def test_nothing_is_measured_that_decides_nothing(given: Any, decoder: Decoder, measured: list[int]) -> None:
    assert ONCE not in notes(decoder, settings(**given))
    assert not measured


def test_one_seed_gives_one_text_from_the_first_start_on(folders: tuple[str, str], decoder: Decoder) -> None:
    for given in ({}, {"verify": "continue"}, {"verify": "cover", "threshold": 0.9}):
        first = decoder.generate("hello", settings(**given)).token_ids
        again = Decoder.from_pair(*folders, device="cpu", dtype="float32")
        assert again.generate("hello", settings(**given)).token_ids == first


def test_where_nothing_can_be_kept_prices_are_assumed(
    decoder: Decoder, measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "file"))
    assert decoder.generate("hello", settings()).stats.paths["prices"].startswith("assumed")
    assert not measured


@pytest.mark.parametrize("how", ["setting", "variable"])
def test_a_file_is_what_decides(
    how: str, decoder: Decoder, measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {}
    for name, prices in (("dear", DEAR), ("cheap", CHEAP)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(prices.to_dict()))
        given = settings(verify="cover", max_new_tokens=20)
        if how == "variable":
            monkeypatch.setenv("DSBD_PRICES", str(path))
        else:
            given = given.merged({"prices": str(path)})
        result = decoder.generate("hello", given)
        calls[name] = result.stats.draft_calls
        assert result.stats.paths["prices"].startswith("by hand")
    assert calls["dear"] == 0 < calls["cheap"]
    assert not measured


def test_a_file_that_holds_no_prices_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.json cannot be read"):
        decoder.generate("hello", settings(prices=str(tmp_path / "gone.json")))
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(Prices(Curve((1,), (1.0,))).to_dict()))
    with pytest.raises(UserError, match="without a draft"):
        decoder.generate("hello", settings(prices=str(alone)))
    with pytest.raises(UserError, match=r"auto, off, or a \.json file"):
        settings(prices="dear")


def test_other_threads_other_prices(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    facts = measure.facts_of(decoder.target, decoder.draft)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert store.path_of(measure.facts_of(decoder.target, decoder.draft)) != store.path_of(facts)
    assert store.path_of(measure.facts_of(decoder.draft, decoder.target)) != store.path_of(facts)


def test_prices_are_of_the_code_that_was_timed(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for code in ("one", "another"):
        monkeypatch.setattr(key, "code_sum", lambda code=code: code)
        found.append((measure.facts_of(decoder.target, decoder.draft), host.facts()))
    for one, other in zip(*found, strict=True):
        assert store.path_of(one) != store.path_of(other)
        assert one == other | {"code": "one"}


def test_measuring_leaves_nothing_behind_that_changes_an_answer(
    folders: tuple[str, str], decoder: Decoder
) -> None:
    plain = Decoder.from_pair(*folders, device="cpu", dtype="float32")
    decoder.prices.measured()
    for given in ({"forest": "full"}, {"method": "beam"}):
        assert decoder.generate("hello", settings(**given)).token_ids == (
            plain.generate("hello", settings(**given)).token_ids
        )


def test_a_draft_that_is_not_asked_does_not_read_the_prompt(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read when it is first asked or never, with the same text, also where a conversation goes on."""
    files = {}
    for name, prices in (("dear", DEAR), ("cheap", CHEAP)):
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(json.dumps(prices.to_dict()))
    ids = [5, 6, 7, 8, 9] * 8
    read: list[int] = []
    decoder.draft.require_tree()
    compute = decoder.draft._compute
    monkeypatch.setattr(
        decoder.draft, "_compute", lambda plan, *rest: (read.append(len(plan)), compute(plan, *rest))[1]
    )

    def say(prompt: list[int], name: str, reuse: bool) -> list[int]:
        read.clear()
        given = settings(verify="cover", prices=str(files[name]), max_new_tokens=8)
        events = list(decoder.stream(prompt, given, reuse=reuse))
        return events[-1].result.token_ids

    first = say(ids, "dear", False)
    assert not read
    assert say(ids, "cheap", False) == first
    assert sum(read[:1]) == len(ids)
    for turn, name in enumerate(("dear", "cheap", "dear", "dear", "cheap")):
        longer = ids + [9 - turn] * (turn + 1)
        kept = say(longer, name, True)
        assert (sum(read) == 0) == (name == "dear")
        assert say(longer, name, False) == kept


def test_a_prompt_read_late_is_the_prompt_read_at_once(decoder: Decoder) -> None:
    # (A draft may multiply in int8, whose rounding is its own affair.)
    model, ids, rows = decoder.target, [5, 6, 7, 8, 9, 10], []
    for before, later in (((), False), ((), True), (ids[:3], True), ([*ids, 4], True)):
        if before:
            model.prefill(before, Node(-1, None), reuse=False, later=len(before) < len(ids))
        root = Node(-1, None)
        node = Node(3, root)
        model.prefill(ids, root, reuse=bool(before), later=later)
        assert model.has_logits(root) == (not later)
        model.retain([node])  # a beam that nobody drafted below
        model.forward([node])
        rows.append(torch.stack([model.log_row(root), model.log_row(node)]))
        assert model.calls == 1
    assert all(torch.allclose(row, rows[0], atol=1e-5) for row in rows)


@pytest.mark.parametrize("prices", [DEAR, CHEAP])
@pytest.mark.parametrize("more", [{}, {"verify": "cover"}, {"method": "speculative"}])
def test_how_large_forests_are_is_made_up_once_a_prompt(
    decoder: Decoder, prices: Prices, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    begin = ForestShape.__init__

    def counted(self: ForestShape, *given: Any, **named: Any) -> None:
        made.append(self)
        begin(self, *given, **named)

    monkeypatch.setattr(ForestShape, "__init__", counted)
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(prices.to_dict()))
    result = decoder.generate("hello", settings(prices=str(path), **more))
    assert len(made) == 1
    assert (result.stats.draft_calls > 0) is (prices is CHEAP)
