"""What can be known without torch is refused without torch: a wait of seconds teaches nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
# Prints a line per command: exit code, what was imported by then, and what was said.
PROGRAM = """
import contextlib, io, json, sys
from dsbd_cli.cli.main import run
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = run(arguments)
    heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
    print(json.dumps([code, heavy, said.getvalue()]))
"""


@pytest.fixture
def bad(tmp_path: Path) -> dict[str, str]:
    """Paths that cannot work, by what is wrong with them."""
    files = {
        "empty.gguf": b"", "text.gguf": b"hello there, this is no model at all", "lfs.gguf": LFS.encode(),
        "cut.gguf": b"GGUF\x03\0\0\0" + (5).to_bytes(8, "little") + (9).to_bytes(8, "little") + b"\x05\0\0\0",
        "no.yaml": b"widht: 4\n", "twice.yaml": b"width: 4\nwidth: 5\n", "list.yaml": b"- width\n",
        "range.yaml": b"width: 4\ntop_p: 1.5\n", "none.yaml": b"", "words.yaml": b"width: many\n",
        "two.yaml": b"target: ./nowhere\nmethod: beam\n", "file.bin": b"x", "prompts.txt": b"hi\n",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in ("bare", "lfs", "weightless", "broken"):
        (tmp_path / name).mkdir()
    for name in ("lfs", "weightless"):
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "lfs" / "model.safetensors").write_text(LFS)
    return {path.name: str(path) for path in tmp_path.iterdir()} | {"typo": str(tmp_path / "typo")}


def refusals(bad: dict[str, str]) -> list[tuple[list[str], str]]:
    """(what stands behind the command, a word of what is said) for every command that loads a pair."""
    one = ["--method", "beam", "--target"]
    return [
        (["--target", bad["typo"]], "no such folder or file"),
        ([*one, "./typo/"], "no such folder or file"),
        (["--draft", bad["typo"]], "draft"),
        ([*one, bad["bare"]], "config.json"),
        ([*one, bad["broken"]], "not valid JSON"),
        ([*one, bad["weightless"]], "no weights"),
        ([*one, bad["lfs"]], "Git LFS pointer"),
        ([*one, bad["file.bin"]], "must be a .gguf"),
        ([*one, bad["empty.gguf"]], "is empty (0 bytes)"),
        ([*one, bad["text.gguf"]], "not a GGUF file"),
        ([*one, bad["lfs.gguf"]], "Git LFS pointer"),
        ([*one, bad["cut.gguf"]], "cut short or damaged"),
        ([*one, "org/name"], "HF_HUB_OFFLINE"),
        (["--draft", "embedded:smoll"], "ships no such draft"),
        ([*one, "wheel:x"], "wheel:"),
        (["--preset", "qwen3-8"], "did you mean"),
        (["--preset", "./nowhere.yaml"], "no such file"),
        (["--preset", bad["no.yaml"]], "line 1: unknown key 'widht' (did you mean width?)"),
        (["--preset", bad["twice.yaml"]], "line 2"),
        (["--preset", bad["list.yaml"]], "line 1"),
        (["--preset", bad["range.yaml"]], "line 2: top-p"),
        (["--preset", bad["none.yaml"]], "is empty"),
        (["--preset", bad["words.yaml"]], "line 1: width must be a whole number"),
        (["--preset", bad["two.yaml"]], "no such folder or file"),
        (["--preset", bad["bare"]], "folder"),
        (["--width", "0"], "width must be at least 1"),
        (["--width", "1e9"], "width"),
        (["--top-p", "1.5"], "top-p"),
        (["--temperature", "nan"], "temperature"),
        (["--verify", "covr"], "did you mean cover?"),
        (["--dtype", "float17"], "float16"),
        (["--device", "gpu"], "cuda:N"),
        (["--quantization", "3bit"], "8bit, 4bit"),
        (["--widht", "4"], "No such option"),
        (["--num-beams", "4"], "--width"),
    ]


def test_refusals_come_before_torch_is_imported(bad: dict[str, str], tmp_path: Path) -> None:
    commands, words = [], []
    for start in (["generate", "hi"], ["generate", "--lines"],
                  ["generate", "--input", bad["prompts.txt"], "--output", str(tmp_path / "out.jsonl")], ["chat"],
                  ["bench", "--dataset", "squad", "--out", str(tmp_path / "bench")]):  # fmt: skip
        for options, word in refusals(bad):
            if start[0] == "bench" and "--method" in options:
                options = ["--methods", "beam", *options[2:]]
            commands.append([*start, *options])
            words.append(word)
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env=environment(HF_HUB_CACHE=str(tmp_path / "hub"), DSBD_CACHE=str(tmp_path / "cache")),
        capture_output=True, cwd=tmp_path, stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    ran = [json.loads(line) for line in process.stdout.splitlines()]
    assert ran[0][1] == []  # numpy neither, which reading a GGUF file needs
    for command, word, (code, heavy, said) in zip(commands, words, ran, strict=True):
        assert (code, [name for name in heavy if name != "numpy"]) == (2, []), (command, said)
        assert word in said, (command, said)
        assert said.count("\n") == 1, (command, said)
        assert said.startswith("dsbd: "), (command, said)
    assert not (tmp_path / "out.jsonl").exists()
