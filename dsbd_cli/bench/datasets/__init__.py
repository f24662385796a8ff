"""Benchmark data: typed records, loaders of the official layouts, and the prompts built from them."""

from __future__ import annotations

from pathlib import Path

from dsbd_cli.bench.datasets.records import Dataset
from dsbd_cli.errors import UserError
from dsbd_cli.names import near

KINDS = ("spider", "squad", "mt-bench")


def load_dataset(name: str, data_dir: Path | None, build_dir: Path) -> Dataset:
    """A data set by name, or a file of prompts by path; all files are checked.

    Args:
        name: one of `KINDS`, or a path to a .jsonl or .txt file.
        data_dir: folder in the official layout (or holding one folder per data set); `hub` or
            `hub:OWNER/NAME`; None is the built-in sample.
        build_dir: where the sample's databases are built.

    Raises:
        UserError: unknown name, missing or broken files.
    """
    from dsbd_cli.bench.datasets import hub, mt_bench, plain, sample, spider, squad

    name = {"mt_bench": "mt-bench", "mtbench": "mt-bench"}.get(name, name)
    if name not in KINDS:
        path = Path(name)
        if path.is_file():
            if data_dir is not None:
                raise UserError("--data-dir belongs to spider, squad and mt-bench, not to a file of prompts")
            return plain.load(path)
        if path.suffix or len(path.parts) > 1:
            raise UserError(f"--dataset {name}: no such file{near(name, KINDS)}")
        raise UserError(
            f"--dataset {name}: neither {', '.join(KINDS)} nor a file of prompts{near(name, KINDS)}"
        )
    if data_dir is None:
        return sample.load(name, build_dir)
    if (repository := hub.repository(data_dir)) is not None:
        from dsbd_cli.loading.cache import cache_root

        return hub.load(name, repository, cache_root())
    return {"spider": spider, "squad": squad, "mt-bench": mt_bench}[name].load(data_dir)
