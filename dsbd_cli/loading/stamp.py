"""Whether two runs were asked for the same models, told in milliseconds: names, and when files were last written.

Equal stamps mean equal weights. Different ones mean nothing yet: a folder that was moved, or touched, holds
what it held; only loading tells.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from dsbd_cli.loading import gguf_cache, hub
from dsbd_cli.loading.source import Source, parse_source
from dsbd_cli.loading.spec import PairSpec


def stamps(spec: PairSpec, *, need_draft: bool = True) -> dict[str, Any]:
    """The pair as it was asked for, and a stamp of each source; plain values.

    Raises:
        UserError: a source that is not there.
    """
    asked = spec.to_dict()
    if not need_draft:
        asked = {name: value for name, value in asked.items() if not name.startswith("draft")}
    found = {"target": _stamp(parse_source(spec.target, "target"), spec.revision)}
    if need_draft and spec.draft is not None:
        found["draft"] = _stamp(parse_source(spec.draft, "draft"), spec.draft_revision)
    return {"pair": asked, "files": found}


def _stamp(source: Source, revision: str | None) -> str:
    if source.wheel is not None:
        return f"{gguf_cache.CONVERSION} {source.wheel.sha256}"  # pinned, and checked when it is fetched
    if source.kind == "hub":
        snapshot = hub.cached_snapshot(source.text, revision)
        return "not cached" if snapshot is None else files_stamp(snapshot)
    assert source.path is not None
    return files_stamp(source.path)


def files_stamp(path: Path) -> str:
    """16 hex digits over place, size and times of a file, or of the files in a folder."""
    digest = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape"))
    for file in sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]:
        # The time of the last change of any kind too: `cp -p` keeps the other one.
        facts = file.stat()
        digest.update(f"\0{file.name!r} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}".encode())
    return digest.hexdigest()[:16]
