"""Loading a pair: everything that is cheap to refuse comes before anything that is slow to load."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsbd_cli.errors import UserError
from dsbd_cli.group import Group
from dsbd_cli.loading import compat, early, hardware, number_format, vocabulary
from dsbd_cli.loading.cache import cache_root
from dsbd_cli.loading.model import LoadedModel, load_config, load_tokenizer, load_weights
from dsbd_cli.loading.place import Place, locate
from dsbd_cli.loading.progress import LOG, Progress, logged
from dsbd_cli.loading.quiet import quiet_transformers
from dsbd_cli.loading.shapes import refuse_other_ends, skeleton
from dsbd_cli.loading.shared import examine, is_shared, load_shared
from dsbd_cli.loading.source import SHARED_WEIGHTS
from dsbd_cli.loading.spec import PairSpec


@dataclass
class Pair:
    """Two models that speak of the same tokens.

    Attributes:
        target, draft: the models; `draft` is None where none was asked for.
        tokenizer: the target's.
        eos_ids: ids that end a text, ascending; may be empty.
        vocab_size: ids 0 .. vocab_size - 1 are tokens; rows beyond are padding with probability 0.
        notes: lines for the user, such as generation options that are not applied.
        passing: those of `notes` that tell of this load alone.
        draft_ids: the ids that the draft proposes, ascending; None: all that it has.
        verdicts: by role, what the self-test said of these very models before (`ready.pair`).
        formats: by role, the verdict on number formats that was or should have been followed (`number_format.pick`).
    """

    target: LoadedModel
    draft: LoadedModel | None
    tokenizer: Any
    eos_ids: tuple[int, ...]
    vocab_size: int
    draft_ids: np.ndarray | None = None
    notes: list[str] = field(default_factory=list)
    passing: list[str] = field(default_factory=list)
    verdicts: dict[str, Any] = field(default_factory=dict)
    formats: dict[str, Any] = field(default_factory=dict)


def load(
    spec: PairSpec,
    *,
    need_draft: bool = True,
    progress: Progress | None = None,
    cache_dir: str | Path | None = None,
) -> Pair:
    """See `dsbd_cli.loading.load_pair`."""
    tell: Progress = progress or logged()
    begin = time.monotonic()
    cache = cache_root(cache_dir)
    want_draft = need_draft and spec.draft is not None
    sources = early.look(spec, need_draft=want_draft, cache_dir=cache)
    group: Group | None = None
    if spec.tensor_parallel > 1:
        from dsbd_cli.loading import sharded

        group, spec = sharded.meet(spec)
    devices = [hardware.pick_device(spec.target_device, "target")]
    devices += [hardware.pick_device(spec.draft_device, "draft")] if want_draft else []
    # The draft is looked at before the target, whose download or conversion may take minutes.
    roles = dict(zip(("target", "draft"), sources, strict=False))
    asked = [*early.of_hub(roles, {"target": spec.revision, "draft": spec.draft_revision}).values()]
    draft_place = locate(sources[1], "draft", spec.draft_revision, cache, tell, asked) if want_draft else None
    place = locate(sources[0], "target", spec.revision, cache, tell, asked)
    for one in filter(None, (place, draft_place)):
        LOG.info(
            "loading %s %s from %s", one.role, one.source.name, one.folder if one.is_local else "the hub"
        )
    trust = spec.trust_remote_code
    with quiet_transformers(downloads=progress is not None):
        config = load_config(place, trust)
        tokenizer = load_tokenizer(place, trust)
        draft_config: Any = None
        notes: list[str] = []
        if draft_place is not None:
            draft_config = _prepare_draft(draft_place, trust)
            if not draft_place.shared:
                names = (place.source.name, draft_place.source.name)
                notes += compat.check_same_tokens(tokenizer, load_tokenizer(draft_place, trust), names)
                refuse_other_ends(draft_place, draft_config, trust)
            elif (whole := skeleton(config, trust)) is not None:
                examine(
                    draft_place,
                    config,
                    whole.get_input_embeddings().weight.shape[-1],
                    place.source.name,
                    trust,
                )
        refuse_other_ends(place, config, trust)
        whole = spec.quantization is None and spec.device_map is None and group is None
        formats = {}
        format_, formats["target"] = number_format.pick(
            spec.target_dtype, place, config, devices[0],
            coarse=_coarse(place, config), whole=whole, trust=trust, tell=tell,
        )  # fmt: skip
        draft = None
        if draft_place is not None:
            # A draft that borrows its target's embeddings is stored in 8 bits, and borrows in one format only.
            borrowed = draft_place.shared
            coarse = format_.dtype == torch.bfloat16 if borrowed else _coarse(draft_place, draft_config)
            (draft_dtype, _), formats["draft"] = number_format.pick(
                spec.draft_dtype, draft_place, draft_config, devices[1],
                coarse=coarse, whole=not borrowed, trust=trust, tell=tell,
            )  # fmt: skip
            if not draft_place.shared:
                draft = load_weights(draft_place, draft_config, spec, devices[1], draft_dtype)
        if not place.is_local:
            tell(f"loading {place.source.name}")
        if group is None:
            target = load_weights(place, config, spec, devices[0], format_.dtype)
        else:
            target = sharded.load(place, config, spec, group, devices[0], format_.dtype)
        target.int8_activations = format_.int8_activations
        if draft_place is not None and draft_place.shared:
            draft = load_shared(draft_place, target, devices[1], draft_dtype, trust)
    passing = place.notes + ([] if draft_place is None else draft_place.notes)
    notes = [*passing, *notes]
    known = compat.token_range(tokenizer)
    notes += [note for model in (target, draft) if model is not None for note in model.notes]
    notes += compat.ignored_options(target.model.generation_config)
    eos_ids = compat.eos_ids(target.model, tokenizer)
    vocab_size = min(known, target.vocab_rows) if known else target.vocab_rows
    draft_ids, more = vocabulary.choose(
        None if draft is None else draft.model,
        spec.draft_vocab,
        most=vocab_size,
        eos_ids=eos_ids,
    )
    notes += more if want_draft else []
    there = [f"{one.name} ({one.dtype}, {one.device})" for one in (target, draft) if one is not None]
    LOG.info("loaded %s in %.1f s", " + ".join(there).replace("torch.", ""), time.monotonic() - begin)
    return Pair(
        target=target,
        draft=draft,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        vocab_size=vocab_size,
        draft_ids=draft_ids,
        notes=notes,
        passing=passing,
        formats={role: one for role, one in formats.items() if one is not None},
    )


def _coarse(place: Place, config: Any) -> bool:
    """Whether the weights are stored in bfloat16, or in the few bits of a GGUF file."""
    return place.source.kind in ("gguf", "wheel") or getattr(config, "dtype", None) == torch.bfloat16


def _prepare_draft(place: Place, trust: bool) -> Any:
    """The draft's config; marks `place` as shared, and fetches its layers, where the config says so."""
    if place.shared and not (place.folder / "config.json").is_file():
        return None
    config = load_config(place, trust)
    if is_shared(config) and not place.shared:
        if place.is_local:
            raise UserError(
                f"draft {place.folder} shares its target's embeddings but has no {SHARED_WEIGHTS}"
            )
        from dsbd_cli.loading.hub import snapshot

        place.path = snapshot(place.path, **place.options)
        place.shared = True
        if not (place.folder / SHARED_WEIGHTS).is_file():
            raise UserError(f"draft {place.source.text} has no {SHARED_WEIGHTS} on the hub")
    return config
