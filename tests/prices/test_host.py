"""The host's share of batches beside a device: told apart by request, layer and node, kept, and used for forests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding.device.cover_host import CoverHost
from dsbd_cli.decoding.device.iteration import CoverIteration
from dsbd_cli.decoding.forward import capture
from dsbd_cli.decoding.tree.sequences import Hypotheses
from dsbd_cli.many import Batch
from dsbd_cli.prices import Prices, host, store
from dsbd_cli.prices.host import HostPrices, Sample, fitted
from dsbd_cli.settings import Settings
from tests import builders
from tests.prices.test_iteration import DRAFT, TARGET


def samples(request: float, forest: float, layer: float, node: float) -> list[Sample]:
    counts = ((1.0, 0), (3.7, 64), (1.1, 64), (2.0, 8))
    return [
        Sample(layers, nodes, request + layer * layers + (forest + node * nodes if nodes else 0.0))
        for layers, nodes in counts
    ]


@pytest.mark.parametrize(
    "ms",
    [
        (0.15, 0.1, 0.15, 0.01),
        (0.0, 0.0, 0.2, 0.005),
        (0.2, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.3),
        (0.1, 0.2, 0.0, 0.0),
    ],
)
def test_what_each_costs_is_told_apart(ms: tuple[float, float, float, float]) -> None:
    given = [one for one in samples(*ms) if one.ms > 0]
    assert fitted(given, "").ms == pytest.approx(ms, abs=1e-9)


def test_nothing_costs_less_than_nothing() -> None:
    found = fitted([Sample(1.0, 0, 0.3), Sample(3.7, 64, 0.2), Sample(1.1, 64, 0.25)], "noise")
    assert min(found.ms) == 0
    assert max(found.ms) == pytest.approx(0.24, abs=0.05)
    with pytest.raises(ValueError, match="no samples"):
        fitted([], "")


def test_they_are_what_was_written() -> None:
    busy = HostPrices(0.15, 0.1, 0.14, 0.01, "measured once", "others were at work")
    assert HostPrices.from_dict(busy.to_dict()) == busy
    prices = HostPrices(0.15, 0.1, 0.14, 0.01, "measured once")
    assert HostPrices.from_dict(prices.to_dict()) == prices
    assert prices.describe() == (
        "measured once; ms of the host: 0.15 a request, 0.1 a forest, 0.14 a layer, 0.01 a node"
    )
    for change in ({"format": 1}, {"layer": -1.0}, {"node": "x"}, {"request": None}):
        with pytest.raises(ValueError, match=r".+"):
            HostPrices.from_dict(prices.to_dict() | change)
    for wrong in (None, [], {}):
        with pytest.raises(ValueError, match=r".+"):
            HostPrices.from_dict(wrong)


def test_the_hosts_own_code_is_timed_and_no_step_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves by given times for a request, a layer and a node, and by much for the device's steps."""
    now = [0.0]

    def costs(place: Any, name: str, seconds: Callable[..., float]) -> None:
        real = getattr(place, name)

        def spends(self: Any, *given: Any) -> Any:
            now[0] += seconds(*given)
            return real(self, *given)

        monkeypatch.setattr(place, name, spends)

    costs(CoverIteration, "_steps", lambda *_: 100.0)
    costs(CoverHost, "committed", lambda *_: 2e-3)
    costs(Hypotheses, "commit", lambda *_: 1e-3)
    costs(CoverHost, "_numbers", lambda _, __, layers: 1e-5 * sum(len(one.draws) for one in layers))
    monkeypatch.setattr(capture.time, "perf_counter", lambda: now[0])
    found = host.measure(rounds=4, clock=lambda: now[0])
    assert found.ms == pytest.approx((2.0, 0.0, 1.0, 0.01), rel=0.02, abs=0.02)


# Kept, and used.


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DSBD_PRICES", raising=False)
    builders.rand(tmp_path / "t")
    builders.rand(tmp_path / "d", seed=1)
    decoder = Decoder.from_pair(tmp_path / "t", tmp_path / "d", device="cpu", dtype="float32")
    monkeypatch.setattr(decoder.prices, "captured", lambda *_: Prices(TARGET, DRAFT))
    return decoder


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[HostPrices]:
    """What measuring gives, the next first; taken from the list as it is asked for."""
    given = [HostPrices(0.01, 0.0, 0.01, 0.0, "quick"), HostPrices(0.5, 0.0, 0.5, 1.0, "slow")]
    monkeypatch.setattr(host, "measure", lambda: given.pop(0))
    return given


def forest(decoder: Decoder, **more: Any) -> tuple[int, int]:
    """gamma and W_S of a batch of 4."""
    settings = Settings(width=4, draft_width=8, gamma=4, threshold=None, **more)
    with Batch(decoder, 4) as batch:
        plan = decoder.plan("hello", settings)
        batch._coming.append((0, plan))
        batch._iterations.follow(4, more=True, over=False)
        batch._admit()
        (member,) = batch._joined
        found = batch._iterations._fit(member.kind, settings, 4)
        return found.gamma, found.draft_width


def test_forests_of_a_batch_follow_the_hosts_measured_share(
    decoder: Decoder, measured: list[HostPrices]
) -> None:
    quick = forest(decoder)
    assumed = forest(decoder, prices="off")
    assert quick == (4, 8)  # full: a quick host is taken at its word
    assert assumed == (3, 6)
    assert len(measured) == 1
    again = Decoder(decoder.pair)
    again.prices.captured = decoder.prices.captured  # type: ignore[method-assign]
    assert forest(again) == quick  # from the file
    assert len(measured) == 1
    for path, _, found in [*store.listed_of(host.KIND)]:
        assert found.origin == "quick"
        path.unlink()
    slow = Decoder(decoder.pair)
    slow.prices.captured = decoder.prices.captured  # type: ignore[method-assign]
    assert forest(slow)[0] == 0
    assert not measured


def test_where_it_is_not_measured_the_share_of_another_machine_counts(
    decoder: Decoder, measured: list[HostPrices], monkeypatch: pytest.MonkeyPatch
) -> None:
    assumed = forest(decoder, prices="off")
    assert assumed == (3, 6)
    monkeypatch.setenv("DSBD_PRICES", "off")
    assert forest(decoder) == assumed
    assert decoder.prices.host(Settings(forest="full")) is None
    assert len(measured) == 2
