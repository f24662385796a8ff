"""Where the de-quantised form of a GGUF file is kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dsbd_cli.loading.cache import is_built

# Raised whenever a conversion would come out otherwise than before.
CONVERSION = 1


def folder_of_sum(sha256: str, cache: Path) -> Path:
    """Of a file whose content is pinned."""
    return cache / "models" / f"gguf{CONVERSION}-{sha256[:24]}"


def folder_of_file(path: Path, cache: Path) -> Path:
    """Of a user's file, by place, size and time: hashing gigabytes at every start would be slow."""
    found = path.stat()
    identity = f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"
    return folder_of_sum(hashlib.sha256(identity.encode()).hexdigest(), cache)


def is_converted(folder: Path) -> bool:
    """Whether a conversion is there, whole: an earlier version's may hold a tokenizer alone, where processes were
    connected and not the first of them converted."""
    return is_built(folder) and (folder / "config.json").exists()
