"""The device decides what the host decides, whatever the settings: sizes, widths, rules and ends drawn at random."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dsbd_cli.settings import Settings
from tests.decoding.device.helpers import EOS, told, trees


def drawn(seed: int) -> tuple[Settings, dict[str, Any]]:
    """Settings, and what a run under them is given."""
    rng = random.Random(seed)
    width = rng.randint(1, 7)
    draws = rng.choice(["iid", "iid", "distinct"])
    rules = ["auto"] if draws == "distinct" else ["auto", "paper", "distinct"]
    settings = Settings(
        verify=rng.choice(["paper", "paper", "continue", "cover"]),
        width=width,
        draft_width=rng.randint(1, 8),
        gamma=rng.randint(1, 5),
        draws=draws,
        top_k=rng.choice([1, 2, 3, 5, 10, 20]),
        top_p=rng.choice([0.3, 0.8, 0.95, 1.0]),
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.5, 2.5]),
        min_width=rng.randint(1, width),
        threshold=rng.choice([None, 0.2, 0.5, 0.7, 0.9, 0.99, 1.0]),
        width_rule=rng.choice(rules),
        kv=rng.choice(["all", "all", "one"]),
        early_stopping=rng.choice(["first", "heuristic", "never"]),
        forest="full",
    )
    eos = rng.choice([EOS, [], list(range(5, 25))])
    return settings, {"seed": rng.randrange(1000), "budget": rng.choice([1, 2, 5, 12]), "eos": eos}


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_random_settings_are_verified_as_the_host_verifies_them(pair, first):
    device, host = trees(pair, True), trees(pair, None)
    for seed in range(first, first + 15):
        settings, more = drawn(seed)
        got, wanted = (told(models, settings, **more) for models in (device, host))
        assert device.choice.engine is not None, settings
        assert got[1] == wanted[1], settings
        if settings.verify == "cover":
            # A layer from the one beam that is kept is of the same iteration here, of one more on the host.
            assert settings.kv == "one" or got[0] == wanted[0], settings
            assert got[2] == wanted[2], settings
        else:
            assert got[0] == wanted[0], settings
            assert got[2] == wanted[2] + wanted[4], settings
    assert not device.notes
