"""Watches a stream of events and says at any moment what the panels should show.

Taking in an event costs microseconds; the text of the live beams is only put together when a
`snapshot` is asked for, and then only the part on which they differ.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from dsbd_cli.decoding import Event, Iteration, Layer, Node, Notice, Prefilled, Text, common_ancestor
from dsbd_cli.setting_text import describe
from dsbd_cli.settings import DRAFTING
from dsbd_cli.tally import NO_FOREST_PAYS, Tally, ratio
from dsbd_cli.ui.charts import counts, resample
from dsbd_cli.ui.snapshot import POINTS, LiveBeam, Series, Snapshot
from dsbd_cli.wording import said

if TYPE_CHECKING:
    from dsbd_cli.decoder import Decoder

_TAIL = 6000  # characters of the answer sent: more than any terminal shows
_CONTEXT = 16  # tokens decoded before a beam's own ones, so that spaces and accents come out right
_LONGEST = 400  # tokens of a beam's own text that are looked at
_STRIDE = 64  # tokens after which the point that text is decoded from moves on
_BEAMS = 8
_HALF = "\ufffd"  # what a character is shown as that is not whole yet


class Monitor:
    """The running numbers of one prompt.

    Args:
        decoder: gives the text of beams, the models' names and the live KV numbers.
        prompt: as the user wrote it, for the title.
    """

    def __init__(self, decoder: Decoder, prompt: str, clock: Any = time.perf_counter) -> None:
        self._decoder, self._prompt, self._clock = decoder, prompt, clock
        self._settings = decoder.settings
        self._tally = Tally()
        self._rates: list[float | None] = []
        self._calls: list[int] = []
        self._finished: list[Node] = []
        self._anchor: tuple[Node | None, int] = (None, 0)
        self._since: float | None = None
        self._prompt_tokens = 0
        self.active: list[Node] = []
        self.confirmed = ""
        self.notes: list[str] = []

    def see(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Layer):
            self._tally.add(event)
            self._finished += [node for node in dict.fromkeys(event.draws) if node.finish is not None]
        elif isinstance(event, Iteration):
            self.active = list(event.active)
            self._calls.append(len(event.layers))
            examined = sum(layer.examined for layer in event.layers)
            self._rates.append(ratio(sum(layer.accepted for layer in event.layers), examined))
        elif isinstance(event, Text):
            self.confirmed += event.new
        elif isinstance(event, Notice):
            self.notes.append(event.text)
        elif isinstance(event, Prefilled):
            self._prompt_tokens = len(event.prompt_ids)
            self._since = self._clock()

    @property
    def tokens(self) -> int:
        """Length of the best sequence so far."""
        best = self._best()
        return 0 if best is None else best.depth

    def contested(self) -> str:
        """What the best sequence so far says after the confirmed text; may still change."""
        best = self._best()
        if best is None:
            return ""
        self._move_anchor()
        anchor, chars = self._anchor
        if anchor is None or best.depth < anchor.depth or common_ancestor([anchor, best]) is not anchor:
            anchor, chars = None, 0
        text = self._after(anchor, best)
        return text[max(0, len(self.confirmed) - chars) :].rstrip(_HALF)

    def _move_anchor(self) -> None:
        """Keep the anchor, up to which the text's length is known, close behind the live beams."""
        rivals = list(self.active)
        if self._finished:
            rivals.append(max(self._finished, key=self._score))
        base = common_ancestor(rivals) if rivals else None
        anchor, chars = self._anchor
        if base is None or base.depth - (anchor.depth if anchor else 0) < _STRIDE:
            return
        if anchor is not None and common_ancestor([anchor, base]) is not anchor:
            return
        text = self._after(anchor, base)
        # Never past the confirmed text: what follows the anchor is all that `contested` looks at.
        if not text.endswith(_HALF) and chars + len(text) <= len(self.confirmed):
            self._anchor = base, chars + len(text)

    def _after(self, anchor: Node | None, node: Node) -> str:
        """Text of `node` behind `anchor` (an ancestor, or None for the beginning)."""
        if anchor is None:
            return self._decoder.detokenize(node.tokens())
        before = anchor.tail(_CONTEXT)
        text = self._decoder.detokenize(node.tail(len(before) + node.depth - anchor.depth))
        return text[len(self._decoder.detokenize(before)) :]

    def snapshot(self) -> Snapshot:
        """The picture now."""
        settings, decoder = self._settings, self._decoder
        seconds = 0.0 if self._since is None else self._clock() - self._since
        tokens = self.tokens
        drawn = [float(width) for width in self._tally.widths]
        distinct = [float(width) for width in self._tally.distinct]
        # What the caches held before the prompt was another run's.
        slots, size = kv_in_use(decoder) if self._since is not None else (None, 0)
        return Snapshot(
            models=model_names(decoder),
            method=describe(vars(settings)),
            prompt=self._prompt[:500],
            prompt_tokens=self._prompt_tokens,
            confirmed=self.confirmed[-_TAIL:],
            contested=self.contested(),
            beams=self._beams(),
            acceptance=_series(self._rates, self._acceptance()),
            by_depth=[ratio(accepted, examined) for examined, accepted in self._tally.by_depth],
            undrafted=self._undrafted(),
            drawn=_series(drawn),
            distinct=_series(distinct),
            histogram=[list(pair) for pair in counts(self._tally.widths)],
            width=max([1, *self._tally.widths]),
            layers_per_call=_series([float(count) for count in self._calls]),
            tokens=tokens,
            budget=settings.max_new_tokens,
            seconds=seconds,
            tokens_per_s=ratio(tokens, seconds),
            kv_slots=slots,
            kv_bytes=size,
            notes=self.notes[-3:],
        )

    def _undrafted(self) -> str:
        """Why there is no drafted layer to show."""
        settings = self._settings
        if settings.method not in DRAFTING:
            return f"method {settings.method} drafts nothing"
        if settings.method != "specinfer" and settings.gamma == 0:
            return "gamma 0 drafts nothing"
        adaptive = settings.method != "specinfer" and settings.forest == "adaptive"
        # A full forest begins with the first iteration; of an adaptive one prices decide.
        return said(NO_FOREST_PAYS) if adaptive and self._calls else "nothing drafted yet"

    def _acceptance(self) -> float | None:
        examined = sum(pair[0] for pair in self._tally.by_depth)
        return ratio(sum(pair[1] for pair in self._tally.by_depth), examined)

    def _score(self, node: Node) -> float:
        return node.score / node.depth**self._settings.length_penalty if node.depth else 0.0

    def _best(self) -> Node | None:
        return max([*self._finished, *self.active], key=self._score, default=None)

    def _beams(self) -> list[LiveBeam]:
        if not self.active:
            return []
        top = max(node.score for node in self.active)
        weights = [math.exp(node.score - top) for node in self.active]
        total = sum(weights)
        base = common_ancestor(self.active)
        decode = self._decoder.detokenize
        # The context may begin within a character, and the beams part within one.
        before = decode(base.tail(_CONTEXT)).rstrip(_HALF)
        beams = []
        for node, weight in zip(self.active, weights, strict=True):
            own = node.depth - base.depth
            text = decode(node.tail(min(_LONGEST, own) + min(_CONTEXT, base.depth)))
            # A lone beam, or one that agrees so far, shows its last words instead of nothing.
            text = text.removeprefix(before) if own else text
            beams.append(LiveBeam(weight / total, text.strip(_HALF)))
        return sorted(beams, key=lambda beam: -beam.share)[:_BEAMS]


def _series(values: list[Any], mean: float | None = None) -> Series:
    known = [value for value in values if value is not None]
    average = mean if mean is not None else ratio(sum(known), len(known))
    return Series(values[-1] if values else None, average, resample(values, POINTS))


def model_names(decoder: Decoder) -> str:
    """`target + draft`, by the last part of their names."""
    found = [entry["name"] for entry in decoder.models().values() if entry is not None]
    return " + ".join(str(name).rstrip("/").split("/")[-1] for name in found)


def kv_in_use(decoder: Decoder) -> tuple[int | None, int | None]:
    """(slots of the target, bytes of target and draft) in use at most since the prompt; None if unknown."""
    target = decoder.target
    drafting = decoder.settings.method in ("dsbd", "speculative", "specinfer")
    caches = [target, *([decoder.draft] if drafting and decoder.draft is not None else [])]
    return target.slots_peak, sum(cache.bytes_peak for cache in caches)
