"""Measuring and keeping prices: a simulated machine whose clock is its price list; files, races and damage."""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsbd_cli.decoding import Node
from dsbd_cli.errors import UserError
from dsbd_cli.prices import Curve, Prices, probe, store
from dsbd_cli.prices.measure import COUNTS, measure
from dsbd_cli.prices.probe import Probe
from tests import interrupting

SIMPLE = Prices(Curve((1, 16), (4.0, 5.0)), Curve((1,), (0.5,)), 0.1, "measured once")


class Machine:
    """A clock that moves only when something is computed."""

    def __init__(self, seed: int | None = None, often: float = 0.2) -> None:
        self.now, self._often, self._noise = 0.0, often, None if seed is None else random.Random(seed)

    def __call__(self) -> float:
        return self.now

    def spend(self, ms: float) -> None:
        # Other programs make a step slower, now and then by a lot; never quicker.
        if self._noise is not None:
            slow = 3 * self._noise.random() if self._noise.random() < self._often else 0
            ms *= 1 + self._noise.random() * 0.02 + slow
        self.now += ms / 1e3


class Model:
    """What measuring asks of a model, at a given price."""

    def __init__(
        self, machine: Machine, role: str, curve: Curve, joint: float, room: int | None = None
    ) -> None:
        self.role, self.vocab_size, self.max_positions = role, 100, room
        self.device = torch.device("cpu")
        self._machine, self._curve, self._joint = machine, curve, joint
        self.deepest, self.counts = 0, [0]

    def prefill(self, ids: Sequence[int], root: Node, *, top_n: int, reuse: bool) -> None:
        assert (top_n, reuse) == (10, False)
        self._prompt = len(ids)

    def forward(self, nodes: Iterable[Node]) -> None:
        nodes = list(nodes)
        self.deepest = max([self.deepest, *(self._prompt + node.depth for node in nodes)])
        self.counts.append(len(nodes))
        self._machine.spend(self._curve(len(nodes)))

    def joint(self, parents: Sequence[Node], scores: Sequence[float], processor: Any) -> Any:
        self._machine.spend(self._joint)
        return SimpleNamespace(prob=np.array([0.5, 0.5]))

    def retain(self, leaves: Iterable[Node]) -> None:
        assert len(list(leaves)) == 1


class Watched:
    """A window in which others took so much of the cores' time."""

    def __init__(self, share: float | None) -> None:
        self._share = share

    def share(self) -> float | None:
        return self._share


TARGET = Curve((1, 16, 64, 256), (20.0, 25.0, 60.0, 240.0))
DRAFT = Curve((1, 16, 256), (2.0, 3.0, 30.0))


