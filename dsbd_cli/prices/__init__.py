"""What forwards cost on this machine, and which forest is worth its price (docs/speed.md, prices)."""

from dsbd_cli.prices.forest import (
    Acceptance,
    Promise,
    Shape,
    beams_of,
    best_forest,
    best_iteration,
    distinct_beams,
    expected_layers,
    layers_per_ms,
)
from dsbd_cli.prices.table import Curve, Prices

__all__ = [
    "Acceptance",
    "Curve",
    "Prices",
    "Promise",
    "Shape",
    "beams_of",
    "best_forest",
    "best_iteration",
    "distinct_beams",
    "expected_layers",
    "layers_per_ms",
]
