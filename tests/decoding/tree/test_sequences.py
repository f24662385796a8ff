"""Pool, scores, stop rules and ranking: one case each, by hand."""

from __future__ import annotations

import pytest

from dsbd_cli.decoding.tree.sequences import Hypotheses, Node


def chain(score: float, depth: int, finish: str | None = None, token: int = 0) -> Node:
    """A sequence of `depth` tokens (the last one `token`) with l = `score`."""
    node = Node(-1, None)
    for place in range(depth):
        node = Node(token if place == depth - 1 else 9, node)
    node.score, node.finish = score, finish
    return node


def hypotheses(rule: str = "heuristic", width: int = 2, alpha: float = 1.0) -> Hypotheses:
    return Hypotheses(Node(-1, None), width, rule, alpha)


@pytest.mark.parametrize(("alpha", "score"), [(0.0, -6.0), (1.0, -2.0), (2.0, -6 / 9), (-1.0, -18.0)])
def test_score_is_l_over_length_to_the_alpha(alpha: float, score: float) -> None:
    assert hypotheses(alpha=alpha).score(chain(-6.0, 3)) == pytest.approx(score)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0])
def test_the_empty_sequence_scores_0(alpha: float) -> None:
    state = hypotheses(alpha=alpha)
    assert state.score(state.active[0]) == 0.0
    assert state.ranking() == state.active


def test_commit_merges_equal_draws_and_parts_the_finished() -> None:
    state = hypotheses(width=5)
    going, ended, other = chain(-1, 1), chain(-2, 1, "eos"), chain(-3, 1)
    assert state.commit([going, ended, going, ended, other]) == 3
    assert state.active == [going, other]
    assert state.pool == [ended]
    later = chain(-4, 2, "length")
    assert state.commit([later]) == 1
    assert state.active == []
    assert state.pool == [ended, later]


@pytest.mark.parametrize("rule", ["first", "heuristic", "never"])
def test_nothing_active_is_the_end_for_every_rule(rule: str) -> None:
    state = hypotheses(rule)
    assert not state.stopped()
    state.commit([chain(-9, 1, "eos")])
    assert state.stopped()


@pytest.mark.parametrize(("rule", "stops"), [("first", True), ("heuristic", True), ("never", False)])
def test_a_pool_of_width_sequences(rule: str, stops: bool) -> None:
    """Bad finished ones, a good active one: only their number can end it."""
    state = hypotheses(rule)
    state.commit([chain(-50, 1, "eos"), chain(-1, 1)])
    assert not state.stopped()
    state.commit([chain(-60, 2, "eos"), chain(-2, 2)])
    assert state.stopped() is stops


@pytest.mark.parametrize(
    ("finished", "active", "stops"),
    [(-1.0, [-2.0, -3.0], True), (-2.0, [-2.0, -3.0], True), (-2.5, [-3.0, -2.0], False)],
)
def test_heuristic_stops_where_nothing_active_is_better_now(
    finished: float, active: list[float], stops: bool
) -> None:
    state = hypotheses(width=5, alpha=0.0)
    state.commit([chain(finished, 2, "eos"), *[chain(score, 2) for score in active]])
    assert state.stopped() is stops
    for rule in ("first", "never"):
        state = hypotheses(rule, width=5, alpha=0.0)
        state.commit([chain(finished, 2, "eos"), *[chain(score, 2) for score in active]])
        assert not state.stopped()


def test_heuristic_compares_scores_not_l() -> None:
    """The shorter one has the better l, the longer one the better score per token."""
    short, long = chain(-2.0, 1, "eos"), chain(-3.0, 3)
    state = hypotheses(width=5)
    state.pool = [short]
    state.active = [long]
    assert not state.stopped()
    state = hypotheses(width=5, alpha=0.0)
    state.pool = [short]
    state.active = [long]
    assert state.stopped()


def test_ranking_is_best_first_and_ties_go_to_the_finished_then_to_the_older() -> None:
    state = hypotheses(width=9)
    first, second, third = (chain(-2.0, 1, "eos", token=token) for token in (3, 2, 1))
    better, active = chain(-1.0, 1), chain(-2.0, 1)
    state.pool = [first, second, third]
    state.active = [active, better]
    assert state.ranking() == [better, first, second, third, active]
    assert state.best_finished() is first


def test_no_finished_sequence_yet() -> None:
    assert hypotheses().best_finished() is None


def test_keeping_the_best_active_leaves_the_pool_alone() -> None:
    state = hypotheses(width=9)
    ended, low, high, same = chain(-1, 1, "eos"), chain(-3, 1), chain(-2, 1), chain(-2, 1)
    state.commit([low, ended, high, same])
    state.keep_best_active()
    assert state.active == [high]
    assert state.pool == [ended]
    state.commit([ended])
    state.keep_best_active()
    assert state.active == []
