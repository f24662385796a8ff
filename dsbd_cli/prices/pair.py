"""The prices of a loaded pair: those that settings name, found once for each way of asking."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from dsbd_cli.decoding import HfTreeModel
from dsbd_cli.errors import UserError
from dsbd_cli.group import Group, group_of
from dsbd_cli.paths import expanded
from dsbd_cli.prices import host, store
from dsbd_cli.prices.host import HostPrices
from dsbd_cli.prices.measure import facts_of, measure
from dsbd_cli.prices.store import AUTO, OFF, VARIABLE
from dsbd_cli.prices.table import Prices
from dsbd_cli.settings import Settings

ONCE = "measuring what a forward costs on this machine (once; dsbd doctor shows it)"


class PairPrices:
    """Prices of one loaded pair.

    Args:
        target, draft: prefilled again after a `look_up` that measures.
        taken: called where that is about to be: whoever decodes with them has lost what they hold.
    """

    def __init__(
        self, target: HfTreeModel, draft: HfTreeModel | None, taken: Callable[[], None] = lambda: None
    ) -> None:
        self._target, self._draft, self._taken = target, draft, taken
        self._found: dict[str, store.Kept] = {}
        self._captured: store.Kept | None = None
        self._host: tuple[HostPrices | None] | None = None
        self._facts: dict[str, Any] | None = None

    def wanted(self, settings: Settings) -> bool:
        """Whether these settings' forests follow prices: adaptive ones that the host drafts."""
        drafts = (
            settings.method in ("dsbd", "speculative") and settings.gamma > 0 and settings.forest != "full"
        )
        return drafts and self._draft is not None and not self._target.captured

    def announcement(self, settings: Settings) -> str | None:
        """What to say before a `look_up` that takes a second or two; None where it takes none."""
        name = _name(settings)
        if not self.wanted(settings) or name != AUTO or name in self._found or self._in_parts():
            return None
        return None if store.path_of(self.facts()).exists() or not store.can_keep() else ONCE

    def look_up(self, settings: Settings) -> store.Kept:
        """The prices for these settings, and notes; None where all forests are to be full.

        Raises:
            UserError: a file that holds no prices.
        """
        if not self.wanted(settings):
            return store.Kept(None)
        name = _name(settings)
        if name not in self._found:
            self._found[name] = self._look_up(name)
            return self._found[name]
        return store.Kept(self._found[name].prices)

    def measured(self, *, again: bool = False, force: bool = False) -> store.Kept:
        """Measured prices, those of the cache folder where there are some; None where they cannot be kept.

        Args:
            again: measure anew, beside a device the host's share of batches too.
            force: as for `store.found_or_measured`.
        """
        notes: tuple[str, ...] = ()
        if again and self._target.captured:
            host_prices, notes = self._measured_host(again=True, force=force)
            self._host = (host_prices,)
        found = store.kept_or_measured(self.facts(), self._measured, again=again, force=force)
        self._found[AUTO] = found
        return store.Kept(found.prices, (*notes, *found.notes))

    def captured(self, settings: Settings, measure: Callable[[], Prices]) -> Prices | None:
        """Prices of iterations that run on the device for many requests; None where forests are to be full.

        Args:
            measure: takes a few seconds, once a machine and pair.
        """
        name = _name(settings)
        if settings.forest == "full" or name == OFF:
            return None
        if name != AUTO:
            return store.read_given(expanded(name))
        if self._captured is None:
            facts = self.facts() | {"captured": "many requests"}
            if self._in_parts():
                self._captured = store.Kept(_agreed(group_of(self._target.model), facts, measure))
            else:
                self._captured = store.kept_or_measured(facts, measure)
        return self._captured.prices

    def host(self, settings: Settings) -> HostPrices | None:
        """What the host's share of such iterations costs this machine; None where it is not to be measured, or cannot.

        Measured once a machine, whatever the pair; of several processes that hold the target the first says it.
        """
        if settings.forest == "full" or _name(settings) != AUTO:
            return None
        if self._host is None:
            self._host = (self._measured_host()[0],)
        return self._host[0]

    def _measured(self) -> Prices:
        models = [model for model in (self._target, self._draft) if model is not None]
        self._taken()
        for model in models:
            model.whole = False
        prices = measure(self._target, self._draft)
        for model in models:
            model.whole = True
        return prices

    def _measured_host(
        self, *, again: bool = False, force: bool = False
    ) -> tuple[HostPrices | None, tuple[str, ...]]:
        """They, and notes."""

        def found() -> tuple[HostPrices | None, tuple[str, ...]]:
            return store.found_or_measured(host.KIND, host.facts(), host.measure, again=again, force=force)

        if not self._in_parts():
            return found()
        group = group_of(self._target.model)
        mine, notes = found() if group.first else (None, ())
        said = group.agreed(None if mine is None else mine.to_dict())
        return None if said is None else HostPrices.from_dict(said), notes

    def facts(self) -> dict[str, Any]:
        """What these prices depend on."""
        if self._facts is None:
            self._facts = facts_of(self._target, self._draft)
        return self._facts

    def _look_up(self, name: str) -> store.Kept:
        assert self._draft is not None
        if name not in (AUTO, OFF):
            prices = store.read_given(expanded(name))
            if prices.draft is None:
                raise UserError(f"prices {name} were measured without a draft")
            return store.Kept(prices)
        found = store.Kept(None) if name == OFF or self._in_parts() else self.measured()
        if found.prices is None:
            return store.Kept(self._target.assumed_prices(self._draft), found.notes)
        return found

    def _in_parts(self) -> bool:
        """Whether several processes hold the target together: one alone cannot measure a forward."""
        return group_of(self._target.model).size > 1


def _agreed(group: Group, facts: dict[str, Any], measure: Callable[[], Prices]) -> Prices | None:
    """The first process's prices for all: kept ones, or those that all measure together."""
    kept = group.agreed(_dict(store.kept(facts)) if group.first else None)
    if kept is None:
        measured = measure()
        kept = group.agreed(
            _dict(store.kept_or_measured(facts, lambda: measured).prices) if group.first else None
        )
    return None if kept is None else Prices.from_dict(kept)


def _dict(prices: Prices | None) -> dict[str, Any] | None:
    return None if prices is None else prices.to_dict()


def _name(settings: Settings) -> str:
    return (os.environ.get(VARIABLE) or AUTO) if settings.prices == AUTO else settings.prices
