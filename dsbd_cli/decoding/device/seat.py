"""A request's place in a pipeline, from its first iteration there to its last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsbd_cli.decoding.device.lanes import Lane
from dsbd_cli.decoding.device.pipeline import Pipeline
from dsbd_cli.decoding.model.protocol import Commit
from dsbd_cli.decoding.tree.request import Request
from dsbd_cli.decoding.tree.sequences import Forest, Node


class Seat:
    """A request's place in a `Pipeline` (`model.protocol.Engine`).

    Args:
        target, draft: the models that serve it: `HfTreeModel`s, or `RequestModel`s.
        forests: whether anybody looks at the forests; else they stay numbers, and the host's share of an
            iteration does not grow with them. With stop strings they are always looked at: a node may end by
            one, which the device cannot see.
    """

    def __init__(self, pipeline: Pipeline, target: Any, draft: Any, forests: bool = True) -> None:
        self.pipeline, self.target, self.draft = pipeline, target, draft
        self._forests = forests
        self._lane: Lane | None = None

    @property
    def forest(self) -> Forest:
        """What the last iteration drafted for this request."""
        return Forest() if self._lane is None else self._lane.forest

    def begin(self, request: Request, commit: Commit) -> bool:
        """Take a lane, if it has none."""
        if self._lane is None or not self.pipeline.has(self._lane):
            self._lane = self._joined(request, commit)
        return self._lane is not None

    def step(self) -> None:
        """One iteration for all who have a seat."""
        self.pipeline.step()

    def move(self, pipeline: Pipeline, draft: Any) -> None:
        """Go on in another pipeline; what is in flight for the request is dropped (`Pipeline.step`).

        Args:
            draft: the model as the request sees it, or None where nothing is drafted there.
        """
        lane = self._lane if self._lane is not None and self.pipeline.has(self._lane) else None
        self.leave()
        self.pipeline, self.draft = pipeline, draft
        if draft is not None:  # since it was last asked, most of what it knows has died
            draft.retain(() if lane is None else lane.request.hypotheses.active)
        if lane is not None:
            self._lane = self._joined(lane.request, lane.commit)

    def _joined(self, request: Request, commit: Commit) -> Lane | None:
        return self.pipeline.join(request, self.target, self.draft, commit, self._forests)

    def leave(self) -> None:
        """The request goes: nobody will ask for what is in flight for it."""
        if self._lane is not None:
            self.pipeline.leave(self._lane)
            self._lane = None

    def retain(self, leaves: Iterable[Node]) -> None:
        """Free every node that is neither one of `leaves` nor above one, in both trees."""
        leaves = list(leaves)
        for model in (self.target, self.draft):
            if model is not None:
                model.tree.retain(leaves)
