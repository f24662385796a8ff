"""What can be refused of a pair within the second: before torch and transformers, which take seconds to import."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from dsbd_cli.errors import UserError
from dsbd_cli.loading import hub
from dsbd_cli.loading.cache import cache_root
from dsbd_cli.loading.checkpoint import check_folder
from dsbd_cli.loading.source import SHARED_WEIGHTS, Source, parse_source
from dsbd_cli.loading.spec import PairSpec


def look(spec: PairSpec, *, need_draft: bool = True, cache_dir: str | Path | None = None) -> list[Source]:
    """The sources of a pair, target first, looked at as far as neither torch nor the network is needed.

    Raises:
        UserError: no such path, a folder or file that is broken, a hub name that is not cached while
            offline, a target that is a draft, a revision of what is not on the hub, a missing optional package.
    """
    wanted = {"target": (spec.target, spec.revision)}
    if need_draft and spec.draft is not None:
        wanted["draft"] = (spec.draft, spec.draft_revision)
    # Names before files: a typing error in the draft's is told before the target's shards are read.
    sources = {role: parse_source(text, role) for role, (text, _) in wanted.items()}
    for role, revision in (("target", spec.revision), ("draft", spec.draft_revision)):
        _check_revision(role, sources.get(role), revision, spec)
    asked = of_hub(sources, {role: revision for role, (_, revision) in wanted.items()})
    for role in reversed(sources):  # the draft first, as everywhere
        if role in asked:
            hub.refuse_offline(asked[role], [*asked.values()])
        else:
            _check(sources[role], role, cache_root(cache_dir))
    if spec.quantization is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"quantization {spec.quantization} needs bitsandbytes: pip install bitsandbytes")
    return list(sources.values())


def require_target(spec: PairSpec) -> None:
    """Refuse a target that is not to be had: of the hub that is asked, with one small request.

    For what is wrong beside it, which is told once the target is known to be there.

    Raises:
        UserError: as `look`, or a model that the hub does not show.
    """
    (source,) = look(spec.replace(draft=None), need_draft=False)
    if source.kind == "hub":
        hub.only_cached(hub.Asked("target", source.text, spec.revision))


def of_hub(sources: Mapping[str, Source], revisions: Mapping[str, str | None]) -> dict[str, hub.Asked]:
    """By role, those of a pair's models that are the hub's."""
    return {
        role: hub.Asked(role, source.text, revisions.get(role))
        for role, source in sources.items()
        if source.kind == "hub"
    }


def _check_revision(role: str, source: Source | None, revision: str | None, spec: PairSpec) -> None:
    """A revision of what has none would be passed over: other weights than those asked for."""
    name = "revision" if role == "target" else "draft-revision"
    if revision is None:
        return
    if source is not None and source.kind != "hub":
        raise UserError(
            f"{name} {revision}: {role} {source.text} is not on the hub, so it has none: leave {name} out"
        )
    if role == "draft" and spec.draft is None:
        raise UserError(f"{name} {revision} without a draft: name the draft, or leave {name} out")


def _check(source: Source, role: str, cache: Path) -> None:
    if source.kind == "gguf" and source.path is not None:
        from dsbd_cli.loading.gguf_file import check_file

        check_file(source.path, role, cache)
    elif source.path is not None:
        if not (source.path / SHARED_WEIGHTS).is_file():
            check_folder(source.path, role)
        elif role == "target":
            raise UserError(
                f"target {source.text} has no embeddings of its own: it is a draft for another model"
            )