def measured(
    machine: Machine, scale: float = 1.0, room: int | None = None, **given: Any
) -> tuple[Prices, list[Model]]:
    curves = [Curve(one.nodes, tuple(scale * ms for ms in one.ms)) for one in (TARGET, DRAFT)]
    models = [
        Model(machine, role, curve, 0.25, room)
        for role, curve in zip(("target", "draft"), curves, strict=True)
    ]
    given = {"window": lambda: Watched(0.0), **given}
    return measure(*models, clock=machine, **given), models  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_the_price_list_of_the_machine_is_found(seed: int | None) -> None:
    prices, _ = measured(Machine(seed), budget=20.0)
    assert prices.draft is not None
    assert prices.target.nodes == tuple(sorted(COUNTS))
    for count in COUNTS:
        assert prices.target(count) == pytest.approx(TARGET(count), rel=0.15)
        # A draft's layer has its joint inside, one for each eight nodes.
        assert prices.draft(count) == pytest.approx(DRAFT(count) + 0.25 * -(-count // 8), rel=0.15)
    assert prices.layer_ms == pytest.approx(0.25, rel=0.15)
    assert "busy" not in prices.origin


def test_a_busy_machine_is_said_to_be_one() -> None:
    found = measured(Machine(0, often=0.6), budget=20.0)[0]
    assert "on a busy machine" in found.origin
    assert "times of one forward differ" in found.busy
    assert Prices.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(("share", "busy"), [(None, False), (0.05, False), (0.61, True)])
def test_steady_work_of_others_is_marked_though_it_slows_all_times_alike(
    share: float | None, busy: bool
) -> None:
    found = measured(Machine(), budget=5.0, window=lambda: Watched(share))[0]
    assert (
        "on a busy machine (other processes took 61% of the cores' time; dsbd doctor --measure PRESET"
        in found.origin
    ) is busy
    assert found.busy == ("other processes took 61% of the cores' time" if busy else "")


@pytest.mark.parametrize(("share", "threads"), [(0.05, 2), (0.61, 2), (0.61, 1)])
def test_beside_others_forwards_are_timed_by_one_thread(
    monkeypatch: pytest.MonkeyPatch, share: float, threads: int
) -> None:
    """Two threads wait for each other, however long others have the core of one of them."""
    asked: list[int] = []
    run = Probe.run

    def noted(self: Probe, count: int) -> float:
        asked.append(torch.get_num_threads())
        return run(self, count) * (1 if asked[-1] == 1 else 7)

    monkeypatch.setattr(Probe, "run", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = measured(Machine(), budget=5.0, window=lambda: Watched(share))[0]
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert set(asked) == ({1, 2} if share > 0.5 and threads == 2 else {threads})
    assert asked == sorted(asked, reverse=True)
    assert found.target(1) == pytest.approx(TARGET(1) * (1 if asked[-1] == 1 else 7), rel=0.02)


def test_the_number_of_threads_comes_back_wherever_it_is_interrupted() -> None:
    before = torch.get_num_threads()

    def timed() -> None:
        with probe.one_thread():
            assert torch.get_num_threads() == 1

    torch.set_num_threads(2)
    try:
        timed()
        points = interrupting.points_of(timed)
        assert points
        for point in points:
            assert interrupting.interrupted(timed, point)
            gc.collect()  # a block that was never entered
            assert torch.get_num_threads() == 2, point
        with pytest.raises(ZeroDivisionError), probe.one_thread():
            _ = 1 // 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scale", [0.01, 1, 10, 100])
def test_time_is_bounded_by_the_budget_or_by_what_the_first_two_counts_take(scale: float) -> None:
    machine = Machine()
    prices, models = measured(machine, scale, budget=1.2)
    # Warm-up, then a round for what was warmed up, at least 1 and 16 nodes.
    least = scale * 1e-3 * sum(one(1) + 2 * (one(1) + one(16)) for one in (TARGET, DRAFT))
    dearest = scale * 1e-3 * sum(2 * one(max(prices.target.nodes)) for one in (TARGET, DRAFT))
    assert machine.now <= max(1.2 * 1.6 + dearest, 1.1 * least)
    assert {1, 16} <= set(prices.target.nodes)
    assert max(models[0].counts) == max(prices.target.nodes)
    assert (prices.target.nodes == (1, 16)) is (scale >= 10)


def test_a_short_context_is_not_left() -> None:
    for room in (4, 40, 200):
        prices, models = measured(Machine(), room=room, budget=5.0)
        assert all(model.deepest <= room for model in models)
        assert prices.target.nodes[0] == 1


def test_a_target_alone() -> None:
    machine = Machine()
    assert measure(Model(machine, "target", TARGET, 0.1), None, clock=machine).draft is None  # type: ignore[arg-type]


# What is on disk.


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never() -> Prices:
    raise AssertionError("measured in vain")


def test_prices_are_measured_once_for_the_same_facts() -> None:
    facts = {"machine": "toy", "threads": 2}
    assert store.kept_or_measured(facts, lambda: SIMPLE) == store.Kept(SIMPLE)
    assert store.kept_or_measured(facts, never).prices == SIMPLE
    other = Prices(Curve((1,), (9.0,)))
    assert store.kept_or_measured(facts | {"threads": 1}, lambda: other).prices == other
    assert store.kept_or_measured(facts, never).prices == SIMPLE
    assert store.kept_or_measured(facts, lambda: other, again=True).prices == other
    assert store.kept_or_measured(facts, never).prices == other
    assert [one for one, _ in store.listed()][-1]["machine"] == "toy"


def made(ms: float, busy: str = "") -> Prices:
    return Prices(Curve((1,), (ms,)), origin=f"measured at {ms:g}", busy=busy)


CALM, BUSY, BUSIER = made(1.0), made(2.0, "others took 61%"), made(3.0, "others took 90%")


@pytest.mark.parametrize(
    ("before", "now", "force", "kept", "words"),
    [
        (None, CALM, False, CALM, []),
        (None, BUSY, False, BUSY, ["machine was busy (others took 61%)", "may be off", "does it anew"]),
        (CALM, made(1.5), False, made(1.5), []),
        (CALM, BUSY, False, CALM, ["machine was busy (others took 61%)", "measured at 1 stay", "--force"]),
        (CALM, BUSY, True, BUSY, ["machine was busy (others took 61%)", "may be off"]),
        (BUSY, CALM, False, CALM, []),
        (BUSY, BUSIER, False, BUSIER, ["machine was busy (others took 90%)", "may be off"]),
    ],
)
@pytest.mark.parametrize("aside", [False, True])
def test_what_a_calm_moment_gave_is_not_given_up_for_what_a_busy_one_gives(
    before: Prices | None, now: Prices, force: bool, kept: Prices, words: list[str], aside: bool
) -> None:
    facts = {"machine": "toy"}
    if before is not None:
        store.kept_or_measured(facts, lambda: before)
    if aside and before is not None:
        store.set_aside(store.path_of(facts))
        assert store.kept(facts) is None
        assert not [*store.listed()]
    found = store.kept_or_measured(facts, lambda: now, again=not aside or before is None, force=force)
    assert found.prices == kept
    assert len(found.notes) == bool(words)
    assert all(word in found.notes[0] for word in words)
    assert store.kept_or_measured(facts, never) == store.Kept(kept)
    assert [one for _, one in store.listed()] == [kept]


def test_a_first_start_says_nothing_of_a_busy_machine() -> None:
    """Its numbers are all there are, and say it of themselves."""
    assert store.kept_or_measured({}, lambda: BUSY) == store.Kept(BUSY)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"prices": {}}', b"[" * 100_000])
def test_damaged_files_are_measured_anew_with_a_note(damage: bytes) -> None:
    facts = {"machine": "toy"}
    store.kept_or_measured(facts, never_mind)
    path = store.path_of(facts)
    path.write_bytes(damage)
    assert list(store.listed()) == []
    found = store.kept_or_measured(facts, lambda: SIMPLE)
    assert found.prices == SIMPLE
    assert [str(path) in note and "measured anew" in note for note in found.notes] == [True]
    assert store.kept_or_measured(facts, never) == store.Kept(SIMPLE)


def never_mind() -> Prices:
    return Prices(Curve((1,), (1.0,)))


def test_where_nothing_can_be_kept_nothing_is_measured(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert store.kept_or_measured({}, never).prices is None


def race(cache: str, number: int, gate: Any, answers: Any) -> None:
    """One of two programs that start together; each would measure something else."""
    import os

    os.environ["DSBD_CACHE"] = cache
    gate.wait()
    found = store.kept_or_measured({"machine": "toy"}, lambda: Prices(Curve((1,), (float(number),))))
    assert found.prices is not None
    answers.put(found.prices.target.ms[0])


def test_of_two_that_race_one_measures_and_both_use_it(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    gate, answers = context.Barrier(3), context.Queue()
    racers = [context.Process(target=race, args=(str(cache), number, gate, answers)) for number in (1, 2, 3)]
    for racer in racers:
        racer.start()
    said = {answers.get(timeout=60) for _ in racers}
    for racer in racers:
        racer.join()
    assert len(said) == 1
    assert store.kept_or_measured({"machine": "toy"}, never).prices == Prices(Curve((1,), tuple(said)))


def test_prices_that_a_user_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with pytest.raises(UserError, match=r"mine\.json cannot be read"):
        store.read_given(path)
    path.write_text("{}")
    with pytest.raises(UserError, match=r"mine\.json is damaged"):
        store.read_given(path)
    with pytest.raises(UserError, match="device or a pipe"):
        store.read_given(Path("/dev/zero"))
    for values in (SIMPLE.to_dict(), {"facts": {}, "prices": SIMPLE.to_dict()}):
        path.write_text(json.dumps(values))
        assert store.read_given(path) == SIMPLE
