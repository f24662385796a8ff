"""What is decoded, through the whole tool: ends, stops, streams, limits, on every way of decoding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import builders
from tests.cli.conftest import EVERY_WAY, METHODS, Call, pair

pytestmark = pytest.mark.usefixtures("loaded_once")
Models = Callable[..., str]
REPLY = "ok 🙂é 한 [x] a != b 'sword' end"


@pytest.mark.parametrize("way", EVERY_WAY)
def test_nothing_follows_the_end_wherever_in_a_block_it_falls(dsbd: Call, models: Models, way: str) -> None:
    for words in (["A"], ["A", "B"], ["A", "B", "C"], ["A", "B", "C", "D"]):
        ran = dsbd("generate", "x", *pair(models("says", *words)), *EVERY_WAY[way], "--max-new-tokens", "20",
                   "--json")  # fmt: skip
        got = ran.json
        assert got["text"] == "".join(words)
        assert got["finish_reason"] == "eos"
        assert got["stats"]["new_tokens"] == len(got["token_ids"]) == len(words) + 1
        # (Beam search goes on until it has W finished texts, however unlikely.)
        assert got["stats"]["layers"] == len(words) + 1 or "deterministic" in way
        streamed = dsbd(
            "generate", "x", *pair(models("says", *words)), *EVERY_WAY[way], "--max-new-tokens", "20"
        )
        assert streamed.out == ("".join(words) + "\n").encode()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "specinfer"], "specinfer 2,2,1 multi-step sampling"),
        (["--method", "specinfer", "--tree-rule", "spectr"], "specinfer 2,2,1 k-sequential (SpecTr)"),
        (
            ["--method", "specinfer", "--tree-rule", "rsd", "--tree", "3,1"],
            "specinfer 3,1 without replacement (RSD)",
        ),
        (["--method", "beam"], "beam W 4"),
    ],
)
def test_statistics_say_what_was_run_in_words(
    dsbd: Call, models: Models, options: list[str], words: str
) -> None:
    ran = dsbd("generate", "x", *pair(models("says", "A")), *options, "--stats", "--no-stream")
    assert ran.text == "A\n"
    assert f"{'method':24} {words}" in ran.err.splitlines()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama"])
def test_a_draft_with_less_context_falls_back_with_one_warning(
    dsbd: Call, models: Models, method: str, kind: str
) -> None:
    size = {"gpt2": "n_positions"}.get(kind, "max_position_embeddings")
    target = models("rand", kind, **{size: 512})
    draft = models("rand", kind, seed=1, **{size: 64})
    for prompt, tokens in (("q" * 50, 24), ("q" * 100, 20)):
        ran = dsbd("generate", prompt, *pair(target, draft), "--method", method, "--max-new-tokens", str(tokens),
                   "--seed", "1", "--forest", "full", "--json")  # fmt: skip
        assert ran.code == 0, ran.err
        stats = ran.json["stats"]
        assert stats["new_tokens"] == tokens or (
            ran.json["finish_reason"] == "eos" and stats["new_tokens"] > 15
        )
        warnings = [line for line in ran.err.splitlines() if "context" in line]
        assert len(warnings) == (method in ("dsbd", "speculative", "specinfer")), ran.err
        # The law does not change: greedy text is the target's own, whatever became of the draft.
        greedy = dsbd("generate", prompt, *pair(target, draft), "--method", method, "--temperature", "0",
                      "--max-new-tokens", str(tokens), "--json").json  # fmt: skip
        alone = dsbd("generate", prompt, "--target", target, "--method", "multinomial", "--temperature", "0",
                     "--max-new-tokens", str(tokens), "--json").json  # fmt: skip
        assert greedy["token_ids"] == alone["token_ids"]


@pytest.mark.parametrize("method", ["beam", "dsbd"])
@pytest.mark.parametrize("extra", [[], ["--verify", "paper"], ["--verify", "continue"], ["--deterministic"]])
def test_fewer_continuations_than_beams(
    dsbd: Call, models: Models, tmp_path: Path, method: str, extra: list[str]
) -> None:
    if method == "beam" and "--verify" in extra:
        pytest.skip("beam has no verification rule")
    torch.manual_seed(0)
    table = torch.rand(4, 4)
    table /= table.sum(1, keepdim=True)
    wide = torch.zeros(builders.VOCAB + 4, builders.VOCAB + 4)
    wide[:, builders.VOCAB :] = table[0]
    wide[builders.VOCAB :, builders.VOCAB :] = table
    builders.markov(tmp_path / "four", wide, ["A", "B", "C", "D"])
    no_warp = [] if "--deterministic" in extra else ["--top-p", "1"]
    cases: list[tuple[str, list[str]]] = [
        (str(tmp_path / "four"), ["--width", "16", "--max-new-tokens", "6", *no_warp]),
        (models("says", "A"), ["--width", "8", "--max-new-tokens", "6", *no_warp]),
    ]
    if "--deterministic" not in extra:
        cases.append((models("rand", seed=3), ["--width", "8", "--top-k", "1", "--max-new-tokens", "6"]))
    for target, options in cases:
        ran = dsbd("generate", "x", *pair(target), "--method", method, *extra, *options, "--seed", "2",
                   "--num-return", options[1], "--json")  # fmt: skip
        assert ran.code == 0, ran.err
        beams = ran.json["beams"]
        ids = [tuple(beam["token_ids"]) for beam in beams]
        assert len(set(ids)) == len(ids) <= int(options[1])
        assert all(beam["logprob"] <= 1e-6 for beam in beams)


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_prompt_that_leaves_no_room(dsbd: Call, models: Models, way: str) -> None:
    target = models("rand", max_position_embeddings=64)
    for letters in (30, 63, 64, 65, 500):
        for budget in (32, 64, 1000, 0):
            ran = dsbd("generate", "q" * letters, *pair(target), *EVERY_WAY[way], "--max-new-tokens",
                       str(budget), "--seed", "1", "--json")  # fmt: skip
            if letters >= 64 and letters + budget > 64:
                ran.refused(str(letters), str(budget), "64")
                continue
            assert ran.code == 0, ran.err
            got = ran.json
            assert got["stats"]["prompt_tokens"] == letters
            clamped = letters + budget > 64
            assert ("clamped" in ran.err) == clamped
            assert got["stats"]["new_tokens"] <= min(budget, 64 - letters)
            if budget == 0:
                assert (got["text"], got["token_ids"], got["finish_reason"]) == ("", [], "length")
                assert got["stats"]["tokens_per_s"] is None


@pytest.mark.parametrize("way", EVERY_WAY)
def test_streamed_bytes_are_those_of_one_shot(dsbd: Call, models: Models, way: str) -> None:
    target = models("parrot", "hi", REPLY)
    command = ["generate", "hi", *pair(target), *EVERY_WAY[way], "--seed", "1"]
    streamed = dsbd(*command)
    assert streamed.out == (REPLY + "\n").encode()
    assert dsbd(*command, "--no-stream").out == streamed.out
    assert dsbd(*command, "--json").json["text"] == REPLY
    # Every cut, also inside a character: the stream stays valid UTF-8 and equals the one-shot answer.
    # (What is cut is text, whoever decodes it: beside one way a kind, one cut in each wide character.)
    for tokens in range(1, 14) if way in ("multinomial", "beam", "dsbd", "specinfer") else (5, 8, 12):
        cut = dsbd(*command, "--max-new-tokens", str(tokens))
        whole = dsbd(*command, "--max-new-tokens", str(tokens), "--json").json
        assert cut.out.decode("utf-8") == whole["text"] + "\n"
        assert whole["stats"]["new_tokens"] == tokens


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["STOP"], "one "),
        (["P"], "one STO"),
        (["e S"], "on"),
        (["TOP two!"], "one STOP two"),
        (["two", "ST"], "one "),
        (["OP", "STOP"], "one "),
        (["one STOP two"], ""),
        (["o"], ""),
    ],
)
def test_stop_strings_across_token_borders(
    dsbd: Call, models: Models, way: str, stops: list[str], expected: str
) -> None:
    options = [part for stop in stops for part in ("--stop", stop)]
    command = ["generate", "q", *pair(models("parrot", "q", "one STOP two")), *EVERY_WAY[way], *options]
    command += ["--seed", "1"]
    assert dsbd(*command).out == (expected + "\n").encode()
    got = dsbd(*command, "--json").json
    assert got["text"] == expected
    stopped = expected != "one STOP two"
    assert got["finish_reason"] == ("stop" if stopped else "eos")
    if stopped:
        said = builders_text(got["token_ids"], "one STOP two")
        # The ids end with the token that completes the match, and nothing speculated beyond it counts.
        assert any(stop in said for stop in stops)
        assert not any(stop in said[:-1] for stop in stops)
        assert got["stats"]["new_tokens"] == len(said)


def builders_text(ids: list[int], reply: str) -> str:
    """What byte tokens say, for a reply in ASCII."""
    return reply[: len(ids)]


def test_an_empty_stop_is_refused(dsbd: Call, models: Models) -> None:
    dsbd("generate", "q", *pair(models("says", "A")), "--stop", "").refused("stop")


@pytest.fixture(scope="module")
def ending(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], str]:
    """The folder of a model that says A, B and token 2, and whose ends `place` names, each made once."""

    @cache
    def make(place: str, value: str) -> str:
        folder = tmp_path_factory.mktemp("ending") / "t"
        shutil.copytree(models("says", "A", "B", end=2), folder)
        file = folder / place
        if value == '"absent"':
            file.unlink(missing_ok=True)
        else:
            content = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps(content | {"eos_token_id": json.loads(value)}))
        return str(folder)

    return lambda place, value: make(place, json.dumps(value))


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize(
    ("place", "value", "ends"),
    [
        ("generation_config.json", [1, 2], True),
        ("generation_config.json", 2, True),
        ("config.json", [1, 2], True),
        ("config.json", 2, True),
        ("generation_config.json", None, False),
        ("generation_config.json", "absent", False),
    ],
)
def test_every_end_token_counts(
    dsbd: Call, ending: Callable[[str, Any], str], way: str, place: str, value: Any, ends: bool
) -> None:
    got = dsbd(
        "generate", "x", *pair(ending(place, value)), *EVERY_WAY[way], "--max-new-tokens", "12", "--json"
    ).json
    if ends:
        assert (got["text"], got["finish_reason"]) == ("AB", "eos")
        assert got["token_ids"][-1] == 2
    else:
        # Token 2 is then an ordinary special token: shown as nothing, and the text runs to its limit.
        assert (got["finish_reason"], got["stats"]["new_tokens"]) == ("length", 12)
        assert "<|eot|>" not in got["text"]


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_config_adds_to_the_tokenizers_own_end(
    dsbd: Call, models: Models, tmp_path: Path, way: str
) -> None:
    folder = tmp_path / "t"
    shutil.copytree(models("says", "A", "B", end=1), folder)
    for name in ("generation_config.json", "config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": 2}))
    got = dsbd("generate", "x", *pair(str(folder)), *EVERY_WAY[way], "--max-new-tokens", "12", "--json").json
    assert (got["text"], got["finish_reason"], got["token_ids"][-1]) == ("AB", "eos", 1)
