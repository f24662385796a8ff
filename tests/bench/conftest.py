"""What the bench tests share: the built sample, and the data folder of the environment if there is one."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Benchmark data in the official layouts, outside the repository."""
    root = Path(os.environ.get("DSBD_SHARED", Path(__file__).parents[3] / "shared")) / "data"
    if not root.is_dir():
        pytest.skip("no benchmark data: set DSBD_SHARED to a folder that holds data/spider, data/squad, ...")
    return root
