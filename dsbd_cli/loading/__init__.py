"""A target and a draft, from wherever they lie, ready to decode together.

Sources are folders, hub ids, GGUF files, model files inside package wheels, and the embedded draft
(`source.py`). Importing this package does not import torch; `load_pair` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsbd_cli.loading.progress import Progress
from dsbd_cli.loading.spec import PairSpec

if TYPE_CHECKING:
    from dsbd_cli.loading.model import LoadedModel
    from dsbd_cli.loading.pair import Pair

__all__ = ["LoadedModel", "Pair", "PairSpec", "load_pair"]


def load_pair(
    spec: PairSpec,
    *,
    need_draft: bool = True,
    progress: Progress | None = None,
    cache_dir: str | Path | None = None,
) -> Pair:
    """Load, check and match the two models that `spec` names.

    Args:
        spec: sources, devices, dtypes.
        need_draft: False leaves the draft on disk (`Pair.draft` is None).
        progress: told about slow stages (`progress.py`); None writes them into the log (`dsbd`, INFO), where
            what is loaded and from where stands in any case.
        cache_dir: where downloads and conversions are kept; None takes DSBD_CACHE or the
            platform's cache folder.

    Raises:
        UserError: a source that is missing, broken or not reachable, or a pair that cannot work.
    """
    from dsbd_cli.loading.pair import load

    return load(spec, need_draft=need_draft, progress=progress, cache_dir=cache_dir)


def __getattr__(name: str) -> Any:
    # The types are importable from here, but their modules need torch.
    if name == "Pair":
        from dsbd_cli.loading.pair import Pair

        return Pair
    if name == "LoadedModel":
        from dsbd_cli.loading.model import LoadedModel

        return LoadedModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
