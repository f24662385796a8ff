"""The decoder that is kept on a model from call to call, and made anew as soon as anything has changed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import FAMILIES, fingerprint, why_not_fused
from dsbd_cli.loading import LoadedModel, Pair
from dsbd_cli.settings import Settings

_KEPT = "_dsbd_kept"
_MAKING = threading.Lock()


class Kept:
    """What was prepared for one target; copies and pickles of the model start without it.

    Attributes:
        lock: one call at a time: they share caches.
        state: of both models and the EOS ids when `decoder` was made.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.state: tuple[Any, ...] | None = None
        self.decoder: Decoder | None = None

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()


def kept(model: Any) -> Kept:
    with _MAKING:
        found: Kept = model.__dict__.setdefault(_KEPT, Kept())
    return found


def decoder_for(model: Any, draft: Any, eos_ids: tuple[int, ...], settings: Settings) -> Decoder:
    """A decoder for these two as they are now, ready for `settings`.

    Raises:
        UserError: the architecture does not serve the method.
    """
    place = kept(model)
    state = _state(model, draft, eos_ids)
    if place.decoder is not None and place.state == state:
        place.decoder.ready(settings)
        return place.decoder
    place.decoder = None  # its memory first
    target = _loaded(model, "target")
    small = None if draft is None else _loaded(draft, "draft")
    # All rows of the target's head count: without a tokenizer nothing says which of them are padding.
    decoder = Decoder(Pair(target, small, Ids(), eos_ids, target.vocab_rows))
    for role, one in (("target", model), ("draft", draft)):
        reason = None if one is None else why_not_fused(one)
        if reason is not None and type(one).__name__ in FAMILIES:
            tell([f"{role}: the model's own forward decodes it, which is slower: {reason}"])
    decoder.ready(settings)
    # Preparing may move weights into larger blocks: what counts is how they lie now.
    place.state, place.decoder = _state(model, draft, eos_ids), decoder
    return decoder


def forget(model: Any) -> None:
    """Let go of what was prepared for `model`, or for a model inside it: caches, and weights in a faster layout."""
    for module in model.modules():
        module.__dict__.pop(_KEPT, None)


@contextmanager
def evaluated(*models: Any) -> Iterator[None]:
    """Dropout is off meanwhile; every module's flag is then as before.

    Flags only: a `train` method of a module's own may do more, such as merging an adapter.
    """
    flags = [(module, module.training) for model in models if model is not None for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def tell(notes: Sequence[str]) -> None:
    """Notes for the user, as warnings: Python shows each once."""
    for note in notes:
        warnings.warn(f"dsbd: {note}", stacklevel=2)


class Ids:
    """Stands for the tokenizer, which `generate` has none of: each id is shown as one character.

    So confirmed text is confirmed ids (`ids_of`); no id meets a surrogate or a replacement mark.
    """

    bos_token_id = None
    chat_template = None
    _FIRST = 0x10000

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(self._FIRST + token) for token in ids)

    @classmethod
    def ids_of(cls, text: str) -> list[int]:
        return [ord(char) - cls._FIRST for char in text]


def _loaded(model: Any, role: str) -> LoadedModel:
    from dsbd_cli.loading.model import describe
    from dsbd_cli.loading.source import Source

    return describe(model, Source(str(model.config.name_or_path or role), "hub"))


def _state(model: Any, draft: Any, eos_ids: tuple[int, ...]) -> tuple[Any, ...]:
    return fingerprint(model), None if draft is None else fingerprint(draft), eos_ids
