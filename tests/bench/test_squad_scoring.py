"""SQuAD exact match and F1 by the official normalisation."""

from __future__ import annotations

import pytest

from dsbd_cli.bench.scoring.squad import answer_of, exact_match, f1, normalize


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Eiffel Tower.", "eiffel tower"),
        ("  a  cat\tand\nthe dog ", "cat and dog"),
        ("U.S.A.", "usa"),
        ("well-known", "wellknown"),
        ("theatre another anthem", "theatre another anthem"),
        ("“quoted”", "“quoted”"),  # only ASCII punctuation goes
        ("the", ""),
        ("A", ""),
        ("1,000", "1000"),
        ("", ""),
    ],
)
def test_normalisation(text, normal):
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("prediction", "references", "match", "score"),
    [
        ("the Eiffel Tower.", ["Eiffel Tower"], True, 1.0),
        ("second", ["first", "second", "third"], True, 1.0),
        ("Caf\u00e9", ["Cafe\u0301"], False, 0.0),  # the official rule does not compose accents
        ("Caf\u00e9", ["caf\u00e9"], True, 1.0),
        ("", ["Eiffel Tower"], False, 0.0),
        ("the", ["Eiffel Tower"], False, 0.0),
        ("a", ["the"], True, 0.0),  # both empty: equal, and without a shared token, as the official script
        ("Eiffel", ["Eiffel Tower"], False, 2 / 3),
        ("Tower Eiffel", ["Eiffel Tower"], False, 1.0),
        ("tower tower", ["tower"], False, 2 / 3),
        ("in the Eiffel Tower in Paris", ["Paris", "Eiffel Tower"], False, 2 * 2 / (5 + 2)),
    ],
)
def test_scores(prediction, references, match, score):
    assert exact_match(prediction, references) is match
    assert f1(prediction, references) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "scored"),
    [
        ("Tower\nQuestion: next one?", "Tower"),
        ("\n\n  Tower \n", "Tower"),
        ("", ""),
        ("one line", "one line"),
    ],
)
def test_the_first_line_is_scored(answer, scored):
    assert answer_of(answer) == scored


def test_no_references_is_a_fault_of_the_data():
    with pytest.raises(ValueError, match="no reference"):
        exact_match("x", [])
    with pytest.raises(ValueError, match="no reference"):
        f1("x", [])
