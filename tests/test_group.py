"""Sums over processes: which way they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dsbd_cli import exchange
from dsbd_cli.group import Group


def test_small_sums_of_two_cards_take_the_short_way_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import distributed

    whole: list[Any] = []
    monkeypatch.setattr(distributed, "all_reduce", whole.append)
    group = Group(0, 2, ("cuda:0", "cuda:1"))
    group.exchange = SimpleNamespace(takes=lambda x: x.numel() < 4, sum=lambda x: 2 * x)  # type: ignore[assignment]
    assert group.sum(torch.ones(3)).tolist() == [2, 2, 2]
    assert not whole
    assert group.sum(torch.ones(4)) is whole[0]


def test_sums_that_are_normed_take_the_short_way_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import distributed

    monkeypatch.setattr(distributed, "all_reduce", lambda x: x.mul_(2))
    group = Group(0, 2, ("cuda:0", "cuda:1"))

    def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    weight = torch.tensor([1.0, 3.0])
    whole = group.normed_sum(torch.ones(1, 2), weight, 0.0, rms)
    assert [part.tolist() for part in whole] == [[[2, 2]], [[1, 3]]]
    group.exchange = SimpleNamespace(  # type: ignore[assignment]
        takes=lambda x: False,
        takes_rows=lambda x: len(x) < 2,
        normed_sum=lambda x, weight, eps: ("sum", "normed"),
    )
    assert group.normed_sum(torch.ones(1, 2), weight, 0.0, rms) == ("sum", "normed")
    assert group.normed_sum(torch.ones(2, 2), weight, 0.0, rms)[0].tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("cards", [(), ("cuda:0", "cuda:1", "cuda:2")])
def test_only_two_cards_of_one_host_have_it(cards: tuple[str, ...]) -> None:
    assert exchange.exchange(cards, 0, lambda number: number) is None


@pytest.mark.parametrize(("reach", "made"), [(False, True), (True, False), (True, True)])
def test_both_have_it_or_neither(monkeypatch: pytest.MonkeyPatch, reach: bool, made: bool) -> None:
    """What fails here, or on the other card, is no error: NCCL sums then."""
    import torch

    asked: list[int] = []

    def least(number: int) -> int:
        asked.append(number)
        return number

    def one() -> str:
        if not made:
            raise RuntimeError("no memory is shared here")
        return "exchange"

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: reach)
    monkeypatch.setattr(exchange, "Exchange", one)
    found = exchange.exchange(("cuda:0", "cuda:1"), 1, least)
    assert found == ("exchange" if reach and made else None)
    assert asked == [int(reach), *([int(made)] if reach else [])]


def test_sums_of_nothing_and_of_halves_of_words_are_left_to_nccl():
    import torch

    class OnACard(torch.Tensor):
        """One that says so, with its memory here."""

        is_cuda = True

    takes = exchange.Exchange.__new__(exchange.Exchange).takes
    x = torch.zeros(6, 5, dtype=torch.bfloat16).as_subclass(OnACard)
    assert takes(x)
    assert takes(x[2:4])
    assert not takes(x[1:3])  # from the middle of a word on
    assert not takes(x[:3])
    assert not takes(x[:0])  # the other card may still be reading what the next but one writes over
