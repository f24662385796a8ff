"""Settings that change nothing beside others, so that what was given in vain can be said.

What is given to a method that does not read it is no error, so that one command line serves every `--method`, and what
a preset holds is for all of them: it yields quietly. What the user typed is named (`in_vain`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dsbd_cli.settings import DEFAULT_TREE, ONE_BEAM_METHODS, Settings, width_from_target

# Settings that not every method reads, by those that do.
OF_METHOD: Mapping[str, tuple[str, ...]] = {
    "dsbd": (
        "width",
        "draft_width",
        "gamma",
        "verify",
        "draws",
        "threshold",
        "width_rule",
        "min_width",
        "forest",
        "forest_nodes",
        "lookup",
        "prices",
        "kv",
        "deterministic",
    ),
    "beam": ("width", "draws", "threshold", "width_rule", "min_width", "deterministic"),
    "speculative": ("gamma", "forest", "prices"),
    "specinfer": ("tree", "tree_rule"),
    "multinomial": (),
}
_OF_SOME = tuple(dict.fromkeys(name for names in OF_METHOD.values() for name in names))
_OF_WIDTH = ("min_width", "width_rule")
_OF_LAYERS = ("width", "draws", "threshold", *_OF_WIDTH)
_OF_FORESTS = ("draft_width", "verify", "forest", "forest_nodes", "lookup", "prices")


def idle(settings: Settings) -> dict[str, str]:
    """Why a setting changes nothing in this combination, by name; what is not named is read."""
    method = settings.method
    found = {name: f"with method {method}" for name in _OF_SOME if name not in OF_METHOD[method]}
    if method in ONE_BEAM_METHODS:
        found["early_stopping"] = f"with method {method}"
    if settings.threshold is None:
        found = {name: "without a threshold" for name in _OF_WIDTH} | found
    elif method == "beam" and not width_from_target(settings):
        why = "with method beam but beside draws distinct or width-rule distinct"
        found |= {name: why for name in ("threshold", *_OF_WIDTH)}
    if settings.gamma == 0 and method in ("dsbd", "speculative"):
        found = {name: "with gamma 0" for name in _OF_FORESTS} | found
    if method == "specinfer" and max(settings.tree or DEFAULT_TREE) == 1:
        found["tree_rule"] = "with one draw a node"
    if settings.forest == "full":
        found = {"prices": "with forest full"} | found
    if settings.deterministic and method == "dsbd":
        found = {"verify": "with deterministic"} | found
    elif settings.temperature == 0:
        # All draws of a layer are the one most probable continuation.
        names = ("top_k", "top_p", *(_OF_LAYERS if method in ("dsbd", "beam") else ()))
        found = {name: "with temperature 0" for name in names} | found
    return found


def draws_nothing(settings: Settings) -> bool:
    """Whether a text depends on no seed."""
    return settings.deterministic or settings.temperature == 0


def in_vain(settings: Settings, given: Iterable[str]) -> list[str]:
    """A line for each reason for which settings that were given change nothing.

    Args:
        given: names. Those whose value in `settings` says that there is none are no concern of anybody's.
    """
    why = idle(settings)
    by_reason: dict[str, list[str]] = {}
    for name in given:
        if name in why and getattr(settings, name) not in (None, False) and not _off(settings, name):
            by_reason.setdefault(why[name], []).append(name.replace("_", "-"))
    return [
        f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect {reason}"
        for reason, names in by_reason.items()
    ]


def _off(settings: Settings, name: str) -> bool:
    value = getattr(settings, name)
    return (name in ("gamma", "top_k", "lookup", "forest_nodes") and value == 0) or (
        name == "top_p" and value == 1
    )
