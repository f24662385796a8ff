"""`docs/architectures.md`: it names every architecture, and what it says of some of them is so."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from tests.compat import verdicts, zoo
from tests.compat.verdicts import FAILS, METHODS, PATHS, REFUSED, SERVED, UNBUILT

HERE = tuple(int(part) for part in re.findall(r"\d+", version("transformers"))[:2])
# One of each kind: plain, learned positions, windows, experts, latent attention, sparse keys, ALiBi, a mask of its
# own, scans, convolutions, scans beside attention, an encoder that decodes, loops.
KINDS = ("llama", "opt", "gemma2", "mixtral", "deepseek_v3", "doge", "bloom", "gpt_neo", "mamba", "lfm2", "falcon_h1",
         "bert", "dory")  # fmt: skip
# Beside them some that change with the release, so that all have their turn.
OTHERS = 3


def rotating() -> list[str]:
    names = [name for name in sorted(verdicts.read_page()) if name in zoo.names() and name not in KINDS]
    begin = OTHERS * (100 * HERE[0] + HERE[1]) % len(names)
    return (names + names)[begin : begin + OTHERS]


def test_the_page_names_every_architecture_and_nothing_is_wrong() -> None:
    page = verdicts.read_page()
    measured = verdicts.measured_with()
    if measured <= HERE:
        missing = sorted(set(zoo.names()) - page.keys())
        assert not missing, f"python -m tests.compat.verdicts 20 {' '.join(missing)}"
    if measured == HERE:
        assert page.keys() == set(zoo.names())
    words = {word for verdict in page.values() for word in verdict.values()}
    assert words <= {SERVED, PATHS, REFUSED, UNBUILT}, FAILS
    for name, verdict in page.items():
        assert FAILS not in verdict.values(), name
        # A tree serves all of these methods or none.
        assert len({verdict[method] for method in ("beam", "dsbd")}) == 1, name
    assert sum(verdict["dsbd"] == SERVED for verdict in page.values()) > 80


@pytest.mark.parametrize("name", [*KINDS, *rotating()])
def test_the_page_says_what_happens(name: str) -> None:
    if name not in zoo.names():
        pytest.skip(f"transformers {version('transformers')} has no {name}")
    found = verdicts.judge(name, 2, seed=5).by_method
    if UNBUILT in found.values() and verdicts.measured_with() != HERE:
        pytest.skip("cannot be built small in this release")
    assert FAILS not in found.values()
    if verdicts.measured_with() == HERE:
        assert found == verdicts.read_page()[name]


def test_verdicts_find_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One decoder layer that is left out of our calls only."""
    import dsbd_cli

    ours = dsbd_cli.generate

    def without(model, *args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.model.layers[1].mlp, "forward", lambda x: 0 * x)
            return ours(model, *args, **kwargs)

    monkeypatch.setattr(dsbd_cli, "generate", without)
    assert verdicts.judge("llama", 3).by_method == dict.fromkeys(METHODS, FAILS)
