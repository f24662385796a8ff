"""Uses of a decoder's models: one at a time, each from one whole state of all that is kept to the next.

Ctrl-C may come between any two operations, and leave caches, captures and the books on them torn, so that later
answers are errors, or other answers. All of it is then made anew before the next use: that is right wherever it came,
and costs nothing where it did not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from dsbd_cli.decoding import HfTreeModel
from dsbd_cli.errors import RunError, UserError
from dsbd_cli.group import group_of

T = TypeVar("T")


class Owner:
    """A run that takes several steps.

    Attributes:
        began: it has taken what the models hold, and goes on from that.
    """

    began = False


class Steps:
    """Runs them.

    Args:
        models: those that are used, the target first.
        let_go: of everything else that is kept from use to use.

    Attributes:
        lock: held by the thread that uses the models.
    """

    def __init__(self, models: Callable[[], Sequence[HfTreeModel]], let_go: Callable[[], None]) -> None:
        self.lock, self._owner = threading.RLock(), Owner()
        self._models, self._let_go = models, let_go
        self._torn = False

    def __call__(self, work: Callable[[], T], owner: Owner | None = None) -> T:
        """What `work` gives, which uses the models.

        Args:
            owner: whose step it is.

        Raises:
            UserError: it has lost what they held for it.
            RunError: several processes hold the target, and one before it was interrupted.
        """
        with self.lock:
            broken = self._broken()
            if owner is not None and owner.began and (broken or self._owner is not owner):
                raise UserError(
                    "another prompt was begun on this Decoder before this one had ended: decode them one after the "
                    "other, with generate_many, or on a Decoder each"
                )
            if broken:
                self._renew()
            self._torn = True
            try:
                done = work()
            except UserError:  # said on purpose, between two operations
                self._torn = False
                raise
            except BaseException as error:
                self._torn = not self._undone(error)
                raise
            self._torn = False
            return done

    def take(self, owner: Owner | None = None) -> None:
        """What the models hold is `owner`'s now, or nobody's: whoever had it has lost it."""
        self._owner = owner or Owner()
        self._owner.began = True

    def _broken(self) -> bool:
        for model in self._models():
            if not model.whole:
                return True
        return self._torn

    def _undone(self, error: BaseException) -> bool:
        """Whether `error` came out of a forward of which nothing is left, and nothing else has come since."""
        models = self._models()
        undone = any(model.undone is error for model in models)
        for model in models:
            model.undone = None
        return undone and group_of(models[0].model).size == 1

    def _renew(self) -> None:
        models = self._models()
        if group_of(models[0].model).size > 1:
            raise RunError(
                "this process was interrupted, and is out of step with the others that hold the target: end them all "
                "and start again"
            )
        self.take()
        self._let_go()
        for model in models:
            model.renew()
