from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli import Decoder, Settings
from dsbd_cli.batch.decode import Running, decode_items
from dsbd_cli.batch.items import Item, item_seed
from dsbd_cli.batch.run import run_file, weights
from dsbd_cli.errors import RunError, Stopped, UserError
from dsbd_cli.many import Answer, Batch
from dsbd_cli.prices.store import Kept
from dsbd_cli.prices.table import Curve, Prices
from tests import builders
from tests.batch.killer import Loaded, unmeasured

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("pair")
    builders.rand(base / "t", max_position_embeddings=128)
    builders.rand(base / "d", seed=1, max_position_embeddings=128)
    return str(base / "t"), str(base / "d")


@pytest.fixture(scope="module")
def decoder(folders: tuple[str, str]) -> Decoder:
    return Decoder.from_pair(*folders)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def prompts(folder: Path, count: int = 6) -> Path:
    path = folder / "in.txt"
    path.write_text("".join(f"prompt {index} {'x' * (index % 9)}\n" for index in range(count)))
    return path


SETTINGS = Settings(seed=3, max_new_tokens=10)
REFUSED = (
    r"^1 of 3 prompts were refused; the others are done; prompt 2: .*no room.* \(all in `error` of .*out"
)


def decode_item(decoder: Decoder, settings: Settings, seed: int, item: Item) -> tuple[dict[str, Any], Any]:
    """The record of one prompt alone, as a batch makes it."""
    with Running(decoder, "auto", lambda line: None) as running:
        ((_, record, result),) = decode_items(decoder, settings, seed, [item], running)
    return record, result


def test_a_record_is_what_generate_gives_for_that_prompt_and_seed(decoder: Decoder, tmp_path: Path) -> None:
    source, out = prompts(tmp_path), tmp_path / "out.jsonl"
    told: list[str] = []
    results = run_file(Loaded(decoder, SETTINGS), source, out, told.append, bar=False)  # type: ignore[arg-type]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(6))
    assert len(results) == 6
    assert any("6/6 prompts" in line for line in told)
    for record, prompt in zip(records, source.read_text().splitlines(), strict=True):
        settings = dataclasses.replace(SETTINGS, seed=item_seed(3, record["index"]))
        alone = decoder.generate(prompt, settings)
        assert record["token_ids"] == alone.token_ids
        for got, beam in zip(record["beams"], alone.beams, strict=True):
            assert got["token_ids"] == beam.token_ids
            assert got["logprob"] == pytest.approx(beam.logprob, abs=1e-4)
        assert record["seed"] == alone.seed


def test_a_record_does_not_depend_on_what_came_before(folders: tuple[str, str]) -> None:
    item = Item(4, "shared beginning, then the end")
    fresh, used = Decoder.from_pair(*folders), Decoder.from_pair(*folders)
    for prompt in ("shared beginning, then another end", "q" * 100):
        decode_item(used, SETTINGS, 3, Item(0, prompt))
    one, two = (decode_item(decoder, SETTINGS, 3, item)[0] for decoder in (fresh, used))
    for record in (one, two):
        for name in ("prefill_s", "decode_s", "tokens_per_s", "energy_j", "joules_per_token"):
            record["stats"].pop(name)
    assert one == two


def test_a_prompt_that_is_refused_does_not_stop_the_others(decoder: Decoder, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"prompt": "fine", "id": "a"}\n{"prompt": "' + "q" * 500 + '", "id": "b"}\n"also fine"\n'
    )
    chosen: Any = Loaded(decoder, SETTINGS)
    with pytest.raises(UserError, match=REFUSED):
        run_file(chosen, source, out, lambda line: None, bar=False)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record.get("id") for record in records] == ["a", "b", None]
    assert "no room" in records[1]["error"]
    assert records[2]["text"] is not None
    # All is done: the same command again has nothing to do, and says so; it does not turn into a success.
    told: list[str] = []
    with pytest.raises(UserError, match=REFUSED):
        run_file(chosen, source, out, told.append, bar=False)
    assert told == [f"all 3 prompts are done already: {out}"]
    # Nor does a run that goes on behind the refused one.
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match=REFUSED):
        run_file(chosen, source, out, told.append, bar=False)
    assert len(out.read_text().splitlines()) == 3


def test_notes_of_a_prompt_are_in_its_record(decoder: Decoder) -> None:
    record, _ = decode_item(decoder, dataclasses.replace(SETTINGS, max_new_tokens=1000), 3, Item(0, "hi"))
    assert any("clamped" in note for note in record["notes"])


