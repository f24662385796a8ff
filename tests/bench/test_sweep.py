"""Sweeps and arms: which settings each method is tried with."""

from __future__ import annotations

import pytest

from dsbd_cli.bench.arms import build_arms
from dsbd_cli.bench.fronts import family
from dsbd_cli.bench.methods import SWEEPABLE, parse_methods
from dsbd_cli.bench.sweep import label_of, parse_sweep, points
from dsbd_cli.errors import UserError
from dsbd_cli.setting_text import parse_setting
from dsbd_cli.settings import FIELDS, Settings


def arms(methods, given=None, sweeps=(), base=None):
    grids = [parse_sweep(text) for text in sweeps]
    return build_arms(parse_methods(methods), base or Settings(), given or {}, grids)


def names(made):
    return [arm.name for arm in made[0]]


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("gamma=2,3,4", {"gamma": [2, 3, 4]}),
        ("draft_width=2..6", {"draft_width": [2, 3, 4, 5, 6]}),
        ("draft-width=2,4..5", {"draft_width": [2, 4, 5]}),
        ("threshold=none,0.9", {"threshold": [None, 0.9]}),
        ("verify=paper,cover", {"verify": ["paper", "cover"]}),
        ("tree=2x2x1,3", {"tree": [(2, 2, 1), (3,)]}),
        ("temperature=0,1.0", {"temperature": [0.0, 1.0]}),
        ("deterministic=true,false", {"deterministic": [True, False]}),
        ("method=dsbd,beam width=2", {"method": ["dsbd", "beam"], "width": [2]}),
        ("gamma=2,2", {"gamma": [2]}),
    ],
)
def test_parsing(text, grid):
    assert parse_sweep(text) == grid


@pytest.mark.parametrize(
    "text",
    ["", "gamma", "gamma=", "=2", "gamma=2,,3", "gamma=a", "gamma=5..2", "gama=2", "seed=1", "stop=x", "method=dsbd",
     "gamma=2 gamma=3", "deterministic=maybe", "method=beem width=2", "tree=2xa", "width=1.." + "9" * 5000],
)  # fmt: skip
def test_nonsense_is_refused(text):
    with pytest.raises(UserError):
        parse_sweep(text)


IMPOSSIBLE = [("temperature", "nan"), ("temperature", "inf"), ("temperature", "-1"), ("top_p", "nan"), ("top_p", "1.1"),
              ("top_p", "-0.1"), ("top_k", "-1"), ("width", "0"), ("width", "5000"), ("draft_width", "0"),
              ("gamma", "-1"), ("min_width", "0"), ("threshold", "nan"), ("threshold", "0"), ("threshold", "inf"),
              ("length_penalty", "nan"), ("length_penalty", "99"), ("max_new_tokens", "-1"), ("verify", "papr"),
              ("draws", "idd"), ("width_rule", "papr"), ("kv", "two"), ("forest", "wood"), ("prices", "dear"),
              ("early_stopping", "soon"), ("lookup", "-1"), ("forest_nodes", "-1"),
              ("tree", "0"), ("tree", "99x99"), ("tree_rule", "rds")]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_an_impossible_value_is_refused_like_the_single_option(name, value):
    parsed = parse_setting(name, value.replace("x", ","))
    more = {"method": "specinfer"} if name == "tree" else {}
    with pytest.raises(UserError) as single:
        Settings().merged({name: parsed, **more})
    good = {
        "tree": "2x1",
        "verify": "paper",
        "draws": "distinct",
        "width_rule": "paper",
        "kv": "one",
        "tree_rule": "spectr",
        "forest": "full",
        "prices": "off",
        "early_stopping": "first",
    }.get(name, "1")
    with pytest.raises(UserError) as swept:
        parse_sweep(f"{name}={good},{value}")
    assert str(swept.value) == f"--sweep: {single.value}"
    assert {name for name, _ in IMPOSSIBLE} | {"deterministic"} == set(SWEEPABLE)


