"""`dsbd distill` on a tiny target: killed in each step, it ends with the very files of a run left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli.cli.main import run
from dsbd_cli.distill import draft as drafts
from dsbd_cli.distill import shards
from dsbd_cli.distill.evaluate import measure
from dsbd_cli.distill.metrics import Warp
from tests import builders

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}<|eot|>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|eot|>bot:{% endif %}"
)
OPTIONS = [
    "--layers", "2", "--share-embeddings", "--tokens", "5000", "--rows", "32", "--shard", "32", "--max-length", "140",
    "--answer-tokens", "48", "--share", "0.25", "--steps", "70", "--batch-tokens", "1024", "--warmup", "10",
    "--rate", "3e-3", "--device", "cpu", "--seed", "3",
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-layer random Llama with a chat template, built from a config."""
    folder = tmp_path_factory.mktemp("target")
    builders.rand(
        folder, num_hidden_layers=4, hidden_size=64, initializer_range=0.25, tie_word_embeddings=True
    )
    tokenizer = builders.tok(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    (folder / "prompts.txt").write_text("tell me\nwhat is it\nwrite a line\n", encoding="utf-8")
    return folder


def command(target: Path, out: Path) -> list[str]:
    return [
        "distill",
        "--target",
        str(target),
        "--out",
        str(out),
        "--prompts",
        str(target / "prompts.txt"),
        *OPTIONS,
    ]


def kill_when(target: Path, out: Path, ready: Callable[[], bool], before: Path) -> None:
    """Start the command, SIGKILL it as soon as `ready()`; `before` must not have been written by then."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from dsbd_cli.cli.main import run; sys.exit(run())",
         *command(target, out)],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 170
        while not ready():
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            assert time.monotonic() < deadline
            time.sleep(0.003)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not before.exists()


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    log = out / "log.jsonl"
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


def test_killed_in_every_step_it_resumes_to_the_same_draft(target: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left_alone, killed = tmp_path / "alone", tmp_path / "killed"
        assert run(command(target, left_alone)) == 0
        shard_files = sorted(p.name for p in (left_alone / "work" / "shards").iterdir())
        assert len(shard_files) >= 3
        last_shard = killed / "work" / "shards" / shard_files[-1]
        kill_when(target, killed, lambda: bool(events(killed, "shard")), last_shard)
        kill_when(target, killed, lambda: len(events(killed, "evaluate")) >= 4, killed / drafts.LAYERS_FILE)
        kill_when(target, killed, lambda: (killed / drafts.LAYERS_FILE).exists(), killed / "provenance.json")
        assert run(command(target, killed)) == 0
    finally:
        torch.set_num_threads(threads)

    for name in shard_files:
        one, two = (shards.load(folder / "work" / "shards" / name) for folder in (left_alone, killed))
        assert all((getattr(one, column) == getattr(two, column)).all() for column in shards.COLUMNS)
    layers = [(folder / drafts.LAYERS_FILE).read_bytes() for folder in (left_alone, killed)]
    assert layers[0] == layers[1]
    records = [json.loads((folder / "provenance.json").read_text()) for folder in (left_alone, killed)]
    assert records[0]["result"]["curve"] == records[1]["result"]["curve"]
    assert records[0]["evaluation"]["sets"] == records[1]["evaluation"]["sets"]
    # The training was really taken up in its middle, not begun again.
    steps = [line["step"] for line in events(killed, "evaluate")]
    assert steps.count(0) == 1
    assert_learned(target, left_alone)


def assert_learned(target: Path, out: Path) -> None:
    """The draft beats an untrained one and one of random weights on answers held out from training."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target).eval()
    record = json.loads((out / "provenance.json").read_text())
    whole = shards.load_folder(out / "work" / "shards")
    from dsbd_cli.distill import batches

    held = whole.take(batches.split(len(whole), 0.02, 768, 3)[1])
    trained = drafts.load_shared_draft(out, model)
    pruned = drafts.prune(model, record["keep"]).eval()
    torch.manual_seed(0)
    random = drafts.prune(model, record["keep"]).eval()
    with torch.no_grad():
        for name, parameter in random.named_parameters():
            if name not in drafts.shared_names(random) and parameter.ndim == 2:
                parameter.normal_(0, 0.02)
    scores = {
        name: measure(model, draft, held, Warp()).mean("warped")
        for name, draft in (("trained", trained), ("pruned", pruned), ("random", random))
    }
    assert scores["trained"] > scores["random"] + 0.03, scores
    assert scores["trained"] > scores["pruned"], scores


def test_other_options_in_the_same_folder_are_refused(target: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    base = command(target, out)
    few = [*base, "--tokens", "100", "--steps", "2"]
    assert run(few) == 0
    assert "dsbd: sampling takes 100 answer tokens" in capsys.readouterr().err
    assert run([*few, "--rate", "0.5"]) == 2
    assert "other training options" in capsys.readouterr().err
    assert run(["distill", "--target", str(target)]) == 2
    assert "--out is missing: dsbd distill --target MODEL --out DIR" in capsys.readouterr().err
    assert run([*base, "--keep", "0,9", "--layers", "2"]) == 2
    assert "not both" in capsys.readouterr().err


def test_an_ordinary_folder_and_an_earlier_start(target: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quick = ["--tokens", "100", "--steps", "2"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert run([*command(target, first), *quick]) == 0
    options = [o for o in command(target, second) if o != "--share-embeddings"]
    assert run([*options, *quick, "--from", str(first)]) == 0
    assert AutoModelForCausalLM.from_pretrained(second).config.num_hidden_layers == 2