def test_a_run_that_breaks_keeps_what_it_has_and_goes_on(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, whole = prompts(tmp_path), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    chosen: Any = Loaded(decoder, SETTINGS)
    run_file(chosen, source, whole, lambda line: None, bar=False)
    real = decoder.stream

    def breaks(prompt: Any, *rest: Any, **options: Any) -> Any:
        if "prompt 3" in prompt:
            raise RunError("logits that are not finite")
        return real(prompt, *rest, **options)

    monkeypatch.setattr(decoder, "stream", breaks)
    with pytest.raises(RunError):
        run_file(chosen, source, out, lambda line: None, bar=False, batch="1")
    assert len(out.read_text().splitlines()) == 3
    monkeypatch.setattr(decoder, "stream", real)
    told: list[str] = []
    run_file(chosen, source, out, told.append, bar=False)
    assert "3 of 6 prompts are done already: going on" in told
    assert unmeasured(out) == unmeasured(whole)


def overtaken(monkeypatch: pytest.MonkeyPatch, order: list[int], after: Callable[[], None]) -> None:
    """Answers come in this order, by the place in what is asked; `after` is called behind each. Then Ctrl-C."""
    real = Batch.answers

    def answers(self: Batch, *asked: Any) -> Iterator[Answer]:
        found = {answer.index: answer for answer in real(self, *asked)}
        for index in order:
            yield found[index]
            after()
        if len(order) < len(found):
            raise KeyboardInterrupt

    monkeypatch.setattr(Batch, "answers", answers)


def test_what_overtook_a_slow_prompt_survives_an_interruption(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, whole = prompts(tmp_path), tmp_path / "out" / "o.jsonl", tmp_path / "whole.jsonl"
    out.parent.mkdir()
    chosen: Any = Loaded(decoder, SETTINGS)
    run_file(chosen, source, whole, lambda line: None, bar=False)
    # The slow one is the second; twice in a row, since what was kept must outlive the next interruption too.
    for order, there in (([0, 3, 5], 3), ([2], 4)):
        with monkeypatch.context() as patch:
            overtaken(patch, order, lambda: None)
            with pytest.raises(Stopped, match=f"stopped with {there} of 6 prompts; the same command goes on"):
                run_file(chosen, source, out, lambda line: None, bar=False)
        assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == [0]
    told: list[str] = []
    results = run_file(chosen, source, out, told.append, bar=False)
    assert "4 of 6 prompts are done already: going on" in told
    assert len(results) == 2
    assert unmeasured(out) == unmeasured(whole)
    assert sorted(path.name for path in out.parent.iterdir()) == ["o.jsonl", "o.jsonl.run.json"]


def test_an_answer_is_in_the_output_as_soon_as_those_before_it_are(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = prompts(tmp_path, 4), tmp_path / "out.jsonl"
    seen: list[int] = []
    overtaken(monkeypatch, [1, 0, 3, 2], lambda: seen.append(len(out.read_text().splitlines())))
    run_file(Loaded(decoder, SETTINGS), source, out, lambda line: None, bar=False)  # type: ignore[arg-type]
    assert seen == [0, 2, 2, 4]


@pytest.mark.parametrize("bar", [False, True])
def test_processes_that_share_a_terminal_draw_one_bar(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bar: bool
) -> None:
    source, out, whole = prompts(tmp_path, 4), tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    chosen: Any = Loaded(decoder, SETTINGS)
    run_file(chosen, source, whole, lambda line: None, bar=False)
    (tmp_path / "whole.jsonl.run.json").rename(tmp_path / "out.jsonl.run.json")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("dsbd_cli.batch.progress._bar", lambda *_: pytest.fail("a second bar"))
    told: list[str] = []
    assert len(run_file(chosen, source, out, told.append, bar=bar)) == 2
    assert sum(line.startswith("2/2 prompts") for line in told) == (0 if bar else 1)
    assert told[-1].startswith("2 of 2 answers are unfinished")


def test_what_a_kill_behind_the_last_record_left_goes_when_all_is_found_done(
    decoder: Decoder, tmp_path: Path
) -> None:
    source, out = prompts(tmp_path, 3), tmp_path / "out.jsonl"
    chosen: Any = Loaded(decoder, SETTINGS)
    run_file(chosen, source, out, lambda line: None, bar=False)
    whole, early = out.read_bytes(), tmp_path / "out.jsonl.early"
    early.write_bytes(whole.splitlines(keepends=True)[2])
    told: list[str] = []
    assert run_file(chosen, source, out, told.append, bar=False) == []
    assert told[0].startswith("all 3 prompts are done already")
    assert out.read_bytes() == whole
    assert not early.exists()


def test_a_drawn_seed_is_kept_for_the_resume(decoder: Decoder, tmp_path: Path) -> None:
    source, out = prompts(tmp_path, 4), tmp_path / "out.jsonl"
    chosen: Any = Loaded(decoder, dataclasses.replace(SETTINGS, seed=None))
    told: list[str] = []
    run_file(chosen, source, out, told.append, bar=False)
    before = unmeasured(out)
    seed = json.loads((tmp_path / "out.jsonl.run.json").read_text())["seed"]
    assert f"seed {seed}" in told
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:30])
    run_file(chosen, source, out, told.append, bar=False)
    assert unmeasured(out) == before


@pytest.mark.parametrize("what", ["settings", "input", "weights", "seed"])
def test_another_run_does_not_go_into_the_same_file(
    folders: tuple[str, str], tmp_path: Path, what: str
) -> None:
    decoder = Decoder.from_pair(*folders)
    source, out = prompts(tmp_path), tmp_path / "out.jsonl"
    run_file(Loaded(decoder, SETTINGS), source, out, lambda line: None, bar=False)  # type: ignore[arg-type]
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:3]))
    settings = SETTINGS
    if what == "settings":
        settings = dataclasses.replace(SETTINGS, width=2)
    elif what == "seed":
        settings = dataclasses.replace(SETTINGS, seed=4)
    elif what == "input":
        source.write_text(source.read_text() + "one more\n")
    else:
        assert decoder.pair.draft is not None
        with torch.no_grad():
            decoder.pair.draft.model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    before = out.read_bytes()
    with pytest.raises(
        UserError, match={"settings": "width", "input": "content or form", "weights": "draft"}.get(what, what)
    ):
        run_file(Loaded(decoder, settings), source, out, lambda line: None, bar=False)  # type: ignore[arg-type]
    assert out.read_bytes() == before


