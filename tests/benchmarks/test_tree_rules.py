"""What rules accept, worked out: against enumeration of the rules, and of whole runs of the engine."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tree_rules
from benchmarks.tree_rules import RULES, aligned_supports, given_the_text, target_calls
from dsbd_cli.decoding.law.distribution import LogitsProcessor
from dsbd_cli.decoding.tree.events import Iteration
from tests import builders
from tests.decoding.enumerating import Branching, law_of
from tests.decoding.harness import Toy, settings_for
from tests.decoding.law.test_tree_rules import CASES, law
from tests.decoding.reference import T
from tests.decoding.table_model import PathLaw
from tests.decoding.toys import DRAFTS, EOS


@pytest.mark.parametrize("rule", RULES)
def test_chances_of_tokens_are_those_of_the_rule(rule: str) -> None:
    for name, (p, q) in CASES.items():
        for draws in (1, 2, 3):
            found = law(rule, p, q, draws)
            wanted = [found.get((token, True), 0.0) for token in range(len(p))]
            np.testing.assert_allclose(RULES[rule](p, q, draws), wanted, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize("rule", RULES)
def test_calls_of_a_text_are_those_of_the_engine(rule: str, draft: str) -> None:
    """E(target calls | text), over every text, from whole enumerated runs."""
    t, tree, budget = T(0.9, 2, 1.0), (2, 1), 4
    target, proposal = DRAFTS[draft]
    settings = settings_for(t, max_new_tokens=budget, method="specinfer", tree=tree, tree_rule=rule)
    case = Toy(target, proposal, settings, EOS)

    def play(sampler: Branching) -> tuple[tuple[int, ...], int]:
        run, events = case.events(sampler, sampler)
        calls = sum(isinstance(event, Iteration) for event in events)
        return tuple(run.hypotheses.ranking()[0].tokens()), calls

    mass: dict[tuple[int, ...], float] = defaultdict(float)
    calls: dict[tuple[int, ...], float] = defaultdict(float)
    for (text, count), share in law_of(play).items():
        mass[text] += share
        calls[text] += share * count
    assert len(mass) > 5
    for text, share in mass.items():
        places = [place_of(target, proposal, text[:i], text[i], t) for i in range(len(text))]
        chances = [given_the_text(rule, draws, places) for draws in tree]
        assert target_calls(chances, len(text), budget) == pytest.approx(calls[text] / share, abs=1e-9)


def place_of(
    target: PathLaw, draft: PathLaw, path: tuple[int, ...], token: int, t: T
) -> tuple[np.ndarray, np.ndarray, int]:
    with np.errstate(divide="ignore"):
        rows = [np.log(np.asarray(model(path))) for model in (target, draft)]
    union, p, q = aligned_supports(*rows, LogitsProcessor(t.tau, t.k, t.p))
    return p, q, int(np.searchsorted(union, token))


def test_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    builders.rand(tmp_path / "target")
    builders.rand(tmp_path / "draft")  # the same: all is accepted
    command = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--device", "cpu",
               "--datasets", "squad", "--prompts", "2", "--max-new-tokens", "6", "--trees", "1,2x1"]  # fmt: skip
    assert tree_rules.main(command) == 0
    shown = capsys.readouterr()
    table = [line.split() for line in shown.out.splitlines()[1:]]
    assert [row[:2] for row in table] == [[tree, rule] for tree in ("1", "2x1") for rule in RULES]
    assert len({row[3] for row in table[:3]}) == 1  # one draw a node: one rule
    assert all(float(row[3]) > float(table[0][3]) for row in table[3:])
    assert tree_rules.main(command) == 0
    assert capsys.readouterr().out == shown.out
    assert tree_rules.main([*command, "--set", "top_k=0"]) == 2
    assert "enumerated: give --set top_k=N" in capsys.readouterr().err
