"""A look at a checkpoint folder before any library opens it, so that a broken file is named as such.

Half downloads, Git LFS pointers and missing shards otherwise surface as "header too large" from
deep inside. Only headers are read: a few kilobytes a file.
"""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

from dsbd_cli.errors import UserError, let_by

_LFS = b"version https://git-lfs"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "tokenizer.tiktoken",
)


def check_folder(folder: Path, role: str, *, tokenizer: bool = True) -> None:
    """Raise unless `folder` holds a config, whole weight files and a tokenizer.

    Args:
        folder: a local checkpoint.
        role: what errors call it, `target` or `draft`.
        tokenizer: whether one is needed.

    Raises:
        UserError: naming the file, its size and the likely cause.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(f"{role} {folder} has no config.json: is it a Hugging Face model folder?")
    read_json(config, role)
    for path in weight_files(folder, role):
        check_weights(path, role)
    if tokenizer:
        check_tokenizer(folder, role)


def weight_files(folder: Path, role: str) -> list[Path]:
    """The files that hold the weights, by index or by name.

    Raises:
        UserError: none there, or a shard that the index names is missing.
    """
    for name in _SINGLES:
        if (folder / name).is_file():
            return [folder / name]
    for name in _INDEXES:
        if (folder / name).is_file():
            index = read_json(folder / name, role).get("weight_map")
            if not isinstance(index, dict):
                raise UserError(f"{role} {folder / name} has no weight_map: fetch it again")
            shards = sorted(set(index.values()))
            for shard in shards:
                if not (folder / shard).is_file():
                    raise UserError(f"{role} {folder / shard} is missing, one of {len(shards)} weight files that "
                                    f"{name} names: fetch it again")  # fmt: skip
            return [folder / shard for shard in shards]
    # Fine-tunes sometimes rename their files; transformers then decides.
    if found := sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")):
        return found
    raise UserError(f"{role} {folder} holds no weights (model.safetensors or an index of shards)")


def check_weights(path: Path, role: str) -> None:
    """Raise unless a weight file is whole, as far as its header tells."""
    size = _refuse_pointer(path, role)
    if path.suffix == ".safetensors":
        wanted = _safetensors_size(path, size)
        if wanted is None:
            raise UserError(f"{role} {path} ({size:,} bytes) is not a safetensors file: its header cannot be "
                            "read. A damaged download? Fetch it again")  # fmt: skip
        if size != wanted:
            raise UserError(f"{role} {path} has {size:,} bytes where its header promises {wanted:,}: an "
                            "unfinished download. Fetch it again")  # fmt: skip
    elif not zipfile.is_zipfile(path) and _head(path, 2) != b"\x80\x02":  # the two forms of torch.save
        raise UserError(f"{role} {path} ({size:,} bytes) is not a torch weight file: an unfinished "
                        "download? Fetch it again")  # fmt: skip


def check_tokenizer(folder: Path, role: str) -> None:
    """Raise unless a tokenizer file is there and is more than a pointer."""
    found = [folder / name for name in _TOKENIZERS if (folder / name).is_file()]
    if not found:
        raise UserError(f"{role} {folder} has no tokenizer (tokenizer.json or tokenizer.model)")
    for path in found:
        size = _refuse_pointer(path, role)
        # Megabytes that the tokenizer library parses soon after: here only whether they are all there.
        if path.suffix == ".json" and not _closed(path, size):
            raise UserError(f"{role} {path} ({size:,} bytes) does not end like JSON: an unfinished download. "
                            "Fetch it again")  # fmt: skip
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (folder / name).is_file():
            read_json(folder / name, role)


def read_json(path: Path, role: str) -> dict[str, Any]:
    """The object in a JSON file, or a UserError that names it."""
    size = _refuse_pointer(path, role)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{role} {path} ({size:,} bytes) is not valid JSON ({error}): fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{role} {path} does not hold a JSON object")
    return value


def _refuse_pointer(path: Path, role: str) -> int:
    """The file's size; an empty file or a Git LFS pointer is refused."""
    try:
        size = path.stat().st_size
        head = _head(path, len(_LFS))
    except OSError as error:
        let_by(error)
        raise UserError(f"{role} {path} cannot be read ({error.strerror})") from None
    if size == 0:
        raise UserError(f"{role} {path} is empty (0 bytes): an unfinished download. Fetch it again")
    if head == _LFS:
        raise UserError(f"{role} {path} ({size:,} bytes) is a Git LFS pointer, not the file itself: "
                        "run `git lfs pull` in that folder")  # fmt: skip
    return size


def _closed(path: Path, size: int) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, size - 64))
        return file.read().rstrip().endswith(b"}")


def _head(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _safetensors_size(path: Path, size: int) -> int | None:
    """Bytes that the header promises for the whole file; None if there is no readable header."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return None
        (length,) = struct.unpack("<Q", start)
        if length > min(size, 100_000_000):  # the format's own limit
            return None
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
    return 8 + length + max(ends, default=0)
