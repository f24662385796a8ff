"""`cover` with a fixed width, beam sampling and multinomial sampling where the device verifies (`chain`).

Draws the layers that `cover_layers` draws, from the same uniforms; the device is one iteration ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsbd_cli.decoding.law.verification import Verified
from dsbd_cli.decoding.methods.dsbd import Run
from dsbd_cli.decoding.tree.events import Iteration, Layer

if TYPE_CHECKING:
    from dsbd_cli.decoding.device.pipeline import Chain


def chained(run: Run, chain: Chain) -> Iterator[Layer | Iteration]:
    """Iterations from the active set on, until the stop rules hold or the chain ends."""
    while chain.flying:
        active = run.hypotheses.active
        chain.ahead(active, landed=False)
        landed = chain.land()
        drafted = len(landed.forest.layers)
        whole = True
        for depth, (slots, known) in enumerate(landed.layers):
            if depth < drafted:
                # A finished sequence needs no node of the forest.
                verdicts = tuple(
                    node.finish is not None or inside for node, inside in zip(slots, known, strict=True)
                )
                yield run.commit(slots, Verified((), verdicts, all(verdicts)), depth)
            else:
                yield run.commit(slots)
            # The device has_logits nothing of stop strings and budgets.
            whole = not run.hypotheses.stopped() and all(node.finish in (None, "eos") for node in slots)
            if not whole:
                break
        if whole and not chain.flying:
            chain.ahead(run.hypotheses.active, landed=True)
        chain.settle(whole)
        yield from run.finish_iteration(landed.forest)
