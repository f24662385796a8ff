"""Decoding: distributions, trees, caches, forwards, models, engines and methods, one room each.

Rooms import only what lies to their right: `methods | device > model > forward > cache > tree > law`.
This is the one door: everything outside takes what it needs from here, on first use, so that what
needs no model (events, nodes) loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsbd_cli.decoding.device.engines import Choice as Choice
    from dsbd_cli.decoding.device.engines import Engines as Engines
    from dsbd_cli.decoding.device.engines import quickest_law as quickest_law
    from dsbd_cli.decoding.device.pipeline import Pipeline as Pipeline
    from dsbd_cli.decoding.device.seat import Seat as Seat
    from dsbd_cli.decoding.device.steps import Nodes as Nodes
    from dsbd_cli.decoding.device.steps import forward_many as forward_many
    from dsbd_cli.decoding.forward.attention import kernel_names as kernel_names
    from dsbd_cli.decoding.forward.attention import without_planning as without_planning
    from dsbd_cli.decoding.forward.backends import why_not_fused as why_not_fused
    from dsbd_cli.decoding.forward.capture import Captures as Captures
    from dsbd_cli.decoding.forward.capture import OverlapClock as OverlapClock
    from dsbd_cli.decoding.forward.capture import quiet as quiet
    from dsbd_cli.decoding.forward.plain import FAMILIES as FAMILIES
    from dsbd_cli.decoding.forward.plain import at_home as at_home
    from dsbd_cli.decoding.forward.plain import fingerprint as fingerprint
    from dsbd_cli.decoding.forward.selftest import Verdict as Verdict
    from dsbd_cli.decoding.forward.simd import level_here as level_here
    from dsbd_cli.decoding.law.distribution import LogitsProcessor as LogitsProcessor
    from dsbd_cli.decoding.law.distribution import Sampler as Sampler
    from dsbd_cli.decoding.law.distribution import SeededSampler as SeededSampler
    from dsbd_cli.decoding.methods.dsbd import Run as Run
    from dsbd_cli.decoding.methods.proposers import ForestShape as ForestShape
    from dsbd_cli.decoding.methods.proposers import least_width as least_width
    from dsbd_cli.decoding.methods.setup import decode as decode
    from dsbd_cli.decoding.methods.setup import demand_of as demand_of
    from dsbd_cli.decoding.methods.setup import distinct_of as distinct_of
    from dsbd_cli.decoding.methods.setup import draft_processor as draft_processor
    from dsbd_cli.decoding.methods.setup import forest_is_free as forest_is_free
    from dsbd_cli.decoding.methods.setup import forest_shape as forest_shape
    from dsbd_cli.decoding.methods.setup import loop_of as loop_of
    from dsbd_cli.decoding.methods.setup import most_nodes as most_nodes
    from dsbd_cli.decoding.methods.setup import start as start
    from dsbd_cli.decoding.methods.setup import top_n_needed as top_n_needed
    from dsbd_cli.decoding.model.hf_model import HfTreeModel as HfTreeModel
    from dsbd_cli.decoding.model.path_model import PathModel as PathModel
    from dsbd_cli.decoding.model.protocol import Compute as Compute
    from dsbd_cli.decoding.model.protocol import Demand as Demand
    from dsbd_cli.decoding.model.protocol import Turn as Turn
    from dsbd_cli.decoding.model.shared import RequestModel as RequestModel
    from dsbd_cli.decoding.model.shared import SharedModel as SharedModel
    from dsbd_cli.decoding.tree.events import Event as Event
    from dsbd_cli.decoding.tree.events import Finished as Finished
    from dsbd_cli.decoding.tree.events import Iteration as Iteration
    from dsbd_cli.decoding.tree.events import Layer as Layer
    from dsbd_cli.decoding.tree.events import Notice as Notice
    from dsbd_cli.decoding.tree.events import Prefilled as Prefilled
    from dsbd_cli.decoding.tree.events import Text as Text
    from dsbd_cli.decoding.tree.sequences import Node as Node
    from dsbd_cli.decoding.tree.sequences import Trie as Trie
    from dsbd_cli.decoding.tree.sequences import common_ancestor as common_ancestor

_ROOMS = {
    "device.engines": ("Choice", "Engines", "quickest_law"),
    "device.pipeline": ("Pipeline",),
    "device.seat": ("Seat",),
    "device.steps": ("Nodes", "forward_many"),
    "forward.attention": ("kernel_names", "without_planning"),
    "forward.backends": ("why_not_fused",),
    "forward.capture": ("Captures", "OverlapClock", "quiet"),
    "forward.plain": ("FAMILIES", "at_home", "fingerprint"),
    "forward.selftest": ("Verdict",),
    "forward.simd": ("level_here",),
    "law.distribution": ("LogitsProcessor", "Sampler", "SeededSampler"),
    "methods.dsbd": ("Run",),
    "methods.proposers": ("ForestShape", "least_width"),
    "methods.setup": (
        "decode",
        "demand_of",
        "distinct_of",
        "draft_processor",
        "loop_of",
        "most_nodes",
        "start",
        "forest_is_free",
        "forest_shape",
        "top_n_needed",
    ),
    "model.hf_model": ("HfTreeModel",),
    "model.path_model": ("PathModel",),
    "model.protocol": ("Compute", "Demand", "Turn"),
    "model.shared": ("RequestModel", "SharedModel"),
    "tree.events": ("Event", "Finished", "Iteration", "Layer", "Notice", "Prefilled", "Text"),
    "tree.sequences": ("Node", "Trie", "common_ancestor"),
}
_WHERE = {name: module for module, names in _ROOMS.items() for name in names}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
