"""Text out of token ids, piece by piece: for every kind of tokenizer the stream is the one-shot text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.text import ConfirmedText, Detokenizer, Endings, first_stop, visible_text
from tests import builders

WORDS = [
    "\u2581the",
    "\u2581a",
    "\u2581!",
    "!",
    "=",
    "\u2581'",
    "s",
    "\u2581",
    "\u2581\u2581",
    "nd",
    "\u2581한",
    "é",
    ",",
    "\u2581,",
]


def sentencepiece() -> Any:
    """Pieces whose first blank goes, with bytes for what has no piece, as Llama 2's."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + place for place, word in enumerate(WORDS)}
    core = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


def metaspace() -> Any:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 3 + place for place, word in enumerate(WORDS)}
    core = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=True)


def wordpiece() -> Any:
    """Clean-up rules in the decoder itself: blanks before marks go once the mark is there."""
    vocab = {"[UNK]": 0, "[SEP]": 1} | {
        word: 2 + place
        for place, word in enumerate(["do", "not", "##s", ".", ",", "'", "n't", "!", "a", "##b"])
    }
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="[SEP]", unk_token="[UNK]")


@pytest.fixture(params=["bytes", "sentencepiece", "metaspace", "wordpiece"])
def decode(request: pytest.FixtureRequest, tmp_path: Any) -> tuple[Detokenizer, int]:
    made = {"sentencepiece": sentencepiece, "metaspace": metaspace, "wordpiece": wordpiece}
    tokenizer = (
        made[request.param]() if request.param in made else builders.tok(tmp_path, ["STOP", " ok", "🙂"])
    )
    return Detokenizer(tokenizer), len(tokenizer)


def path(ids: list[int]) -> list[Node]:
    nodes = [Node(-1, None)]
    for token in ids:
        nodes.append(Node(token, nodes[-1]))
    return nodes[1:]


@pytest.mark.parametrize("stop", [(), ("the",), ("a b", "!"), ("é,",)])
def test_pieces_join_to_the_one_shot_text(decode: tuple[Detokenizer, int], stop: tuple[str, ...]) -> None:
    say, size = decode
    chance = random.Random(1)
    for _ in range(150):
        ids = [chance.randrange(size) for _ in range(chance.randint(1, 40))]
        whole = say(ids)
        at = first_stop(whole, stop)
        text = ConfirmedText(say, stop)
        seen = ""
        for node in path(ids):
            if first_stop(say(node.tokens()), stop) is not None:
                break  # the engine ends here, before this node is confirmed
            seen += text.advance(node) if chance.random() < 0.7 else ""
            assert whole.startswith(seen)
            assert at is None or len(seen) <= at
        end = whole if at is None else whole[:at]
        assert seen + text.finish(end) == end


def test_text_that_is_no_text_is_flushed_once(tmp_path: Any) -> None:
    """Half a character at the end, and bytes that never become one."""
    say = Detokenizer(builders.tok(tmp_path))
    ids = [builders.tok(tmp_path).convert_tokens_to_ids(char) for char in "ðŁ"] * 20
    text = ConfirmedText(say, ())
    seen = "".join(text.advance(node) for node in path(ids))
    whole = say(ids)
    assert whole.count("\ufffd") > 1
    assert whole.startswith(seen)
    assert seen + text.finish(whole) == whole


def test_a_sequence_that_has_not_grown_is_not_decoded_again() -> None:
    asked: list[int] = []

    def say(ids: Sequence[int]) -> str:
        asked.append(len(ids))
        return "".join(map(chr, ids))

    text = ConfirmedText(say, ())  # type: ignore[arg-type]
    first, second = path([ord("a"), ord("b")])
    assert text.advance(first) == "a"
    before = len(asked)
    assert text.advance(first) == ""
    assert len(asked) == before
    assert text.advance(second) == "b"


@pytest.mark.parametrize("lead", [0, 200])
def test_half_of_a_character_is_no_stop(tmp_path: Any, lead: int) -> None:
    """Bytes of an emoji show as replacement marks until all have come, or where the window cuts it."""
    say = Detokenizer(builders.tok(tmp_path))
    tokenizer = builders.tok(tmp_path)
    ends = Endings(say, (), ("\ufffd",), 10_000)
    emoji = tokenizer("ok 🙂é!" + "🙂" * lead)["input_ids"]
    assert [ends(node) for node in path(emoji)] == [None] * len(emoji)
    wrong = path([*emoji, emoji[3], *tokenizer("no")["input_ids"]])
    assert [ends(node) for node in wrong[len(emoji) :]] == [None, "stop", "stop"]
    wrong[-1].finish = "stop"
    assert visible_text(wrong[-1], say, ("\ufffd",)) == say(emoji)


def test_good_characters_survive_a_wrong_byte_beside_them() -> None:
    tokenizer = sentencepiece()
    say = Detokenizer(tokenizer)
    emoji = [3 + byte for byte in "🙂".encode()]
    the, ok = 259 + WORDS.index("\u2581the"), 259 + WORDS.index("é")
    assert say([the, *emoji, *emoji[:2]]) == "the🙂\ufffd"
    assert say([the, *emoji[1:], *emoji, ok, tokenizer.eos_token_id]) == "the\ufffd\ufffd\ufffd🙂é"
    # Where nothing is wrong, the mended text is the tokenizer's own.
    chance = random.Random(2)
    pieces = [[the], emoji, [ok], [1], [2], [259 + WORDS.index("\u2581")], [3 + ord("x")]]
    for _ in range(100):
        ids = [token for piece in chance.choices(pieces, k=8) for token in piece]
        plain = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert say._mended(ids) == say(ids) == plain
