"""Writes down a run while it happens: one JSON line a moment, the result last.

Lines, by `type`: `start` (models, settings, prompt), `iteration` (the live beams, every node of
the draft forest and of the committed layers, the layers), `notice`, `finished` (the result).
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dsbd_cli.decoding import Event, Finished, Iteration, Layer, Node, Notice, Prefilled
from dsbd_cli.errors import UserError
from dsbd_cli.paths import make_parents, write_error
from dsbd_cli.version import __version__

if TYPE_CHECKING:
    from dsbd_cli.decoder import Decoder

FORMAT = 1


@contextlib.contextmanager
def record(events: Iterable[Event], path: Path, decoder: Decoder, prompt: str) -> Iterator[Iterable[Event]]:
    """The same events, written to `path` as they pass.

    A disk that fills up ends the record, not the run: its events go on.

    Raises:
        UserError: a file that cannot be written. RunError: when all is done, a record that could not be
            written to its end.
    """
    make_parents(path, "--trace")
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--trace {path} cannot be written: {error.strerror}") from None
    recorder = _Recorder(file, decoder, prompt)
    try:
        yield recorder.watch(events)
    finally:
        with contextlib.suppress(OSError):  # what a full disk did not take is still in its buffer
            file.close()
    if recorder.failed is not None:
        what = f"the end of the trace {path} (the answer is not touched by it)"
        raise write_error(what, recorder.failed) from recorder.failed


class _Recorder:
    """Numbers nodes as they are first seen, so that a later line can point at an earlier one's node."""

    def __init__(self, file: IO[str], decoder: Decoder, prompt: str) -> None:
        self._file, self._decoder, self._prompt = file, decoder, prompt
        settings = decoder.settings
        self._covers = settings.method == "dsbd" and (settings.verify == "cover" or settings.deterministic)
        self._ids: dict[Node, int] = {}
        self._count = self._next = 0
        self._active: list[Node] = []
        self.failed: OSError | None = None

    def watch(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Prefilled):
                self._write({"type": "start", "format": FORMAT, "dsbd": __version__, "prompt": self._prompt,
                             "prompt_tokens": len(event.prompt_ids), "models": self._decoder.models(),
                             "settings": self._decoder.settings.to_dict()})  # fmt: skip
            elif isinstance(event, Notice):
                self._write({"type": "notice", "text": event.text})
            elif isinstance(event, Iteration):
                self._count += 1
                self._write(self._iteration(event))
                self._active = list(event.active)
            elif isinstance(event, Finished):
                self._write({"type": "finished", "result": event.result.to_dict()})
            yield event

    def _write(self, entry: dict[str, Any]) -> None:
        # Not allow_nan: a drafted node has no score of the target's, which is null and not NaN.
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n"
        if self.failed is not None:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self.failed = error

    def _iteration(self, event: Iteration) -> dict[str, Any]:
        roots = self._active or _parents(event)
        chances = _chances(event)
        drafted = Counter(node for layer in event.forest.layers for node in layer.draws)
        fates = _Fates.of(event, drafted, self._covers)
        nodes = list(dict.fromkeys([*drafted, *(node for layer in event.layers for node in layer.draws)]))
        nodes.sort(key=lambda node: node.depth)
        kept = set(event.active)
        # Only nodes of this iteration and the beams it begins with are ever pointed at from here on.
        self._ids = {node: self._ids[node] for node in roots if node in self._ids}
        return {
            "type": "iteration",
            "n": self._count,
            "beams": [self._beam(node) for node in roots],
            "nodes": [
                {
                    "id": self._id(node),
                    "parent": self._id(node.parent) if node.parent is not None else None,
                    "token": node.token,
                    "text": self._decoder.detokenize([node.token]),
                    "depth": node.depth,
                    "q": chances.get(node),
                    "drafted": drafted[node],
                    "accepted": fates.accepted[node],
                    "rejected": fates.rejected[node],
                    "filled": fates.filled[node],
                    "score": None if node.score != node.score else node.score,
                    "logp": _logp(node),
                    "finish": node.finish,
                    "live": node in kept,
                }
                for node in nodes
            ],
            "layers": [self._layer(layer) for layer in event.layers],
        }

    def _id(self, node: Node) -> int:
        if node not in self._ids:
            self._ids[node] = self._next
            self._next += 1
        return self._ids[node]

    def _beam(self, node: Node) -> dict[str, Any]:
        text = self._decoder.detokenize(node.tail(24))
        return {"id": self._id(node), "depth": node.depth, "score": node.score, "tail": text}

    def _layer(self, layer: Layer) -> dict[str, Any]:
        return {
            "width": len(layer.draws),
            "distinct": layer.distinct,
            "examined": layer.examined,
            "accepted": layer.accepted,
            "drafted": layer.drafted,
            "passed": layer.passed,
            "slots": [self._id(node) for node in layer.draws],
        }


def _parents(event: Iteration) -> list[Node]:
    """The beams that the first iteration began with."""
    draws = event.layers[0].draws if event.layers else ()
    return list(dict.fromkeys(node.parent for node in draws if node.parent is not None))


def _chances(event: Iteration) -> dict[Node, float]:
    """q of every drafted node: what it was drawn with (`cover`: what it was chosen by)."""
    found: dict[Node, float] = {}
    for layer in event.forest.layers:
        place = {node: i for i, node in enumerate(layer.parents)}
        chance = {
            (int(parent), int(token)): float(prob)
            for parent, token, prob in zip(layer.support.parent, layer.support.token, layer.support.prob, strict=True)
        }  # fmt: skip
        for node in layer.draws:
            if node.parent in place and (key := (place[node.parent], node.token)) in chance:
                found[node] = chance[key]
    return found


@dataclass
class _Fates:
    """How often each node was an accepted draft, a refused one, and a draw of the target's own.

    `paper` and `continue` put accepted draws first in a layer and filled ones after them. Where the
    forest `covers`, every draw is the target's own: one that was drafted counts as accepted, and a
    drafted node that no draw fell on as refused.
    """

    accepted: Counter[Node] = field(default_factory=Counter)
    rejected: Counter[Node] = field(default_factory=Counter)
    filled: Counter[Node] = field(default_factory=Counter)

    @classmethod
    def of(cls, event: Iteration, drafted: Counter[Node], covers: bool) -> _Fates:
        fates = cls()
        for layer in event.layers:
            tested = layer.drafted is not None
            for place, node in enumerate(layer.draws):
                own = drafted[node] > 0 if covers else place < layer.accepted
                (fates.accepted if tested and own else fates.filled)[node] += 1
            draws = _draws(event, layer) if tested else []
            if covers:
                parents = {node.parent for node in layer.draws}
                unused = set(draws) - set(layer.draws)
                fates.rejected.update(node for node in unused if node.parent in parents)
            else:
                verdicts = zip(draws, layer.verdicts, strict=False)
                fates.rejected.update(node for node, accepted in verdicts if not accepted)
        return fates


def _draws(event: Iteration, layer: Layer) -> list[Node]:
    """The draws that a committed layer was tested against, in order."""
    parents = {node.parent for node in layer.draws}
    found = [drafted for drafted in event.forest.layers if parents & set(drafted.parents)]
    return found[0].draws if found else []


def _logp(node: Node) -> float | None:
    """The target's raw log-probability of the node's token; None where the target never drew it."""
    if node.parent is None or node.score != node.score or node.parent.score != node.parent.score:
        return None
    return node.score - node.parent.score
