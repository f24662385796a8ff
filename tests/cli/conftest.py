"""`dsbd` run inside the test process: arguments and stdin in, exit code and the bytes of both streams out."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import builders

ROOT = Path(__file__).parents[2]
METHODS = ("multinomial", "beam", "speculative", "specinfer", "dsbd")
# Every code path that decodes, as options; what is promised of an answer holds on each of them.
# Without prices an adaptive forest of such small models is empty, and dsbd would be compared with itself.
_DRAFTED = ["--forest", "full"]
WAYS = {
    **{method: ["--method", method] for method in METHODS},
    "speculative": ["--method", "speculative", *_DRAFTED],
    "dsbd": ["--method", "dsbd", *_DRAFTED],
    "dsbd adaptive": ["--method", "dsbd"],
    "specinfer wide": ["--method", "specinfer", "--tree", "3,2,1,1"],
    "specinfer spectr": ["--method", "specinfer", "--tree-rule", "spectr"],
    "specinfer rsd": ["--method", "specinfer", "--tree-rule", "rsd"],
    "beam narrow": ["--method", "beam", "--width", "1"],
    "dsbd paper": ["--method", "dsbd", *_DRAFTED, "--verify", "paper"],
    "dsbd continue": ["--method", "dsbd", *_DRAFTED, "--verify", "continue"],
    "dsbd dynamic": ["--method", "dsbd", *_DRAFTED, "--threshold", "0.9", "--min-width", "1"],
    "dsbd paper dynamic": [
        "--method",
        "dsbd",
        *_DRAFTED,
        "--verify",
        "paper",
        "--threshold",
        "0.9",
        "--min-width",
        "1",
    ],
    "dsbd one cache": ["--method", "dsbd", *_DRAFTED, "--verify", "continue", "--kv", "one"],
    "dsbd undrafted": ["--method", "dsbd", "--gamma", "0"],
}

# Beam search without sampling takes no sampling options, so it is apart.
EVERY_WAY = WAYS | {
    "beam deterministic": ["--method", "beam", "--deterministic"],
    "dsbd deterministic": ["--method", "dsbd", "--deterministic", *_DRAFTED],
}


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode("utf-8")

    @property
    def json(self) -> dict[str, Any]:
        """Stdout as exactly one JSON document on one line."""
        assert self.out.endswith(b"\n")
        assert self.out.count(b"\n") == 1
        return json.loads(self.out)

    def refused(self, *words: str) -> None:
        """The input was wrong: exit 2, one line on stderr with these words, nothing on stdout."""
        lines = self.err.splitlines()
        assert (self.code, self.out) == (2, b""), (self.code, self.out, self.err)
        assert len(lines) == 1, self.err
        assert lines[0].startswith("dsbd: ")
        for word in words:
            assert word in lines[0], lines[0]


Call = Callable[..., Ran]


@pytest.fixture(scope="module", autouse=True)
def no_network(new_cache: Callable[[], Path]) -> Iterator[None]:
    """Local folders are all that these tests may touch; a look-up on the hub would fail them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("DSBD_CACHE", str(new_cache()))
        yield


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """For tests of what is decoded, not of loading: files that have not changed are read once."""
    import dsbd_cli.loading
    from dsbd_cli.loading.stamp import stamps

    real, pairs = dsbd_cli.loading.load_pair, {}

    def load_pair(spec: Any, *, need_draft: bool = True, **_: Any) -> Any:
        found = stamps(spec, need_draft=need_draft and spec.draft is not None)
        key = json.dumps([need_draft, found], sort_keys=True)
        if key not in pairs:
            pairs[key] = real(spec, need_draft=need_draft)
        return pairs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsbd_cli.loading, "load_pair", load_pair)
        yield


@pytest.fixture
def dsbd(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command line: `dsbd("generate", "hi", "--target", folder)`."""
    from dsbd_cli.cli.main import run

    def call(*arguments: str | Path, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsysbinary.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsysbinary.readouterr()
        return Ran(code, out, err.decode("utf-8"))

    return call


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`models("rand", seed=1)`: the folder of a model made by a builder, each made once."""
    made: dict[str, str] = {}
    base = tmp_path_factory.mktemp("models")

    def get(builder: str, *arguments: Any, **options: Any) -> str:
        key = repr((builder, arguments, sorted(options.items())))
        if key not in made:
            folder = base / str(len(made))
            getattr(builders, builder)(folder, *arguments, **options)
            made[key] = str(folder)
        return made[key]

    return get


def pair(target: str, draft: str | None = None) -> list[str]:
    """The options that name a pair; the target drafts for itself where no draft is given."""
    return ["--target", target, "--draft", draft or target]


def program(*arguments: str | Path) -> list[str]:
    """The same command as a process of its own."""
    return [sys.executable, "-c", "from dsbd_cli.cli.main import main; main()", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """For `program`: this checkout, one thread, no network."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more
