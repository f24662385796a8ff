"""Weights as a forward in C reads them, kept beside the pair that is remembered and mapped in its next starts.

One file a model: a magic line, the header's length, the header (JSON), then the pieces, each on a line of the
processor's cache. The header holds the key: everything that decides what a piece looks like (`ready.pair`). Nothing
here is needed to decode: what is missing, damaged or of something else is packed anew, and a folder that cannot
be written or a full disk only costs that time.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsbd_cli.errors import let_by, suppressed

_LOG = logging.getLogger("dsbd")
_MAGIC = b"dsbd packed weights 1\n"
_LENGTH = 8
_LINE = 64
_PAGE = 4096
SUFFIX = ".packed"
# What nobody has read for so long, or a killed process has left, is deleted when another file is written.
_UNREAD_DAYS, _LEFT_HOURS = 30.0, 1.0


class Place(NamedTuple):
    """Where a model's packed weights are kept, and what they have to be of.

    Attributes:
        path: the file.
        key: plain values; `read` gives nothing that was written under another one.
    """

    path: Path
    key: dict[str, Any]


class Piece(NamedTuple):
    """One matrix of a model, laid out for C.

    Attributes:
        outputs, inputs: its shape.
        format: the place of its number format in the C source.
        weight: bytes.
        scale: float32 [outputs] of int8 rows, or None.
        bias: float32, padded as the C code reads it, or None.
    """

    outputs: int
    inputs: int
    format: int
    weight: np.ndarray
    scale: np.ndarray | None
    bias: np.ndarray | None


def read(place: Place, layout: str) -> list[Piece] | None:
    """The pieces written under this key in this layout, mapped read-only; None where they are not there whole.

    Args:
        layout: the kind of forward and what it packs for.
    """
    try:
        with place.path.open("rb") as file:
            # All pages at once, where the system can: one by one they cost a tenth of a second.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            data = memoryview(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ))
        begin = len(_MAGIC) + _LENGTH
        if data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is of another kind or version")
        size = int.from_bytes(data[len(_MAGIC) : begin], "little")
        header = json.loads(bytes(data[begin : begin + size]))
        if header["key"] != _plain(place.key) or header["layout"] != layout:
            return None  # another model, processor or version: it is written over
        body = np.frombuffer(data, np.uint8, offset=_up(begin + size, _PAGE))
        if header["bytes"] != len(body) or header["sum"] != _sum(body):
            raise ValueError("it is damaged")
        found = [_piece(body, *one) for one in header["pieces"]]
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever it is: weights are packed as without it
        let_by(error)
        _LOG.debug("%s is not used: %s", place.path, error)
        return None
    with suppressed(OSError):
        os.utime(place.path)
    return found


def write(place: Place, layout: str, pieces: Sequence[Piece]) -> bool:
    """Write them, whole or not at all.

    Returns:
        Whether it was written.
    """
    arrays: list[np.ndarray] = []
    at = 0

    def placed(array: np.ndarray | None) -> list[Any] | None:
        nonlocal at
        if array is None:
            return None
        arrays.append(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        entry = [at, len(arrays[-1]), array.dtype.str]
        at = _up(at + len(arrays[-1]), _LINE)
        return entry

    table = [
        [one.outputs, one.inputs, one.format, placed(one.weight), placed(one.scale), placed(one.bias)]
        for one in pieces
    ]
    size = _up(at, _PAGE)
    part: str | None = None
    try:
        place.path.parent.mkdir(parents=True, exist_ok=True)
        _tidy(place.path)
        handle, part = tempfile.mkstemp(prefix=f".{place.path.name}.part-", dir=place.path.parent)
        with os.fdopen(handle, "w+b") as file:
            header = {"key": place.key, "layout": layout, "bytes": size, "pieces": table}
            # The sum is of what will be mapped, so it is made of that: its room in the header is kept free.
            head = json.dumps(header | {"sum": [2**64 - 1] * 2}, sort_keys=True).encode()
            begin = _up(len(_MAGIC) + _LENGTH + len(head), _PAGE)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, begin + size)  # a full disk says so here, not as a signal
            else:
                file.truncate(begin + size)
            with mmap.mmap(handle, begin + size) as room:
                body = np.frombuffer(room, np.uint8, offset=begin)
                for array, (place_at, length, _) in zip(arrays, _entries(table), strict=True):
                    body[place_at : place_at + length] = array
                head = json.dumps(header | {"sum": _sum(body)}, sort_keys=True).encode().ljust(len(head))
                room[: len(_MAGIC) + _LENGTH + len(head)] = (
                    _MAGIC + len(head).to_bytes(_LENGTH, "little") + head
                )
                del body
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(part, 0o666 & ~mask)  # a cache may be shared
        os.replace(part, place.path)
    except (OSError, ValueError, BufferError) as error:
        let_by(error)
        _LOG.debug("%s is not written: %s", place.path, error)
        if part is not None:
            with suppressed(OSError):
                os.unlink(part)
        return False
    return True


def _piece(body: np.ndarray, outputs: int, inputs: int, kind: int, *entries: list[Any] | None) -> Piece:
    arrays = [
        None if entry is None else body[entry[0] : entry[0] + entry[1]].view(np.dtype(entry[2]))
        for entry in entries
    ]
    assert arrays[0] is not None
    return Piece(outputs, inputs, kind, arrays[0], arrays[1], arrays[2])


def _entries(table: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [entry for row in table for entry in row[3:] if entry is not None]


def _sum(body: np.ndarray) -> list[int]:
    """Two sums over whole pages, at the speed of memory: of all words, and of pages by their place."""
    pages = body.view(np.uint64).reshape(-1, _PAGE // 8).sum(1, dtype=np.uint64)
    places = np.arange(1, len(pages) + 1, dtype=np.uint64)
    return [int(pages.sum(dtype=np.uint64)), int((pages * places).sum(dtype=np.uint64))]


def _tidy(path: Path) -> None:
    """Delete what nobody reads any more."""
    now = time.time()
    for pattern, hours in ((f"*{SUFFIX}", 24 * _UNREAD_DAYS), (f".*{SUFFIX}.part-*", _LEFT_HOURS)):
        for old in path.parent.glob(pattern):
            with suppressed(OSError):
                if now - old.stat().st_mtime > 3600 * hours:
                    old.unlink()


def _plain(key: dict[str, Any]) -> Any:
    return json.loads(json.dumps(key))  # a tuple is a list there


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
