"""Which forward is used of those that may serve a model: the quickest that the self-test does not refuse."""

from __future__ import annotations

from typing import Any

from dsbd_cli.decoding.forward import backends
from dsbd_cli.decoding.forward.backends import Forward
from dsbd_cli.decoding.forward.selftest import Verdict


class Ways:
    """The forwards that may serve a model, tried in turn.

    Args:
        model: a causal LM in eval mode.
        role: what notes call it.
        notes: the model's; what is to be told of its forwards is added.
        tested: what the self-test said of this model before: that is followed, if this machine is that one.
        test: False takes the first as it is.
        fast, int8, int8_activations: which there are: `fused`, and the two of that name, of `backends.candidates`.

    Attributes:
        forward: the one at hand.
        served: it serves the model; False: the self-test is to be run.
        refused: how many before it were refused.
        in_vain: those of the notes that say why a number format that was asked for is not computed in.
    """

    def __init__(
        self, model: Any, role: str, notes: list[str], *, tested: Verdict | None, test: bool, fast: bool, int8: bool,
        int8_activations: bool,
    ) -> None:  # fmt: skip
        self._model, self._role, self._notes = model, role, notes
        self.in_vain: list[str] = []
        self._disagreed: list[str] = []
        self.served, self.refused = not test, 0
        self._wanted = {"int8": int8, "int8_activations": int8_activations, "fused": fast}
        self._left = backends.candidates(model, **self._wanted, skip=tested.refused if tested else 0)
        first = next(self._left, None)
        if tested is not None and first is not None and first.describe() == tested.forward:
            self.served, self.refused = True, tested.refused
            notes += tested.notes
            self._disagreed += tested.notes
            self.in_vain += tested.in_vain
        elif tested is not None or first is None:  # not the machine that it was: ask again
            self._left = backends.candidates(model, **self._wanted)
            first = next(self._left)
        self.forward: Forward = first
        if int8_activations and not first.int8_activations and not self.in_vain:
            self.in_vain.append(
                f"{role}: no activation is rounded to 8 bits: that is for Llama-like models with 4-bit blocks "
                f"({backends.why_no_int8_activations(model)})"
            )
            notes += self.in_vain

    def refuse(self, wrong: str) -> bool:
        """Go on to the next one, since the one at hand is `wrong`; whether there is one."""
        way = next(self._left, None)
        if way is None:
            return False
        short = " with activations in 8 bits" if self.forward.int8_activations else ""
        name = f"{type(self.forward).__name__}{short}"
        note = f"{self._role}: {name} is not used, it disagrees with the model's own forward ({wrong})"
        told = [self._notes, self._disagreed, *([self.in_vain] if self.forward.int8_activations else [])]
        for notes in told:
            if note not in notes:  # said already, and interrupted
                notes.append(note)
        self.refused, self.forward = self.refused + 1, way  # in step, wherever it is interrupted
        return True

    def agreed(self) -> None:
        """The one at hand serves the model."""
        self.served = True
        self._left = iter(())  # lets go of what was tried

    def renew(self) -> None:
        """Find those again that are left behind the one at hand, whatever was interrupted where."""
        if not self.served:
            self._left = backends.candidates(self._model, **self._wanted, skip=self.refused + 1)

    def verdict(self) -> Verdict:
        """What the self-test said, for the next load of the same model."""
        in_vain = [note for note in self._disagreed if note in self.in_vain]
        return Verdict(self.refused, self.forward.describe(), self._disagreed, in_vain)
