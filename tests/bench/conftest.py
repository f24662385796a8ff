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
