"""The cache folder, and folders in it that are built once, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dsbd_cli.errors import RunError, UserError, let_by
from dsbd_cli.loading.progress import Progress, silent
from dsbd_cli.paths import expanded

VARIABLE = "DSBD_CACHE"
_RECORD = ".built.json"  # what the files of a built folder are
_SIZES = ".sizes.json"  # the sizes alone, as earlier versions wrote them
_END = 1 << 16  # bytes of a file's beginning and end that are looked at
_POLITE_WAIT = 1.0  # seconds before saying that another process holds the lock


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The cache folder: the argument, else DSBD_CACHE, else the platform's cache folder. Not created."""
    chosen = cache_dir or os.environ.get(VARIABLE)
    if chosen:
        return expanded(chosen).absolute()
    try:
        return _platform_folder() / "dsbd"
    except RuntimeError as error:
        let_by(error)
        raise UserError(f"no home folder is known for the cache: set {VARIABLE} to a folder") from None


def _platform_folder() -> Path:
    """Where programs keep what they can make again. Raises RuntimeError where nobody knows a home folder."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base)


def is_built(folder: Path) -> bool:
    """Whether `folder` is there with all that was built, in full length: a cut library or a cut file of weights
    ends a process by a signal once it is mapped. Both ends of each file are what they were: a machine that lost its
    power may leave zeros in files of full length. One of an earlier version, without a record, is taken as it is.
    """
    try:
        found = _read(folder, _RECORD)
        if found is not None:
            return all(_facts(folder / name) == facts for name, facts in found.items())
        sizes = _read(folder, _SIZES)
        if sizes is not None:
            return all((folder / name).stat().st_size == size for name, size in sizes.items())
        return folder.is_dir()
    except (OSError, ValueError, AttributeError) as error:
        let_by(error)
        return False


def build_once(
    folder: Path,
    build: Callable[[Path], None],
    *,
    what: str,
    progress: Progress = silent,
    whole: Callable[[Path], bool] = is_built,
) -> Path:
    """`folder`, built by `build(temporary folder)` if it is not there yet, or no longer `whole`.

    The temporary folder takes its final name only when complete, under a lock: a killed process
    leaves nothing that looks finished, and of two processes one builds and the other waits.

    Raises:
        UserError: the cache folder cannot be written.
        RunError: the disk is full.
    """
    if whole(folder):
        return folder
    with _writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, what, progress):
            if whole(folder):
                return folder
            prefix = f".{folder.name}.part-"
            for stale in folder.parent.glob(prefix + "*"):  # only a dead process can have left these
                shutil.rmtree(stale, ignore_errors=True)
            part = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
            try:
                build(part)
                _record(part)
                _open_to_umask(part)
                if folder.is_dir():  # damaged
                    shutil.rmtree(folder)
                os.replace(part, folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


def _read(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        return None


def _facts(path: Path) -> list[Any]:
    """A file's size, and a sum of its beginning and its end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        ends = file.read(_END)
        file.seek(max(0, size - _END))
        ends += file.read(_END)
    return [size, hashlib.sha256(ends).hexdigest()[:16]]


def _record(folder: Path) -> None:
    """Write down what `is_built` asks for, and have the disk take all of it before the folder gets its name."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    facts = {path.relative_to(folder).as_posix(): _facts(path) for path in files}
    (folder / _RECORD).write_text(json.dumps(facts), encoding="utf-8")
    for path in [*files, folder / _RECORD]:
        with path.open("rb+") as file:
            os.fsync(file.fileno())


@contextmanager
def _locked(folder: Path, what: str, progress: Progress) -> Iterator[None]:
    lock = FileLock(str(folder) + ".lock")
    try:
        lock.acquire(timeout=_POLITE_WAIT)
    except Timeout:
        progress(f"waiting for another dsbd that is preparing {what}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Translate what a file system can refuse."""
    try:
        yield
    except OSError as error:
        let_by(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"no space left for the cache in {folder.parent}: free some, or set {VARIABLE} "
                           "to a folder with more") from error  # fmt: skip
        # (Where no folder can be made at all, as below /proc, a system may say that there is none.)
        nowhere = error.errno == errno.ENOENT and not folder.parent.is_dir()
        if nowhere or error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(f"the cache folder {folder.parent} cannot be written ({error.strerror}): "
                            f"set {VARIABLE} to one that can") from error  # fmt: skip
        raise


def _open_to_umask(folder: Path) -> None:
    """Give the files the permissions that a plain `open` would have: a cache may be shared."""
    mask = os.umask(0)
    os.umask(mask)
    for path in [folder, *folder.rglob("*")]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
