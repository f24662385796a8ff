"""The pairs of tables that the laws of whole runs are checked on."""

from __future__ import annotations

from tests.decoding.reference import T
from tests.decoding.table_model import PathLaw, by_path, mixed, split

EOS = (3,)
OFF, ON, TWO, HEAD = T(), T(0.9, 3, 0.97), T(0.9, 2, 0.97), T(0.7, 0, 0.8)

# Chosen among random laws for its bite: under T = TWO every stop rule gives another law (by 0.19),
# and both ways of mistreating draws under dead parents show (by 0.09); see methods/test_errata.py.
TARGET = by_path(47, 4)
OTHER = by_path(2, 4, spread=2.0)

# (target, draft). `disjoint`: the draft never proposes what the target can say.
DRAFTS: dict[str, tuple[PathLaw, PathLaw]] = {
    "good": (TARGET, mixed(TARGET, OTHER, 0.2)),
    "equal": (TARGET, TARGET),
    "bad": (TARGET, OTHER),
    "disjoint": (split(TARGET, (0, 3), True), split(OTHER, (0, 3), False)),
    "holes": (by_path(5, 4, zeros=0.4), by_path(6, 4, zeros=0.4)),
}
