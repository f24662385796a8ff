"""What the bench tests share: the built sample, and what runs SQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsbd_cli.bench.datasets import sample
from dsbd_cli.bench.scoring.sql_runner import SqlRunner

DATA = Path(__file__).with_name("data")


@pytest.fixture(scope="session")
def sample_spider(tmp_path_factory) -> Path:
    return sample.build_spider(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="session")
def runner():
    with SqlRunner(seconds=5) as runner:
        yield runner


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory):
    """The backend over a target and a draft with random weights."""
    from dsbd_cli.bench.backend import PairBackend
    from dsbd_cli.decoder import Decoder
    from tests.builders import rand

    folder = tmp_path_factory.mktemp("random")
    rand(folder / "t")
    rand(folder / "d", seed=1)
    return PairBackend(Decoder.from_pair(folder / "t", folder / "d", device="cpu", dtype="float32"))
