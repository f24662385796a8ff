"""Settings that change nothing: named where they were given in vain, and really without effect."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import UserError
from dsbd_cli.idle import OF_METHOD, idle, in_vain
from dsbd_cli.loading import PairSpec, load_pair
from dsbd_cli.settings import FIELDS, METHODS, Settings
from tests import builders

# Another value of every setting that some combination does not read.
OTHER: dict[str, Any] = {
    "width": 3, "draft_width": 3, "gamma": 2, "verify": "continue", "draws": "distinct", "threshold": 0.5,
    "width_rule": "paper", "min_width": 1, "forest": "full", "forest_nodes": 3, "lookup": 2, "prices": "off",
    "kv": "one", "early_stopping": "never", "top_k": 3, "top_p": 0.5, "tree": (3, 1), "tree_rule": "rsd",
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in METHODS},
    "beam, a threshold": {"method": "beam", "threshold": 0.9},
    "nothing drafted": {"gamma": 0},
    "greedy": {"temperature": 0.0},
    "a chain for a tree": {"method": "specinfer", "tree": (1, 1)},
    "full": {"forest": "full", "verify": "paper"},
    "without draws": {"deterministic": True, "top_p": 0.8},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = tmp_path_factory.mktemp("idle")
    for name, seed in (("t", 0), ("d", 1)):
        builders.rand(base / name, seed=seed)
    return Decoder(load_pair(PairSpec(str(base / "t"), str(base / "d"))))


@pytest.mark.parametrize("name", BASES)
def test_what_is_idle_changes_no_answer(decoder: Decoder, name: str) -> None:
    base = Settings(
        **{"max_new_tokens": 6, "seed": 3, "width": 4, "top_p": 1.0, "prices": "off"} | BASES[name]
    )
    why = idle(base)
    assert set(why) <= set(OTHER) | {"deterministic"}
    said = decoder.generate("hi", base, energy=False)
    tried = 0
    for setting in why:
        if setting == "deterministic" or (setting == "width" and base.num_return > OTHER["width"]):
            continue
        try:
            other = dataclasses.replace(base, **{setting: OTHER[setting]})
        except UserError:  # refused, which is no silence
            continue
        if setting not in idle(other):
            continue
        tried += 1
        got = decoder.generate("hi", other, energy=False)
        assert (got.token_ids, got.beams) == (said.token_ids, said.beams), setting
        if setting not in ("width", "draws", "threshold") or base.temperature > 0:  # draws of one sequence
            assert got.stats.widths == said.stats.widths, setting
    assert tried > (1 if name != "without draws" else 0)


@pytest.mark.parametrize(
    ("settings", "given", "lines"),
    [
        ({}, {"min_width": 1}, ["min-width has no effect without a threshold"]),
        ({"threshold": 0.9}, {"min_width": 1}, []),
        ({}, {"min_width": 1, "width_rule": "paper"}, ["min-width, width-rule have no effect without a threshold"]),
        ({"method": "multinomial"}, {"kv": "one"}, ["kv has no effect with method multinomial"]),
        ({"method": "speculative"}, {"kv": "one", "gamma": 2}, ["kv has no effect with method speculative"]),
        ({"method": "beam"}, {"gamma": 2, "seed": 1}, ["gamma has no effect with method beam"]),
        ({"method": "beam"}, {"gamma": 0, "lookup": 0}, []),
        ({"method": "beam"}, {"threshold": 0.9},
         ["threshold has no effect with method beam but beside draws distinct or width-rule distinct"]),
        ({"method": "beam"}, {"threshold": 0.9, "draws": "distinct"}, []),
        ({"method": "beam"}, {"threshold": None}, []),
        ({"gamma": 0}, {"draft_width": 3}, ["draft-width has no effect with gamma 0"]),
        ({"forest": "full"}, {"prices": "off"}, ["prices has no effect with forest full"]),
        ({}, {"tree_rule": "rsd"}, ["tree-rule has no effect with method dsbd"]),
        ({"method": "specinfer"}, {"tree_rule": "rsd"}, []),
        ({"method": "specinfer"}, {"tree_rule": "rsd", "tree": (1, 1)},
         ["tree-rule has no effect with one draw a node"]),
        ({"temperature": 0.0}, {"top_k": 5, "top_p": 1.0}, ["top-k has no effect with temperature 0"]),
        ({"temperature": 0.0}, {"width": 8, "draws": "distinct"}, ["width, draws have no effect with temperature 0"]),
        ({"temperature": 0.0, "method": "beam"}, {"width": 8}, ["width has no effect with temperature 0"]),
        ({"temperature": 0.0, "method": "multinomial"}, {"width": 8},
         ["width has no effect with method multinomial"]),
        ({"deterministic": True}, {"width": 8}, []),
        ({"method": "multinomial"}, {"early_stopping": "never"},
         ["early-stopping has no effect with method multinomial"]),
        ({}, {"width": 3, "gamma": 2, "kv": "one", "top_k": 5}, []),
    ],
)  # fmt: skip
def test_what_was_given_in_vain_is_said(
    settings: dict[str, Any], given: dict[str, Any], lines: list[str]
) -> None:
    assert in_vain(Settings(**settings).merged(given), given) == lines


def test_every_setting_of_some_method_is_a_setting() -> None:
    assert {name for names in OF_METHOD.values() for name in names} <= set(FIELDS)
    assert set(OF_METHOD) == set(METHODS)


def test_a_width_below_the_default_of_an_unread_min_width() -> None:
    assert dataclasses.replace(Settings(), width=1).min_width == 1
    with pytest.raises(UserError, match="min-width 2 is above width 1"):
        dataclasses.replace(Settings(threshold=0.9), width=1)
    with pytest.raises(UserError, match="min-width 3 is above width 2"):
        Settings().merged({"width": 2, "min_width": 3})
