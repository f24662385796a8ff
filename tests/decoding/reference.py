"""The laws written a second time, straight from docs/design.md section 1, with nothing shared with the engine.

Everything is a dict over token tuples and plain Python floats: slow, dense, obvious.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tests.decoding.table_model import Path, PathLaw

Paths = tuple[Path, ...]


class T(NamedTuple):
    """Temperature, top-k (0: off), top-p (1: off)."""

    tau: float = 1.0
    k: int = 0
    p: float = 1.0


class Outcome(NamedTuple):
    """All there is to know of a run: its layers as sets, what is left, and the answer."""

    layers: tuple[frozenset[Path], ...]
    pool: frozenset[Path]
    active: frozenset[Path]
    answer: Path


def warped(log_weights: Sequence[tuple[int, int, float]], t: T) -> dict[tuple[int, int], float]:
    """T on (parent, token, log weight) triples: the law over (parent, token)."""
    ranked = sorted(
        (entry for entry in log_weights if entry[2] > -math.inf),
        key=lambda entry: (-entry[2], entry[0], entry[1]),
    )
    if t.tau == 0:
        ranked = ranked[:1]
    if t.k:
        ranked = ranked[: t.k]
    top = ranked[0][2]
    weights = [math.exp((weight - top) / t.tau) if t.tau else 1.0 for _, _, weight in ranked]
    total = math.fsum(weights)
    law, reached = {}, 0.0
    for (parent, token, _), weight in zip(ranked, weights, strict=True):
        law[parent, token] = weight / total
        reached += weight / total
        if t.p < 1 and reached >= t.p:
            break
    kept = math.fsum(law.values())
    return {key: weight / kept for key, weight in law.items() if weight > 0}


def log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def logprob(law: PathLaw, path: Path) -> float:
    """l(path): never warped."""
    total = 0.0
    for i, token in enumerate(path):  # `sum` rounds once from Python 3.12 on, and ties would break elsewhere
        total += log(float(law(path[:i])[token]))
    return total


def p_beam(law: PathLaw, active: Sequence[Path], t: T) -> dict[Path, float]:
    """The law of one draw, over sequences one token longer."""
    triples = [
        (i, token, logprob(law, path) + log(float(share)))
        for i, path in enumerate(active)
        for token, share in enumerate(law(path))
    ]
    return {(*active[i], token): share for (i, token), share in warped(triples, t).items()}


def layer_law(draw: dict[Path, float], width: int, distinct: bool) -> dict[Paths, float]:
    """The law of a layer's draws, in order: iid, or each among what was not drawn before it."""
    if not distinct:
        return {
            slots: math.prod(draw[path] for path in slots) for slots in itertools.product(draw, repeat=width)
        }
    law: dict[Paths, float] = {}
    for slots in itertools.permutations(draw, min(width, len(draw))):
        share = 1.0
        for i, path in enumerate(slots):
            share *= draw[path] / math.fsum(mass for other, mass in draw.items() if other not in slots[:i])
        law[slots] = share
    return law


def holding(draw: dict[Path, float], t: float) -> int:
    """How many continuations hold t of the mass, the likeliest first."""
    ranked = sorted(draw.values(), reverse=True)
    return next(
        n for n in range(1, len(ranked) + 1) if math.fsum(ranked[:n]) >= t - 1e-12 or n == len(ranked)
    )


def set_process(
    law: PathLaw,
    width: int,
    t: T,
    eos: Sequence[int],
    budget: int,
    early_stopping: str = "heuristic",
    alpha: float = 1.0,
    distinct: bool = False,
    by_mass: tuple[int, float] | None = None,
) -> dict[Outcome, float]:
    """Beam sampling as a process of sets: the law over whole runs.

    Args:
        by_mass: (W_min, t): a layer has as many draws as the likeliest continuations that hold t of p.
    """
    done: dict[Outcome, float] = defaultdict(float)
    # The active set keeps the order of its first draws: ties under T go to the earlier parent.
    open_: dict[tuple[tuple[frozenset[Path], ...], frozenset[Path], Paths], float]
    open_ = {((), frozenset(), ((),)): 1.0}

    def score(path: Path) -> float:
        return logprob(law, path) / len(path) ** alpha if path else 0.0

    def over(pool: frozenset[Path], active: Paths) -> bool:
        if not active:
            return True
        if early_stopping == "never":
            return False
        if len(pool) >= width:
            return True
        return (
            early_stopping == "heuristic" and bool(pool) and max(map(score, pool)) >= max(map(score, active))
        )

    while open_:
        following: dict[tuple[tuple[frozenset[Path], ...], frozenset[Path], Paths], float]
        following = defaultdict(float)
        for (history, pool, active), mass in open_.items():
            draw = p_beam(law, active, t)
            wide = width if by_mass is None else min(width, max(by_mass[0], holding(draw, by_mass[1])))
            for drawn, share in layer_law(draw, wide, distinct).items():
                layer = tuple(dict.fromkeys(drawn))
                ended = {path for path in layer if path[-1] in eos or len(path) >= budget}
                going = tuple(path for path in layer if path not in ended)
                following[(*history, frozenset(layer)), pool | ended, going] += mass * share
        open_ = {}
        for (history, pool, active), mass in following.items():
            if over(pool, active):
                answer = max(sorted(pool | set(active)), key=score)
                done[Outcome(history, pool, frozenset(active), answer)] += mass
            else:
                open_[history, pool, active] = mass
    return dict(done)


def sequence_law(law: PathLaw, t: T, eos: Sequence[int], budget: int) -> dict[Path, float]:
    """The law of one whole sequence drawn token by token: what all one-beam methods must equal."""
    done: dict[Path, float] = defaultdict(float)
    open_: dict[Path, float] = {(): 1.0}
    while open_:
        path, mass = open_.popitem()
        row = warped([(0, token, log(float(share))) for token, share in enumerate(law(path))], t)
        for (_, token), share in row.items():
            longer = (*path, token)
            target = done if token in eos or len(longer) >= budget else open_
            target[longer] = target.get(longer, 0.0) + mass * share
    return dict(done)
