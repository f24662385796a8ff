"""The cache folder, and folders in it that are built once, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from dsbd_cli.errors import RunError, UserError
from dsbd_cli.loading.progress import Progress, silent

VARIABLE = "DSBD_CACHE"
_SIZES = ".sizes.json"  # of the files of a built folder
_POLITE_WAIT = 1.0  # seconds before saying that another process holds the lock


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The cache folder: the argument, else DSBD_CACHE, else the platform's cache folder. Not created."""
    chosen = cache_dir or os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dsbd"


def build_once(
    folder: Path, build: Callable[[Path], None], *, what: str, progress: Progress = silent
) -> Path:
    """`folder`, built by `build(temporary folder)` if it is not there yet, or no longer whole.

    The temporary folder takes its final name only when complete, under a lock: a killed process
    leaves nothing that looks finished, and of two processes one builds and the other waits.

    Raises:
        UserError: the cache folder cannot be written.
        RunError: the disk is full.
    """
    if is_built(folder):
        return folder
    with _writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, what, progress):
            if is_built(folder):
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


def is_built(folder: Path) -> bool:
    """Whether `folder` is there with all that was built, in full length: a cut library or a cut file of weights
    ends a process by a signal once it is mapped. One of an earlier version, without a record, is taken as it is.
    """
    try:
        sizes = json.loads((folder / _SIZES).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except FileNotFoundError as error:
        return folder.is_dir() and error.filename == str(folder / _SIZES)
    except (OSError, ValueError, AttributeError):
        return False


def _record(folder: Path) -> None:
    """Write down what `is_built` asks for."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    (folder / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")


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
