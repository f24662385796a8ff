"""A loaded pair and prompts as a bench for `search.tune`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from dsbd_cli.batch.items import item_seed
from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import Event, Finished, Iteration
from dsbd_cli.errors import UserError
from dsbd_cli.prices import Acceptance, Prices, beams_of
from dsbd_cli.prompts import Prompt
from dsbd_cli.result import Result
from dsbd_cli.settings import Settings
from dsbd_cli.tune.counts import Counts
from dsbd_cli.tune.search import DRAFT_WIDTHS, GAMMAS, Answer, Seen

_DEPTH, _WIDTH = max(GAMMAS), max(DRAFT_WIDTHS)


class PairBench:
    """Answers of one decoder to some prompts, with a seed a prompt.

    Args:
        tokens: the most tokens of an answer.
        note: told what a user should know of the prices.
    """

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Prompt], tokens: int, note: Callable[[str], None]
    ) -> None:
        self._decoder, self._prompts, self._tokens, self._note = decoder, prompts, tokens, note
        self.prompts = len(prompts)

    def prices(self) -> Prices:
        """Measured now and kept for later runs, but for those of a calm moment where the machine is busy now.

        Raises:
            UserError: the cache folder cannot be written.
        """
        found = self._decoder.prices.measured(again=True)
        if found.prices is None:
            raise UserError("the cache folder cannot be written: prices measured now would not be used later; "
                            "set DSBD_CACHE to a folder that can")  # fmt: skip
        for line in found.notes:
            self._note(self._decoder.named(line))
        return found.prices

    def look(self, settings: Settings) -> Seen:
        width = settings.beams
        drawn = settings.method == "speculative" or (
            settings.verify != "cover" and not settings.deterministic
        )
        # A dynamic width's law depends on its layer: that is left as it is.
        fixed = settings.threshold is None or settings.min_width == settings.width
        most = settings.draft_width if width == 1 or not fixed else max(_WIDTH, settings.draft_width)
        first = Acceptance.assumed(
            beams_of(settings), _DEPTH, 1 if width == 1 else most, least=width if drawn else 1
        )
        counts = Counts(first, drawn=drawn)
        wide = settings.merged({"gamma": _DEPTH, "draft_width": most, "forest": "full"})
        results = []
        for place in range(self.prompts):
            for event in self._stream(wide, place):
                if isinstance(event, Iteration):
                    counts.add(event)
                elif isinstance(event, Finished):
                    results.append(event.result)
        tokens = statistics.mean(result.stats.new_tokens for result in results)
        if not tokens:
            raise UserError("every answer to these prompts is empty: there is nothing to tune")
        prefill = statistics.mean(result.stats.prefill_s or 0.0 for result in results)
        return Seen(counts.acceptance(), tokens, 1e3 * prefill)

    def answer(self, settings: Settings, prompt: int) -> Answer:
        result: Result | None = None
        for event in self._stream(settings, prompt):
            if isinstance(event, Finished):
                result = event.result
        assert result is not None
        stats = result.stats
        seconds = (stats.prefill_s or 0.0) + (stats.decode_s or 0.0)
        return Answer(stats.new_tokens, seconds, result.beams[0].logprob)

    def _stream(self, settings: Settings, place: int) -> Iterator[Event]:
        seed = item_seed(settings.seed or 0, place)
        budget = min(settings.max_new_tokens, self._tokens)
        given = settings.merged({"seed": seed, "max_new_tokens": budget, "num_return": 1})
        return self._decoder.stream(self._prompts[place], given, energy=False)
