"""Paths a user names, looked at before they are read whole or written to; files that come whole or not at all."""

from __future__ import annotations

import errno
import functools
import glob
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsbd_cli.errors import RunError, UserError

FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk or a quota is exhausted


def expanded(text: str | Path) -> Path:
    """A path with `~` and `~user` as the folders that they stand for; where nobody knows that folder, as it stands."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def refuse_special(path: Path, what: str, instead: str) -> None:
    """Raise for devices, pipes and sockets: read whole, `/dev/zero` fills the memory and a pipe blocks.

    Args:
        path: links are followed; a path that is not there is no concern of this function, nor is a folder.
        what: how the message begins, with the path.
        instead: what to do.

    Raises:
        UserError: a special file, or a path that the system refuses to look at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        raise UserError(f"{what} cannot be used: {getattr(error, 'strerror', None) or error}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"{what} is a device or a pipe, not a file: {instead}")


def refuse_unwritable(path: Path, option: str) -> None:
    """Raise early where a file cannot be made, before a model is loaded for it; nothing is written.

    Folders above it that are missing are no fault: `make_parents` makes them when it is written.

    Raises:
        UserError: a folder, a name that no file can have, a file where a folder is to be, or no permission.
    """
    try:
        if path.is_dir() or not path.name:
            raise UserError(f"{option} {path} cannot be written: it is a folder, not a file")
        place = path if path.exists() else _nearest(path.absolute().parent)
        if place != path and not place.is_dir():
            raise UserError(f"{option} {path} cannot be written: {place} is {_what(place)}, not a folder")
        _refuse_tilde(path, option)
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from None
    if why := _forbidden(place):
        raise UserError(f"{option} {path} cannot be written: {why}")


def make_parents(path: Path, option: str) -> None:
    """Make the folders above a file that is about to be written.

    Raises:
        UserError: they cannot be made.
    """
    make_folder(path.absolute().parent, f"{option} {path}", "written")


def make_folder(path: Path, what: str, verb: str = "made") -> None:
    """Make a folder, and those above it; one that is there stays as it is.

    Args:
        what: what cannot be made otherwise, with its option. verb: `made`, or `written` for a file in the folder.

    Raises:
        UserError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{what} cannot be {verb}: {error.strerror}") from None


def refuse_foreign(path: Path, option: str, begin: str, what: str) -> None:
    """Raise where a file is there already that the program did not write; what it wrote itself, it writes over.

    Args:
        begin: how each of the program's own begins. what: a name for those, such as `trace`.

    Raises:
        UserError: another file, or one that cannot be read.
    """
    own = begin.encode()
    try:
        if not path.is_file():  # nothing there, or a device, which keeps nothing
            return
        with path.open("rb") as file:
            head = file.read(len(own))
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read: {error.strerror}") from None
    if not own.startswith(head):  # an empty file, or the first words of one that was cut, is nobody's
        raise UserError(
            f"{option} {path} is there already and is no {what}: give another name, or remove it first"
        )


def refuse_no_folder(path: Path, option: str) -> None:
    """Raise early where a folder cannot be made, or not be written to; `make_folder` makes it.

    Raises:
        UserError: a file has that name, or that of a parent; or no permission.
    """
    try:
        there = _nearest(path.absolute())
        if not there.is_dir():
            raise UserError(
                f"{option} {path} is to be a folder, and {there} is {_what(there)}: give another name"
            )
        _refuse_tilde(path, option)
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from None
    if why := _forbidden(there):
        raise UserError(f"{option} {path} cannot be written: {why}")


def _nearest(path: Path) -> Path:
    """The path, or the nearest above it that is there; a link that leads nowhere is there, too."""
    return next(place for place in (path, *path.parents) if place.exists() or place.is_symlink())


def _what(place: Path) -> str:
    return "a file" if place.exists() else "a link that leads nowhere"


def _refuse_tilde(path: Path, option: str) -> None:
    """Raise for `~` that a shell left as it is, as they do behind `=`: a folder of that name would be made."""
    first = path.parts[0]
    if first.startswith("~") and expanded(first) != Path(first) and not Path(first).exists():
        raise UserError(f"{option} {path}: the shell left {first} as it is: write {expanded(path)}")


def _forbidden(place: Path) -> str:
    """Why nothing can be written to what is there; empty where it can."""
    if os.access(place, os.W_OK):
        return ""
    return "its file system is read-only" if _read_only(place) else f"no permission for {place}"


@functools.cache
def _machine() -> str:
    """Tells machines that share a folder apart, for each has its own process numbers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    except OSError:
        return socket.gethostname().partition(".")[0] or "here"


def _runs(process: str) -> bool:
    """Whether a process of this number may be there."""
    if os.name != "posix" or not process.isdecimal():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes `path`'s place when the block ends well, and goes if not.

    What a process of this machine left of the same file when it was killed goes too.
    """
    mark = f".{path.name}.{_machine()}-"
    for left in path.parent.glob(f"{glob.escape(mark)}*.tmp"):
        if not _runs(left.name[len(mark) : -len(".tmp")]):
            left.unlink(missing_ok=True)
    draft = path.with_name(f"{mark}{os.getpid()}.tmp")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, data: str | bytes | Iterable[bytes]) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        RunError: the disk is full, or refuses.
    """
    if isinstance(data, (str, bytes)):
        data = [data.encode("utf-8") if isinstance(data, str) else data]
    try:
        with replacing(path) as draft, draft.open("wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(path, error, "then give the same command again") from error


def same_file(fd: int, path: Path) -> bool:
    """Whether the open file `fd` is still the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def check_own(fd: int, path: Path, size: int, run: str) -> None:
    """Records in a file that was removed are lost without a word, and those of one that was cut have gaps.

    Args:
        fd, size: the open file that `path` named, and the bytes that it must have.
        run: what writes to it.

    Raises:
        RunError: it was removed, replaced or changed since.
    """
    if not same_file(fd, path):
        raise RunError(
            f"{path} was removed or replaced while the {run} was running: its records are lost; "
            "the same command begins anew"
        )
    if os.fstat(fd).st_size != size:
        raise RunError(
            f"{path} was changed by someone else while the {run} was running: move it away, and "
            "give the same command again"
        )


def write_error(what: Path | str, error: OSError, then: str = "") -> RunError:
    """The one line for a write that failed: where, why, and what to do.

    Args:
        what: the file, or a name for it.
        then: what can be done once there is space.
    """
    if error.errno in FULL:
        return RunError(f"no space left for {what}: free some{f'; {then}' if then else ''}")
    if error.errno == errno.EFBIG:
        return RunError(f"{what} is as large as a file may be here (ulimit -f, or the file system)")
    return RunError(f"{what} cannot be written: {error.strerror or error}")


def _read_only(path: Path) -> bool:
    if not hasattr(os, "statvfs"):
        return False
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False
