"""What `start` makes of settings."""

from __future__ import annotations

import pytest

from dsbd_cli.decoding.methods.setup import forest_mass
from tests.decoding.harness import settings_for
from tests.decoding.reference import T


def test_only_fixed_width_covers_are_pruned():
    given = {"method": "dsbd", "verify": "cover", "width": 4}
    assert forest_mass(settings_for(T(1.0, 10, 0.8), **given)) == pytest.approx(0.9)
    assert forest_mass(settings_for(T(1.0, 10, 1.0), **given)) == 1
    assert forest_mass(settings_for(T(0.0, 10, 0.8), **given)) == 1
    assert forest_mass(settings_for(T(1.0, 10, 0.8), **(given | {"threshold": 0.9}))) == 1
    assert forest_mass(settings_for(T(1.0, 10, 0.8), **(given | {"verify": "paper"}))) == 1
