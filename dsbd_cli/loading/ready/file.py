"""One file a pair in the cache folder: a record and a tokenizer, whole and of this very key, or not there.

A magic line, the sum of all that follows, the record's length, the record (JSON), the tokenizer's bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from dsbd_cli.errors import let_by, suppressed

_MAGIC = b"dsbd ready pair 1\n"
_SUM, _LENGTH = 32, 8


def write(path: Path, key: dict[str, Any], record: dict[str, Any], tokenizer: bytes) -> bool:
    """Write, whole or not at all; a folder that cannot be written or a full disk is no error.

    Returns:
        Whether it was written.
    """
    head = json.dumps({"key": key, "record": record}, sort_keys=True).encode()
    body = len(head).to_bytes(_LENGTH, "little") + head + tokenizer
    part: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.part-", dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(_MAGIC + hashlib.sha256(body).digest() + body)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(part, 0o666 & ~mask)  # a cache may be shared
        os.replace(part, path)
    except OSError as error:
        let_by(error)
        if part is not None:
            with suppressed(OSError):
                os.unlink(part)
        return False
    return True


def read(path: Path, key: dict[str, Any]) -> tuple[dict[str, Any], bytes] | None:
    """(record, tokenizer) as written under this key; None where nothing is there, or something damaged or foreign."""
    try:
        data = path.read_bytes()
    except OSError as error:
        let_by(error)
        return None
    begin = len(_MAGIC) + _SUM
    body = memoryview(data)[begin:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : begin]:
        return None
    end = _LENGTH + int.from_bytes(body[:_LENGTH], "little")
    found = json.loads(bytes(body[_LENGTH:end]))
    # As JSON has it: a tuple is a list there.
    if found["key"] != json.loads(json.dumps(key)):
        return None
    return found["record"], bytes(body[end:])
