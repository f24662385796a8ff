"""Paths a user names, looked at before they are read whole or written to; files that come whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsbd_cli.errors import UserError


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

    Raises:
        UserError: a folder, a name that no file can have, no such parent folder, or no permission.
    """
    try:
        if path.is_dir() or not path.name:
            raise UserError(f"{option} {path} cannot be written: it is a folder, not a file")
        if not path.absolute().parent.is_dir():
            raise UserError(f"{option} {path} cannot be written: there is no folder {path.parent}")
        place = path if path.exists() else path.absolute().parent
    except (OSError, ValueError) as error:
        raise UserError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from None
    if not os.access(place, os.W_OK):
        raise UserError(f"{option} {path} cannot be written: no permission for {place}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes `path`'s place when the block ends well, and goes if not."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