def test_a_sweep_of_which_nothing_can_be_run_is_refused():
    with pytest.raises(UserError, match="none of its settings can be run: min-width 8 is above width 4"):
        arms("dsbd", sweeps=["min_width=8,9"])
    assert names(arms("dsbd", sweeps=["min_width=1,9"])) == ["dsbd", "dsbd min_width=1"]


def test_a_grid_is_full_and_several_are_united_without_doubles():
    grids = [parse_sweep("gamma=2,3 threshold=none,0.9"), parse_sweep("gamma=2,4")]
    assert len(points(grids, "dsbd", "dsbd")) == 6
    assert points(grids, "speculative", "speculative") == [{"gamma": 2}, {"gamma": 3}, {"gamma": 4}]
    assert points(grids, "multinomial", "multinomial") == []


def test_plain_beams_take_the_width_that_p_alone_decides():
    both = ["draws=iid,distinct threshold=none,0.9"]
    assert names(arms("beam", sweeps=both)) == [
        "beam", "beam draws=distinct threshold=none", "beam draws=distinct threshold=0.9",
    ]  # fmt: skip
    made, notes = arms("beam", sweeps=["width_rule=distinct threshold=0.8 min_width=1", "threshold=0.7"])
    assert made[1].settings == Settings(method="beam", threshold=0.8, width_rule="distinct", min_width=1)
    assert notes == [
        "beam: 1 settings of the sweep are left out: plain beams have no forest, so that a threshold needs "
        "draws=distinct or width_rule=distinct"
    ]
    (plain,), _ = arms("beam", {"draws": "distinct", "threshold": 0.9, "width": 6})
    assert plain.settings == Settings(method="beam", draws="distinct", threshold=0.9, width=6)
    assert plain.shown()["threshold"] == 0.9


def test_a_threshold_that_needs_a_forest_is_not_shown_at_beams():
    made, _ = arms("beam,dsbd", {"threshold": 0.9, "min_width": 1})
    assert [arm.settings.threshold for arm in made] == [None, 0.9]
    assert [arm.settings.min_width for arm in made] == [2, 1]
    preset = Settings(threshold=0.9, width_rule="paper", min_width=3)
    assert arms("beam", base=preset)[0][0].settings == Settings(method="beam")
    with pytest.raises(UserError, match="threshold means nothing to the methods of this run"):
        arms("beam", {"threshold": 0.9})
    with pytest.raises(UserError, match="none of its settings can be run: plain beams have no forest"):
        arms("beam", sweeps=["threshold=0.9"])


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("specinfer:rsd", {"tree_rule": "spectr"}),
        ("dsbd:paper", {"verify": "cover"}),
        ("dsbd-kv-one", {"kv": "all"}),
    ],
)
def test_a_rule_that_no_method_is_left_to_read_is_refused(method, given):
    """The method's own name says another one."""
    (name,) = given
    with pytest.raises(UserError, match="means nothing to the methods of this run"):
        arms(method, given)
    plain = method.replace(":", "-").split("-")[0]
    assert names(arms(f"{plain},{method}", given)) == [plain, method]
    (own,), _ = arms(method, {name: getattr(arms(method)[0][0].settings, name)})
    assert own.name == method
    text = ",".join(dict.fromkeys([given[name], getattr(own.settings, name)]))
    made = arms(method, sweeps=[f"{name}={text}"])
    assert names(made) == [method]
    assert made[1] == [f"{method}: 1 settings of the sweep exclude themselves and are left out"]
    with pytest.raises(UserError, match=f"{method} has a .* of its own"):
        arms(method, sweeps=[f"{name}={given[name]}"])


def test_every_decoding_option_of_generate_reaches_a_method():
    """What cannot be swept is where the prompt comes from, how it ends and which answer is shown."""
    elsewhere = {"method", "seed", "num_return", "stop", "system", "raw"}
    assert set(SWEEPABLE) | elsewhere == set(FIELDS)


def test_a_method_only_multiplies_by_what_it_reads():
    made = arms("multinomial,beam,speculative,specinfer,dsbd", sweeps=["gamma=2,5 width=2,3"])
    assert names(made) == [
        "multinomial",
        "beam", "beam width=2", "beam width=3",
        "speculative", "speculative gamma=2", "speculative gamma=5",
        "specinfer",
        "dsbd", "dsbd gamma=2 width=2", "dsbd gamma=2 width=3", "dsbd gamma=5 width=2", "dsbd gamma=5 width=3",
    ]  # fmt: skip


