"""What all tests share: no network, one torch thread, and where optional data lies."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

# Set before anything imports huggingface_hub, which reads it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a forward costs is measured in tests of that alone: no clock decides anything elsewhere.
os.environ.setdefault("DSBD_PRICES", "off")

# A suite started in the background inherits an ignored SIGINT, and hands it on to what it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A program makes its commands once, from signatures, which takes longer than most runs here; so does a test process.
typer.main.get_command = functools.cache(typer.main.get_command)


# What takes long, as measured (`scripts/slow_tests.py`): left out by `make quick`.
_SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").split())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.partition("[")[0] in _SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def new_cache(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes cache folders that are empty but for compiled C, which a run of the tests builds once: it takes seconds."""
    base = tmp_path_factory.getbasetemp()
    compiled = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "native"
    compiled.mkdir(exist_ok=True)

    def make() -> Path:
        folder = tmp_path_factory.mktemp("cache")
        (folder / "native").symlink_to(compiled, target_is_directory=True)
        return folder

    return make


@pytest.fixture(scope="session")
def bench_data() -> Path:
    """Benchmark data in the official layouts; tests that want it are skipped without it."""
    root = Path(os.environ.get("DSBD_BENCH_DATA", ""))
    if not (root / "spider").is_dir():
        pytest.skip("no benchmark data: set DSBD_BENCH_DATA to a folder that holds spider, squad, ...")
    return root
