"""The scripts end to end on tiny models: what is run, what is kept, and that nothing is run twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import curves, frontier, speed
from benchmarks.kit.arms import parse_arms
from benchmarks.kit.profiler import profile
from benchmarks.kit.results import read
from dsbd_cli.decoder import Decoder
from dsbd_cli.settings import Settings
from tests import builders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    builders.rand(folder / "target", num_key_value_heads=2)
    builders.rand(folder / "draft", seed=1, num_hidden_layers=1)
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft"), "--device", "cpu"]


SIZES = ["--inflate", "--hidden", "64", "--heads", "8", "--kv-heads", "4", "--intermediate", "96"]
SHORT = [
    "--prompts",
    "3",
    "--prompt-tokens",
    "40",
    "--max-new-tokens",
    "8",
    "--warmup",
    "1",
    "--breakdown",
    "1",
]


@pytest.mark.slow
def test_speed(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    command = [*folders, *SIZES, *SHORT, "--hf-limit", "2", "--fixed-length", "--out", str(out)]
    assert speed.main(command) == 0
    shown = capsys.readouterr().out
    found = read(out)
    arms, records = list(found["arms"]), found["records"]
    ours = [arm for arm in arms if not arm.startswith("hf-")]
    assert len(arms) == 13
    assert len(ours) == 9
    assert len(records) == 3 * 9 + 2 * 4
    assert {record["new_tokens"] for record in records} == {8}
    # The same seed for every arm, so in float32 `cover` at a fixed width says what `beam` says.
    tokens = {(record["prompt"], record["arm"]): record["token_ids"] for record in records}
    for prompt in {record["prompt"] for record in records}:
        assert tokens[prompt, "dsbd:cover threshold=none"] == tokens[prompt, "beam"]
    # One yardstick for all: the teacher-forced sum is the engine's own.
    for record in records:
        if record["arm"] in ours:
            assert record["logprob"] == pytest.approx(record["logprob_engine"], abs=1e-3)
        assert record["decode_s"] > 0
    assert found["facts"]["models"]["target"]["hidden"] == 64
    assert found["facts"]["models"]["draft"]["hidden"] == 32
    assert set(found["breakdown"]) == set(ours)
    assert found["breakdown"]["beam"]["draft"] < found["breakdown"]["beam"]["target"]
    assert found["sessions"][0]["copy_bytes_per_s"] > 0
    assert set(found["summary"]["beam"]["against"]) == {"hf-beam-sample", "multinomial"}
    for text in ("against hf-beam-sample", "ms an iteration", "copy bandwidth", "dsbd:cover threshold=none"):
        assert text in shown

    # Again: nothing is left to do. With one prompt and one arm more: only those.
    assert speed.main([*command, "--breakdown", "0", "--warmup", "0"]) == 0
    assert read(out)["records"] == records
    capsys.readouterr()
    more = [
        *command,
        "--breakdown",
        "0",
        "--warmup",
        "0",
        "--arms",
        "beam; dsbd:cover gamma=2",
        "--prompts",
        "4",
    ]
    assert speed.main(more) == 0
    new = read(out)["records"][len(records) :]
    assert sorted((record["arm"], record["prompt"]) for record in new)[0][0] == "beam"
    assert len(new) == 1 + 4
    shown = capsys.readouterr().out
    assert speed.main(["--report", str(out)]) == 0
    assert capsys.readouterr().out == shown


def test_speed_stops_in_time(folders: list[str], tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    table = ["--arms", "beam", "--breakdown", "0", "--warmup", "0", "--prompts", "3", "--max-new-tokens", "2"]
    assert speed.main([*folders, *table, "--time-limit", "1e-9", "--out", str(out)]) == 0
    assert read(out)["records"] == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--out is missing"),
        (["--out", "x.json", "--arms", "bean"], "no method 'bean'"),
        (["--out", "x.json", "--inflate", "--hidden", "16"], "below the model's own"),
        (["--report", "nothing.json"], "not a results file"),
    ],
)
def test_speed_says_what_is_wrong(
    folders: list[str], options: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert speed.main([*folders, *options]) == 2
    assert says in capsys.readouterr().err


def test_profile_sees_whole_iterations(folders: list[str]) -> None:
    """Also of a model whose texts would end sooner: the pass lets nothing end them, and puts that back."""
    decoder = Decoder.from_pair(folders[1], folders[3], device="cpu")
    pair = decoder.pair
    beam, reference = parse_arms("beam width=2; hf-sample", Settings(max_new_tokens=2))
    found = profile(decoder, beam, [5, 6, 7], 0, iterations=4)
    assert found is not None
    assert found["iterations"] == 4
    assert found["wall_ms"] > 0
    assert found["host_ms"]
    assert profile(decoder, reference, [5, 6, 7], 0) is None
    assert decoder.pair is pair


@pytest.mark.slow
def test_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curves.json"
    few = [
        "--widths",
        "1,4",
        "--gammas",
        "1,3",
        "--lengths",
        "20,60,140000",
        "--nodes",
        "1,8",
        "--prompt-length",
        "20",
    ]
    command = [
        "--shape",
        "toy",
        "--device",
        "cpu",
        "--max-new-tokens",
        "4",
        "--rounds",
        "2",
        *few,
        "--out",
        str(out),
    ]
    assert curves.main(command) == 0
    shown = capsys.readouterr().out
    found = read(out)
    points = {(record["curve"], record["series"], record["x"]) for record in found["records"]}
    assert points == {
        *(("width", series, x) for series in ("beam", "dsbd") for x in (1, 4)),
        *(("gamma", series, x) for series in ("speculative", "dsbd") for x in (1, 3)),
        *(("prompt", series, x) for series in ("multinomial", "beam", "dsbd") for x in (20, 60)),
        *(("nodes", series, x) for series in ("target", "draft") for x in (1, 8)),
    }
    assert len(found["records"]) == 2 * len(points)
    assert "prompt beam 140000: the context holds 131072 tokens" in shown
    assert all(value is None or value > 0 for record in found["records"] for value in
               (record.get("iteration_ms"), record.get("forward_ms")))  # fmt: skip
    kv = {record["x"]: record["kv_bytes"] for record in found["records"] if record["series"] == "multinomial"}
    assert kv[60] > 2 * kv[20]
    for suffix in (".png", ".svg"):
        assert out.with_suffix(suffix).stat().st_size > 10_000
    assert curves.main(command) == 0
    assert read(out)["records"] == found["records"]


def test_curves_of_a_pair(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curves.json"
    few = ["--curves", "nodes", "--nodes", "2", "--rounds", "1", "--prompt-length", "30", "--prompts", "2"]
    assert curves.main([*folders, *SIZES, *few, "--out", str(out)]) == 0
    assert {(r["series"], r["x"]) for r in read(out)["records"]} == {("target", 2), ("draft", 2)}
    assert curves.main([*folders, "--curves", "nods", "--out", str(tmp_path / "other.json")]) == 2
    assert "no curve 'nods'" in capsys.readouterr().err
    assert not (tmp_path / "other.json").exists()


def test_frontier(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, arms = (
        tmp_path / "a.json",
        ["beam width=2", "dsbd:cover width=2 forest_nodes=4 lookup=2 forest=full"],
    )
    command = [
        *folders,
        "--shots",
        "0",
        "--limit",
        "2",
        "--timed",
        "1",
        "--hf-limit",
        "1",
        "--batch",
        "4",
        "--datasets",
        "squad,mt-bench",
    ]
    command += [
        "--max-new-tokens",
        "6",
        "--arms",
        "; ".join([*arms, "hf-beam-sample width=2"]),
        "--out",
        str(out),
    ]
    assert frontier.main(command) == 0
    records = read(out)["records"]
    # Both arms of ours are of one law: it is judged once.
    assert len(records) == 2 * (2 * 2 + 3 * 1)
    by = {(one["pass"], one["arm"], one["kind"], one["item"]): one for one in records}
    for (name, arm, kind, item), one in by.items():
        # One seed, one law: what is proposed changes no text, and neither do others beside it.
        if arm == arms[1]:
            assert one["logprob"] == pytest.approx(by[name, arms[0], kind, item]["logprob"], abs=1e-3)
        if name == "speed" and arm in arms:
            assert one["logprob"] == pytest.approx(by["quality", arms[0], kind, item]["logprob"], abs=1e-3)
            assert one["seconds"] > 0
        assert (one["correct"] is None) == (kind == "mt-bench")
    assert frontier.main(command) == 0
    assert len(read(out)["records"]) == len(records)
    assert (
        frontier.main(
            ["--report", str(out), str(out), "--quality", str(out), "--out", str(tmp_path / "both")]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert (tmp_path / "both.md").read_text() in shown
    assert "<svg" in (tmp_path / "both.svg").read_text()
    assert "log-prob a token" in shown
    assert frontier.main(folders) == 2