def test_fingerprints_tell_weights_apart(folders: tuple[str, str]) -> None:
    one, two = Decoder.from_pair(*folders), Decoder.from_pair(*folders)
    assert weights(one) == weights(two)
    assert len(set(weights(one).values())) == 2
    assert weights(Decoder.from_pair(folders[0]))["draft"] is None


def test_input_and_output_are_two_files(decoder: Decoder, tmp_path: Path) -> None:
    source = prompts(tmp_path)
    with pytest.raises(UserError, match="one file"):
        run_file(Loaded(decoder, SETTINGS), source, source, lambda line: None, bar=False)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "kills"), [(1, 30), (3, 8)])
def test_cut_off_at_30_random_moments_it_resumes_to_the_same_bytes(
    folders: tuple[str, str], tmp_path: Path, world: int, kills: int
) -> None:
    source = prompts(tmp_path, 30)
    results = tmp_path / "results"
    results.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.batch.killer",
        *folders,
        str(source),
        str(results),
        str(kills),
        str(world),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["same"]
    assert report["hurt"] == kills
    assert report["left"] == ["cut.jsonl", "cut.jsonl.run.json", "whole.jsonl", "whole.jsonl.run.json"]
    # Some cut fell in the middle; how many records it left is the machine's pace, not the program's.
    if world == 1:
        assert report["resumed"] > 0


@pytest.mark.parametrize(
    "rule",
    [{"verify": "paper"}, {"verify": "continue"}, {}, {"threshold": 0.9}, {"kv": "one"},
     {"threshold": 0.9, "width_rule": "distinct"}],
)  # fmt: skip
def test_other_prices_are_another_run_where_the_text_follows_them(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any]
) -> None:
    source, out = prompts(tmp_path), tmp_path / "out.jsonl"
    chosen: Any = Loaded(decoder, dataclasses.replace(SETTINGS, **rule))
    tables = [
        Prices(Curve((1, 8), (1.0, 2.0)), Curve((1, 8), (cost, 2.0)), 0.1, "a test") for cost in (0.2, 0.3)
    ]

    def run(prices: Prices) -> None:
        monkeypatch.setattr(decoder.prices, "look_up", lambda settings: Kept(prices))
        run_file(chosen, source, out, lambda line: None, bar=False)

    run(tables[0])
    whole, kept = out.read_bytes(), unmeasured(out)
    out.write_bytes(whole[: whole.index(b"\n") + 1])
    if rule in ({}, {"threshold": 0.9, "width_rule": "distinct"}):
        run(tables[1])
    else:
        with pytest.raises(UserError, match="begun with another table of prices"):
            run(tables[1])
        run(tables[0])
    assert unmeasured(out) == kept


def test_one_content_read_in_two_ways_is_two_runs(decoder: Decoder, tmp_path: Path) -> None:
    text, lines, out = tmp_path / "in.txt", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for path in (text, lines):
        path.write_text('"one"\n"two"\n')
    chosen: Any = Loaded(decoder, SETTINGS)
    run_file(chosen, text, out, lambda line: None, bar=False)
    with pytest.raises(UserError, match="another content or form of --input: give another"):
        run_file(chosen, lines, out, lambda line: None, bar=False)
