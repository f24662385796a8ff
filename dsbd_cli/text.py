"""From token ids to text: end of text, stop strings across token borders, and text that can be streamed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dsbd_cli.decoding import Node

# A character is at most four byte tokens; the margin covers special tokens, which show as nothing.
_TOKENS_PER_CHARACTER = 4
_MARGIN = 32


class Detokenizer:
    """Decodes ids exactly as one shot would: no clean-up of spaces, special tokens not shown.

    One thing is mended: a tokenizer with byte tokens (`<0xF0>`, as Llama 2's) gives up a whole run of
    them, good characters included, once a single byte of it is wrong or missing. Text could then not
    be streamed, and an answer cut inside an emoji would lose what stood before it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        vocab = tokenizer.get_vocab() if self._decoder is not None else {}
        self._bytes = {vocab[name]: byte for byte in range(256) if (name := f"<0x{byte:02X}>") in vocab}

    def __call__(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if "\ufffd" in text and any(token in self._bytes for token in ids):
            return self._mended(ids)
        return text

    def _mended(self, ids: Sequence[int]) -> str:
        """The same, but that only the wrong bytes of a run become replacement marks."""
        added = self._tokenizer.added_tokens_decoder
        hidden = {token for token, facts in added.items() if facts.special}
        pieces: list[str] = []
        run = bytearray()
        for token in (token for token in ids if token not in hidden):
            if token in self._bytes:
                run.append(self._bytes[token])
                continue
            pieces += [run.decode("utf-8", "replace")] if run else []
            run.clear()
            pieces.append(self._tokenizer.convert_ids_to_tokens(token))
        pieces += [run.decode("utf-8", "replace")] if run else []
        return str(self._decoder.decode(pieces))  # type: ignore[union-attr]


class Endings:
    """Decides once per new node whether its sequence is finished: EOS, a stop string, or the budget."""

    def __init__(
        self, decode: Detokenizer, eos_ids: Collection[int], stop: Sequence[str], budget: int
    ) -> None:
        self._decode, self._eos, self._stop, self._budget = decode, frozenset(eos_ids), tuple(stop), budget
        self._window = _TOKENS_PER_CHARACTER * max(map(len, self._stop), default=0) + _MARGIN

    def __call__(self, node: Node) -> str | None:
        if node.token in self._eos:
            return "eos"
        if self._stop and first_stop(self._settled(node), self._stop) is not None:
            return "stop"
        return "length" if node.depth >= self._budget else None

    def _settled(self, node: Node) -> str:
        """The text in which a match can be: its unfinished parent held none, so a window at the end is enough.

        Without marks of half characters at its borders: whose bytes have not all come, or were cut by the window.
        """
        text = self._decode(node.tail(self._window)).rstrip("\ufffd")
        return text.lstrip("\ufffd") if node.depth > self._window else text


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the earliest stop string begins in `text`, or None."""
    found = [at for at in (text.find(entry) for entry in stop) if at >= 0]
    return min(found, default=None)


def visible_text(node: Node, decode: Detokenizer, stop: Sequence[str]) -> str:
    """The text of a sequence as the user sees it: without its EOS, cut before a stop string."""
    ids = node.tokens()
    if node.finish == "eos":
        ids = ids[:-1]
    text = decode(ids)
    at = first_stop(text, stop) if node.finish == "stop" else None
    return text if at is None else text[:at]


class ConfirmedText:
    """Grows the text of an ever longer confirmed sequence, and holds back what might still change.

    Held back: an incomplete UTF-8 tail, and a tail that may be the beginning of a stop string. Only
    a short window is decoded at each step, so long answers cost no more per token than short ones.
    """

    def __init__(self, decode: Detokenizer, stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._anchor = self._read = self._last = 0
        self._ready = ""
        self.printed = ""

    def advance(self, node: Node) -> str:
        """New text that `node` (unfinished, and extending all nodes given before) confirms; may be ''."""
        if node.depth == self._last:  # the same one again: beams may agree on nothing new for a while
            return ""
        self._last = node.depth
        ids = node.tail(node.depth - self._anchor)
        before = self._decode(ids[: self._read - self._anchor])
        after = self._decode(ids)
        # A trailing replacement mark is a character whose bytes have not all come yet.
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self._ready += after[len(before) :]
            self._anchor, self._read = self._read, node.depth
        held = max((_overlap(self._ready, entry) for entry in self._stop), default=0)
        new = self._ready[: len(self._ready) - held]
        self._ready = self._ready[len(new) :]
        self.printed += new
        return new

    def finish(self, text: str) -> str:
        """What is left to print of the final `text`."""
        new = text[len(self.printed) :]
        self.printed = text
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
