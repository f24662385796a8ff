"""The seeded sampler: never an impossible answer, the right law, one uniform an answer; and light imports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from dsbd_cli.decoding.law.distribution import SeededSampler


class Fixed:
    """A generator that always says `value`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, size: int | None = None) -> float | np.ndarray:
        return self.value if size is None else np.full(size, self.value)


def saying(value: float) -> SeededSampler:
    sampler = SeededSampler(0, 0)
    sampler._rng = Fixed(value)  # type: ignore[assignment]
    return sampler


LAST = float(np.nextafter(1.0, 0.0))


@pytest.mark.parametrize("value", [0.0, 0.3, 0.5, LAST])
@pytest.mark.parametrize(
    "weights",
    [
        [0.0, 1.0, 0.0],
        [0.0, 0.0, 0.1, 0.7, 0.2, 0.0, 0.0],
        [1e-300, 0.0],
        [0.1] * 10 + [0.0],
        [3.0, 0.0, 4.0],
    ],
)
def test_what_has_no_mass_is_never_picked(weights: list[float], value: float) -> None:
    for index in saying(value).sample(np.array(weights), 3):
        assert weights[index] > 0


def test_extreme_uniforms_pick_the_ends() -> None:
    weights = np.array([0.0, 0.2, 0.3, 0.5, 0.0])
    assert saying(0.0).sample(weights, 1) == [1]
    assert saying(LAST).sample(weights, 1) == [3]
    assert saying(0.2).sample(weights, 1) == [2], "u = 0.2 is the first number of the second cell"


@pytest.mark.parametrize("value", [0.0, 0.5, LAST])
def test_accept_at_the_edges(value: float) -> None:
    assert not saying(value).accept(0.0, 0.3)
    assert not saying(value).accept(0.0, 0.0)
    assert saying(value).accept(0.3, 0.3)
    assert saying(value).accept(0.4, 0.3)
    assert saying(value).accept(0.1, 0.0), "a draw that q calls impossible cannot be rejected"


def test_the_law_of_picks_and_accepts() -> None:
    weights, runs = np.array([1.0, 0.0, 5.0, 2.0, 2.0]), 20_000
    counts = np.bincount(SeededSampler(5, 0).sample(weights, runs), minlength=5)
    assert counts[1] == 0
    keep = weights > 0
    assert stats.chisquare(counts[keep], runs * weights[keep] / weights.sum()).pvalue > 0.001
    sampler = SeededSampler(6, 0)
    accepted = sum(sampler.accept(0.15, 0.5) for _ in range(runs))
    assert stats.binomtest(accepted, runs, 0.3).pvalue > 0.001


def test_one_seed_one_stream_and_streams_are_independent() -> None:
    weights = np.ones(1000)
    assert SeededSampler(3, 0).sample(weights, 50) == SeededSampler(3, 0).sample(weights, 50)
    assert SeededSampler(3, 0).sample(weights, 50) != SeededSampler(3, 1).sample(weights, 50)
    assert SeededSampler(4, 0).sample(weights, 50) != SeededSampler(3, 0).sample(weights, 50)
    one, other = SeededSampler(3, 0), SeededSampler(3, 0)
    # n draws at once use the same uniforms as n draws one by one.
    assert one.sample(weights, 3) == [other.sample(weights, 1)[0] for _ in range(3)]


def test_the_laws_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, dsbd_cli, dsbd_cli.decoding.methods, dsbd_cli.decoding.law.verification;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
