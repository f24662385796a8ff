from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.decoding.tree.events import Finished, Iteration, Layer, Text
from dsbd_cli.decoding.tree.sequences import Node, Trie, common_ancestor
from dsbd_cli.settings import Settings
from dsbd_cli.text import ConfirmedText, Detokenizer
from dsbd_cli.ui.monitor import Monitor
from dsbd_cli.ui.snapshot import Snapshot
from tests.builders import tok
from tests.ui.fake import FakeDecoder, stream


def test_confirmed_and_contested_together_are_the_best_beams_text() -> None:
    for seed in range(5):
        decoder = FakeDecoder()
        monitor = Monitor(decoder, "x")  # type: ignore[arg-type]
        looked = 0
        for event in stream(decoder, 200, seed):
            if isinstance(event, Finished):
                break
            monitor.see(event)
            if isinstance(event, Iteration) and event.active:
                best = max(event.active, key=lambda node: node.score / node.depth)
                assert monitor.confirmed + monitor.contested() == decoder.detokenize(best.tokens())
                looked += 1
        assert looked > 40


def test_contested_text_of_byte_tokens_over_a_long_answer(tmp_path: Path) -> None:
    """Half characters are never shown, and where the text is decoded from moves along unseen."""
    tokenizer = tok(tmp_path)
    decode = Detokenizer(tokenizer)
    decoder: Any = FakeDecoder(Settings(max_new_tokens=4000))
    decoder.detokenize = decode
    monitor = Monitor(decoder, "x")
    ids = tokenizer("ok 🙂é 한 [x] a != b ").input_ids * 20
    trie = Trie(lambda node: None, [], 4000)
    confirmed = ConfirmedText(decode, ())
    node, chance = trie.root, random.Random(0)
    for token in ids:
        node = trie.child(node, token)
        node.score = -0.1 * node.depth
        monitor.see(Layer((node,), 1))
        monitor.see(Text(confirmed.advance(node)))
        if chance.random() < 0.5:
            monitor.see(Iteration((node,), None, ()))  # type: ignore[arg-type]
            whole = decode(node.tokens()).rstrip("\ufffd")
            assert monitor.confirmed + monitor.contested() == whole


def test_numbers_follow_the_events() -> None:
    decoder = FakeDecoder()
    monitor = Monitor(decoder, "x" * 1000)  # type: ignore[arg-type]
    layers: list[Layer] = []
    calls = 0
    for event in stream(decoder, 50):
        if isinstance(event, Finished):
            break
        monitor.see(event)
        layers += [event] if isinstance(event, Layer) else []
        calls += isinstance(event, Iteration)
    shot = monitor.snapshot()
    examined, accepted = sum(layer.examined for layer in layers), sum(layer.accepted for layer in layers)
    assert shot.acceptance.mean == pytest.approx(accepted / examined)
    assert shot.drawn.mean == pytest.approx(sum(len(layer.draws) for layer in layers) / len(layers))
    assert shot.distinct.now == layers[-1].distinct
    assert shot.layers_per_call.mean == pytest.approx(len(layers) / calls)
    assert sum(count for _, count in shot.histogram) == len(layers)
    assert (shot.tokens, shot.prompt_tokens, shot.kv_slots) == (50, 30, 214)
    assert shot.notes == ["the draft is small [bold]"]
    assert len(shot.prompt) == 500
    assert Snapshot.from_json(shot.to_json()) == shot


def test_the_title_says_what_is_run_in_words() -> None:
    for settings, title in (
        (Settings(), "dsbd cover W 4 W_S 8 gamma 4"),
        (Settings(verify="paper", draws="distinct"), "dsbd paper W 4 distinct W_S 8 gamma 4"),
        (Settings(method="beam", deterministic=True), "beam deterministic W 4"),
        (Settings(method="speculative", gamma=3), "speculative gamma 3"),
        (Settings(method="specinfer"), "specinfer 2,2,1 multi-step sampling"),
        (Settings(method="specinfer", tree=(4,), tree_rule="spectr"), "specinfer 4 k-sequential (SpecTr)"),
        (Settings(method="specinfer", tree_rule="rsd"), "specinfer 2,2,1 without replacement (RSD)"),
        (Settings(method="multinomial"), "multinomial"),
    ):
        assert Monitor(FakeDecoder(settings), "x").snapshot().method == title  # type: ignore[arg-type]


def test_shares_are_the_softmax_of_the_scores_best_first() -> None:
    decoder = FakeDecoder()
    monitor = Monitor(decoder, "x")  # type: ignore[arg-type]
    trie = Trie(lambda node: None, [], 10)
    nodes = [trie.child(trie.root, token) for token in (1, 2)]
    nodes[0].score, nodes[1].score = -2.0, -1.0
    monitor.see(Iteration(tuple(nodes), None, ()))  # type: ignore[arg-type]
    beams = monitor.snapshot().beams
    assert [beam.share for beam in beams] == pytest.approx([0.731058, 0.268941], abs=1e-5)
    assert [beam.text for beam in beams] == [" a", " river"][::-1] or [beam.text for beam in beams] == [
        decoder.detokenize([2]),
        decoder.detokenize([1]),
    ]


def test_a_lone_beam_shows_its_last_words() -> None:
    monitor = Monitor(FakeDecoder(), "x")  # type: ignore[arg-type]
    node: Node = Trie(lambda node: None, [], 10).root
    trie = Trie(lambda node: None, [], 10)
    node = trie.child(trie.root, 3)
    node.score = -1.0
    monitor.see(Iteration((node,), None, ()))  # type: ignore[arg-type]
    assert monitor.snapshot().beams[0].text == " river"
    assert common_ancestor([node]) is node


def test_before_the_first_event_nothing_is_known() -> None:
    shot = Monitor(FakeDecoder(), "x").snapshot()  # type: ignore[arg-type]
    assert (shot.tokens_per_s, shot.acceptance.mean, shot.drawn.now, shot.beams) == (None, None, None, [])


def test_beams_begin_and_end_with_whole_characters() -> None:
    decoder: Any = FakeDecoder()
    decoder.detokenize = lambda ids: bytes(ids).decode("utf-8", "replace")
    monitor = Monitor(decoder, "x")
    trie = Trie(lambda node: None, [], 100)

    def grown(node: Node, data: bytes, score: float) -> Node:
        for byte in data:
            node = trie.child(node, byte)
        node.score = score
        return node

    smile, globe = "\U0001f642".encode(), "\U0001f30d".encode()
    # Nine characters and two bytes of a tenth: sixteen tokens back lies within the sixth.
    base = grown(trie.root, smile * 9 + globe[:2], -1.0)
    beams = grown(base, globe[2:] + b" and more", -1.0), grown(base, smile[2:] + globe + globe[:3], -2.0)
    monitor.see(Iteration(beams, None, ()))  # type: ignore[arg-type]
    assert [beam.text for beam in monitor.snapshot().beams] == ["\U0001f30d and more", "\U0001f642\U0001f30d"]
    monitor.see(Iteration(beams[1:], None, ()))  # type: ignore[arg-type]
    assert "\ufffd" not in monitor.snapshot().beams[0].text
