"""The model hub: can it be asked, is the model cached, and one clear line where neither helps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dsbd_cli.errors import UserError

_TIMEOUT = 10.0  # seconds for the one question asked before anything slow
_TRUE = {"1", "ON", "YES", "TRUE"}


def offline_variable() -> str | None:
    """The variable that forbids the network, if one is set. Read at each call, not at import."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in _TRUE:
            return name
    return None


def refuse_offline(repo: str, revision: str | None, role: str) -> None:
    """Raise if `repo` is not in the local cache and a variable forbids the network; asks nothing."""
    variable = offline_variable()
    if variable is None or _cached(repo, revision):
        return
    at = f" at revision {revision}" if revision else ""
    raise UserError(f"{role} {repo}{at} is not in the local cache and {variable} is set: unset it to "
                    "download the model, or name a local folder")  # fmt: skip


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The folder of the local cache that serves `repo`, or None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _cached(repo: str, revision: str | None) -> bool:
    return cached_snapshot(repo, revision) is not None


def only_cached(repo: str, revision: str | None, role: str) -> bool:
    """Whether `repo` is to be read from the local cache alone.

    One small request decides, without retries; when the hub cannot be reached a cached copy serves.

    Raises:
        UserError: not cached and offline, unreachable, unknown, or gated; says which and what to do.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    refuse_offline(repo, revision, role)
    if offline_variable():
        return True
    have = _cached(repo, revision)
    at = f" at revision {revision}" if revision else ""
    try:
        get_hf_file_metadata(hf_hub_url(repo, "config.json", revision=revision), timeout=_TIMEOUT)
    except hub.GatedRepoError:
        if have:
            return True
        raise UserError(f"{role} {repo} is gated: accept its licence at https://huggingface.co/{repo}, then set "
                        "HF_TOKEN to a token of that account") from None  # fmt: skip
    except hub.RepositoryNotFoundError:
        raise UserError(f"{role} {repo}: neither a folder here nor a model that the hub shows you (a private "
                        "one needs HF_TOKEN)") from None  # fmt: skip
    except hub.RevisionNotFoundError:
        raise UserError(f"{role} {repo} has no revision {revision!r} on the hub") from None
    except hub.EntryNotFoundError:
        raise UserError(f"{role} {repo} has no config.json on the hub: not a transformers model") from None
    except Exception as error:  # the HTTP library differs between releases of the hub client
        if have:
            return True
        raise UserError(f"{role} {repo}{at}: no such folder here, not in the local cache, and the hub could "
                        f"not be asked ({first_line(error)})") from None  # fmt: skip
    return False


def first_line(error: BaseException) -> str:
    """An error's first line with words in it, or its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def snapshot(repo: str, **where: Any) -> str:
    """A local folder with the repository's settings and safetensors."""
    from huggingface_hub import snapshot_download

    return str(snapshot_download(repo, allow_patterns=["*.json", "*.safetensors", "*.jinja"], **where))
