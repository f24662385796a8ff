"""What goes to the device for one iteration, and what comes back (`device_loop`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dsbd_cli.decoding.cache.tree_cache import Plan, Reservation, TreeCache
from dsbd_cli.decoding.forward.logits import Best


@dataclass(frozen=True)
class Side:
    """What the loop needs of one model: its forward, its pool, its head's columns, its row size (at most those)."""

    forward: Any
    pool: TreeCache
    vocab: int
    top_n: int


@dataclass(frozen=True)
class Request:
    """One iteration, as the host has_logits it.

    Attributes:
        draft: plan over the beams (all of them) and what the draft has missed of them.
        beams: places of the beams in that plan.
        target: plan over the beams that the target has not computed, and their missing ancestors.
        beam_rows: the beams' mask rows in the target's pool.
        scores: the beams' log weights.
        position: of the beams' tokens.
        draft_space, target_space: for (gamma - 1) x W and gamma x W nodes, layer by layer.
        uniforms: [gamma, W]; not looked at where the most probable are taken.
    """

    draft: Plan
    beams: list[int]
    target: Plan
    beam_rows: list[int]
    scores: list[float]
    position: int
    draft_space: Reservation
    target_space: Reservation
    uniforms: np.ndarray


class Layer(NamedTuple):
    """One drafted layer, on the host; `finite`: bool by parent, whether its logits were numbers.

    For the rest see `device_law.Drafted`.
    """

    parent: np.ndarray
    token: np.ndarray
    logp: np.ndarray
    prob: np.ndarray
    draws: np.ndarray
    finite: np.ndarray


class Answer(NamedTuple):
    """What came back.

    Attributes:
        layers: gamma of them.
        rows: the target's best entries: of `Request.target`'s nodes, then of gamma x W forest nodes.
    """

    layers: list[Layer]
    rows: Best