def test_a_sweep_may_be_meant_for_some_methods():
    assert names(arms("beam,dsbd", sweeps=["method=beam width=2"])) == ["beam", "beam width=2", "dsbd"]


def test_a_point_that_is_the_plain_arm_is_not_run_twice():
    assert names(arms("dsbd", sweeps=["gamma=2,4"])) == ["dsbd", "dsbd gamma=2"]


def test_settings_that_exclude_themselves_are_left_out_and_counted():
    made = arms("dsbd", sweeps=["width=1,2 min_width=2"])
    assert names(made) == ["dsbd", "dsbd width=2 min_width=2"]
    assert made[1] == ["dsbd: 1 settings of the sweep exclude themselves and are left out"]


def test_twins_are_named_once():
    made = arms("dsbd,dsbd:cover,dsbd:paper")
    assert names(made) == ["dsbd", "dsbd:paper"]
    assert "dsbd:cover is what dsbd already runs" in made[1][0]


def test_rules_of_the_token_tree_are_arms_of_one_family():
    made = arms("specinfer,specinfer:spectr,specinfer:rsd", sweeps=["method=specinfer tree=3 tree_rule=rsd"])
    assert [(arm.name, arm.shown()["tree_rule"]) for arm in made[0]] == [
        ("specinfer", "specinfer"),
        ("specinfer tree=3 tree_rule=rsd", "rsd"),
        ("specinfer:spectr", "spectr"),
        ("specinfer:rsd", "rsd"),
    ]
    assert {family(arm.method) for arm in made[0]} == {"specinfer"}
    assert [family(method) for method in ("dsbd:paper", "dsbd-kv-one", "hf-sample")] == ["dsbd", "dsbd", "hf"]


def test_options_reach_the_methods_they_mean_something_to():
    made, _ = arms(
        "multinomial,beam,specinfer,dsbd", {"width": 2, "gamma": 5, "tree": (3, 1), "temperature": 0.5}
    )
    by_name = {arm.name: arm.settings for arm in made}
    assert by_name["beam"].width == by_name["dsbd"].width == 2
    assert by_name["dsbd"].gamma == 5
    assert by_name["dsbd"].tree is None
    assert by_name["specinfer"].tree == (3, 1)
    assert {arm.settings.temperature for arm in made} == {0.5}


def test_a_presets_settings_are_the_base():
    base = Settings(width=6, verify="paper", min_width=3, top_k=5)
    made, _ = arms("beam,dsbd,dsbd-kv-one,hf-beam-search", base=base)
    assert [arm.settings.width for arm in made] == [6] * 4
    assert made[1].settings.verify == made[2].settings.verify == "paper"
    assert (made[2].settings.kv, made[1].settings.kv) == ("one", "all")
    assert {arm.settings.top_k for arm in made} == {5}


def test_deterministic_is_for_those_that_have_it():
    made, _ = arms("multinomial,beam,dsbd", {"deterministic": True})
    assert [arm.settings.deterministic for arm in made] == [False, True, True]


def test_one_option_that_nobody_reads_is_refused():
    with pytest.raises(UserError, match="--tree means nothing"):
        arms("beam,dsbd", {"tree": (2, 1)})
    with pytest.raises(UserError, match="--sweep: tree means nothing"):
        arms("beam", sweeps=["tree=2x1"])


def test_labels_are_short_and_unique():
    assert label_of({"threshold": None, "tree": (2, 1), "top_p": 0.9, "deterministic": True}) == (
        "threshold=none tree=2x1 top_p=0.9 deterministic=true"
    )


def test_groups():
    assert parse_methods("hf") == ["hf-sample", "hf-beam-sample", "hf-beam-search", "hf-assisted"]
    assert parse_methods("dsbd default") == ["dsbd", "multinomial", "beam", "speculative", "specinfer"]
