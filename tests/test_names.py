"""A misspelt name is answered by what is near, wherever it is given."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import UserError
from dsbd_cli.loading.spec import PairSpec
from dsbd_cli.settings import FIELDS, Settings

WIDTH = "unknown setting 'widht' (did you mean width?)"
DRAFT = "unknown option 'darft' of a pair (did you mean draft?)"
WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "settings": (lambda: Settings(widht=4), WIDTH),  # type: ignore[call-arg]
    "replaced": (lambda: dataclasses.replace(Settings(), widht=4), WIDTH),  # type: ignore[call-arg]
    "merged": (lambda: Settings().merged({"widht": 4}), WIDTH),
    "far from all": (lambda: Settings(zzz=4), "unknown setting 'zzz'"),  # type: ignore[call-arg]
    "pair": (lambda: PairSpec("a", darft="b"), DRAFT),  # type: ignore[call-arg]
    "pair replaced": (lambda: PairSpec("a").replace(darft="b"), DRAFT),
    "decoder": (lambda: Decoder.from_pair("a", "b", darft="b"), DRAFT),
    "preset": (lambda: Decoder.from_preset("smol", darft="b"), DRAFT),
}


@pytest.mark.parametrize("how", WRONG)
def test_an_unknown_name_is_told_with_what_is_near(how: str) -> None:
    call, said = WRONG[how]
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value) == said


def test_the_records_are_still_what_they_were() -> None:
    settings = Settings("beam", width=3)
    assert (settings.method, settings.width) == ("beam", 3)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert tuple(inspect.signature(Settings).parameters) == FIELDS  # what help() and editors show
