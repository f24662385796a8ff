"""Batches of ragged sequences: similar lengths together, order a function of (seed, epoch, rank) alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dsbd_cli.distill.shards import Sequences

LENGTH_STEP = 32
# Sequences are sorted by length within windows of this many batches, so order stays nearly random.
SORT_WINDOW = 32


@dataclass(frozen=True)
class Batch:
    """Padded ids `[rows, length]`, and where the loss is taken: flat positions `[n]` into `rows * length`."""

    ids: torch.Tensor
    positions: torch.Tensor

    @property
    def tokens(self) -> int:
        return int(self.positions.shape[0])


def padded(length: np.ndarray) -> np.ndarray:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def order(length: np.ndarray, budget: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Indices into `length`, cut into batches of at most `budget` padded tokens (one sequence at least).

    What does not fill a batch moves on to the next window, so small batches are rare: they would step
    as far as full ones, on less evidence.
    """
    shuffled = rng.permutation(len(length))
    mean = max(1.0, float(padded(length).mean())) if len(length) else 1.0
    window = max(1, int(SORT_WINDOW * budget / mean))
    batches: list[np.ndarray] = []
    rest = shuffled[:0]
    for begin in range(0, len(shuffled), window):
        part = np.concatenate([rest, shuffled[begin : begin + window]])
        part = part[np.argsort(length[part], kind="stable")]
        widths = padded(length[part])
        first = 0
        while first < len(part):
            last = first + 1
            while last < len(part) and (last + 1 - first) * int(widths[last]) <= budget:
                last += 1
            if last == len(part):
                break
            batches.append(part[first:last])
            first = last
        rest = part[first:]
    if len(rest):
        batches.append(rest)
    return [batches[i] for i in rng.permutation(len(batches))]


class Store:
    """All sequences on one device, batched without touching the host's memory again."""

    def __init__(self, sequences: Sequences, device: torch.device) -> None:
        self.length, self.start = sequences.length, sequences.start
        self.offset = sequences.offset
        self.tokens = torch.from_numpy(sequences.tokens.astype(np.int32)).to(device)
        self.device = device

    def batch(self, chosen: np.ndarray) -> Batch:
        """Right-padded batch of the sequences `chosen`; under causal attention padding changes nothing."""
        width = int(padded(self.length[chosen]).max())
        place = self.offset[chosen][:, None] + np.arange(width)[None]
        inside = np.arange(width)[None] < self.length[chosen][:, None]
        place = np.where(inside, place, self.offset[chosen][:, None])
        ids = self.tokens[torch.from_numpy(place).to(self.device)].long()
        column = np.arange(width)[None]
        # Position t predicts token t + 1: the target's own tokens are start .. length - 1.
        wanted = (column >= self.start[chosen][:, None] - 1) & (column < self.length[chosen][:, None] - 1)
        positions = torch.from_numpy(np.flatnonzero(wanted)).to(self.device)
        return Batch(ids, positions)


def split(count: int, share: float, limit: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and held out (at least one of each when there are two or more sequences)."""
    shuffled = np.random.default_rng([seed, 7]).permutation(count)
    held = min(limit, max(1, int(count * share)), max(0, count - 1))
    return np.sort(shuffled[held:]), np.sort(shuffled[:held])
