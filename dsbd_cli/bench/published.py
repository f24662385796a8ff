"""What the paper says of itself, to stand beside our figures where model and data are the paper's.

Source: Qin, He, Prakriya, Cong, Sun, "Dynamic-Width Speculative Beam Decoding for LLM Inference", AAAI 2025,
abstract. It gives ranges over its pairs and data sets; single cells of its tables are not repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SOURCE = "Qin et al., AAAI 2025, abstract (ranges over its three pairs and its data sets)"
# DSBD against beam sampling, at no loss of quality.
SPEED_UP = (1.5, 1.9)
ENERGY_SAVED = (1.8, 2.5)
# (target, draft) by what their names hold.
PAIRS = (("llama-2-13b", "llama-68m"), ("llama-3.1-8b", "llama-3.2-1b"), ("opt-13b", "opt-125m"))
DATA = ("spider", "squad", "mt-bench")


def applies(summary: Mapping[str, Any]) -> bool:
    """Whether a run's pair and data are the paper's (the built-in sample never is)."""
    data, models = summary["data"], summary["models"]
    if data["builtin"] or data["kind"] not in DATA or not models.get("draft"):
        return False
    target, draft = (str(models[role]["name"]).lower() for role in ("target", "draft"))
    return any(t in target and d in draft for t, d in PAIRS)
