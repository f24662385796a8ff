"""Token shards: what a target wrote, compact on disk and free to move between machines.

One safetensors file holds many sequences: `tokens` (uint16, or uint32 for larger vocabularies), and
for each sequence its `length`, `start` (the first token the target wrote: training begins here) and
`answer` (the first token of the answer). Metadata says how they were made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dsbd_cli.errors import RunError, UserError
from dsbd_cli.paths import replacing

SUFFIX = ".tokens.safetensors"
COLUMNS = ("tokens", "length", "start", "answer")


@dataclass
class Sequences:
    """Ragged token sequences: flat `tokens` `[total]` (int64) and per sequence `[n]` int64 columns."""

    tokens: np.ndarray
    length: np.ndarray
    start: np.ndarray
    answer: np.ndarray
    meta: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.length)

    @property
    def offset(self) -> np.ndarray:
        """Index of the first token of each sequence in `tokens`."""
        return np.cumsum(self.length) - self.length

    @property
    def answer_tokens(self) -> int:
        return int((self.length - self.answer).sum())

    def sequence(self, index: int) -> np.ndarray:
        begin = int(self.offset[index])
        return self.tokens[begin : begin + int(self.length[index])]

    def take(self, chosen: Sequence[int] | np.ndarray) -> Sequences:
        """The sequences `chosen`, without metadata."""
        return pack([(self.sequence(i).tolist(), int(self.start[i]), int(self.answer[i])) for i in chosen])


def pack(rows: Sequence[tuple[Sequence[int], int, int]], meta: dict[str, Any] | None = None) -> Sequences:
    """Sequences from `(tokens, start, answer)` rows."""
    flat = [token for tokens, _, _ in rows for token in tokens]
    return Sequences(
        tokens=np.array(flat, dtype=np.int64),
        length=np.array([len(tokens) for tokens, _, _ in rows], dtype=np.int64),
        start=np.array([start for _, start, _ in rows], dtype=np.int64),
        answer=np.array([answer for _, _, answer in rows], dtype=np.int64),
        meta=meta or {},
    )


def join(parts: Sequence[Sequences]) -> Sequences:
    """All sequences of `parts`, in order, without metadata."""
    tokens, length, start, answer = (
        np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS
    )
    return Sequences(tokens, length, start, answer)


def _narrow(values: np.ndarray) -> np.ndarray:
    """The same whole numbers in as few bytes as hold them all."""
    return values.astype(np.uint16 if values.size == 0 or values.max() < 2**16 else np.uint32)


def save(sequences: Sequences, path: Path) -> None:
    """Write a shard atomically: a killed run leaves the whole file or none.

    Raises:
        RunError: the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: _narrow(getattr(sequences, name)) for name in COLUMNS}
        with replacing(path) as temporary:
            save_file(arrays, str(temporary), metadata={"dsbd": json.dumps(sequences.meta)})
    except OSError as error:
        raise RunError(f"{path}: cannot write the shard: {error}") from error


def load(path: Path) -> Sequences:
    """Read one shard.

    Raises:
        UserError: missing, or not a shard.
    """
    try:
        with safe_open(str(path), framework="numpy") as file:
            columns = {name: file.get_tensor(name).astype(np.int64) for name in COLUMNS}
            meta = json.loads((file.metadata() or {}).get("dsbd", "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path}: not a token shard ({error})") from error
    return Sequences(**columns, meta=meta)


def load_folder(folder: Path) -> Sequences:
    """Every shard of a folder, in order of name.

    Raises:
        UserError: there is none.
    """
    paths = sorted(p for p in folder.glob(f"*{SUFFIX}") if not p.name.startswith("."))
    if not paths:
        raise UserError(f"{folder}: no token shards (*{SUFFIX}); run the sampling step first")
    return join([load(path) for path in paths])
