"""A pair by what its first load found out: no transformers, no self-test, weights mapped from where they lie.

What is kept is small: configs, numbers, the tokenizer, the self-test's verdicts. It holds for the very files,
versions, processor and code that it was found with (`key.py`), and only for a pair whose ready form was compared
with the loaded one, bit for bit. Everything else loads as ever.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsbd_cli.errors import let_by
from dsbd_cli.loading.cache import cache_root
from dsbd_cli.loading.ready import file, key, quick_torch
from dsbd_cli.loading.ready.packed import Place
from dsbd_cli.loading.source import SHARED_WEIGHTS, Source, parse_source
from dsbd_cli.loading.spec import PairSpec
from dsbd_cli.prices import formats

if TYPE_CHECKING:
    from dsbd_cli.loading.pair import Pair

_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Their factors follow the length of the text.
_MOVING = {"dynamic", "longrope"}


def load(spec: PairSpec, *, need_draft: bool = True, cache_dir: str | Path | None = None) -> Pair | None:
    """The pair, if it was remembered and nothing has changed since; None otherwise.

    Raises:
        UserError: a source that is not there.
    """
    cache = cache_root(cache_dir)
    want_draft = need_draft and spec.draft is not None
    sources = _sources(spec, want_draft)
    if not _served(spec, sources):
        return None
    path = key.path_of(spec, sources, cache)
    if not path.is_file():
        return None
    on = key.key_of(spec, want_draft, sources, cache)
    found = None if on is None else file.read(path, on)
    if found is None:
        return None
    try:
        quick_torch.import_torch()
        return _assemble(spec, want_draft, sources, cache, *found)
    except Exception as error:  # whatever is wrong with the files, a full load says it
        let_by(error)
        return None


def remember(
    spec: PairSpec, pair: Pair, verdicts: dict[str, Any], *, cache_dir: str | Path | None = None
) -> bool:
    """Keep what `load` needs of a pair that was loaded in full, if its ready form is bit for bit the same.

    Args:
        verdicts: plain values by role, handed back as `Pair.verdicts`.

    Returns:
        Whether it was kept.
    """
    from dsbd_cli.loading.ready import llama, tokenizer

    cache = cache_root(cache_dir)
    want_draft = pair.draft is not None
    sources = _sources(spec, want_draft)
    models = {"target": pair.target} | ({"draft": pair.draft} if pair.draft is not None else {})
    if not _served(spec, sources) or not all(_plain(loaded) for loaded in models.values()):
        return False
    stored = tokenizer.stored_form(pair.tokenizer)
    on = key.key_of(spec, want_draft, sources, cache)
    if stored is None or on is None:
        return False
    facts, data = stored
    record = {
        "tokenizer": facts,
        "eos_ids": list(pair.eos_ids),
        "vocab_size": pair.vocab_size,
        "draft_ids": None if pair.draft_ids is None else pair.draft_ids.tolist(),
        "notes": [note for note in pair.notes if note not in pair.passing],
        "verdicts": verdicts,
        "formats": pair.formats,
        "models": {
            role: {
                "config": plain_config(loaded.model.config),
                "numbers": llama.numbers_of(loaded.model),
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "int8_activations": loaded.int8_activations,
                "max_positions": loaded.max_positions,
                "vocab_rows": loaded.vocab_rows,
                "window": loaded.window,
            }
            for role, loaded in models.items()
        },
    }
    try:
        again = _assemble(spec, want_draft, sources, cache, json.loads(json.dumps(record)), data)
    except Exception as error:  # a checkpoint of other names, a config of another kind: it is loaded in full
        let_by(error)
        return False
    if again is None or not tokenizer.faithful(again.tokenizer, pair.tokenizer):
        return False
    twins = [(again.target, pair.target), (again.draft, pair.draft)]
    if not all(
        llama.same(one.model, other.model) for one, other in twins if one is not None and other is not None
    ):
        return False
    return file.write(key.path_of(spec, sources, cache), on, record, data)


def places(spec: PairSpec, pair: Pair, *, cache_dir: str | Path | None = None) -> dict[str, Place]:
    """Where packed weights of a remembered pair are kept, by role."""
    sources, cache = _sources(spec, pair.draft is not None), cache_root(cache_dir)
    dtypes = [str(one.dtype).removeprefix("torch.") for one in (pair.target, pair.draft) if one is not None]
    return dict(zip(("target", "draft"), key.packed_places(sources, cache, dtypes), strict=False))


def _sources(spec: PairSpec, want_draft: bool) -> list[Source]:
    found = [parse_source(spec.target, "target")]
    return found + ([parse_source(str(spec.draft), "draft")] if want_draft else [])


def _served(spec: PairSpec, sources: list[Source]) -> bool:
    """Local files, in one process, as they are."""
    special = spec.trust_remote_code or spec.quantization or spec.device_map or spec.tensor_parallel > 1
    return not special and all(source.kind != "hub" for source in sources)


def _plain(loaded: Any) -> bool:
    """Whether a loaded model is one that `llama.ReadyLlama` can hold: transformers' own, on a CPU."""
    kind = type(loaded.model)
    home = kind.__module__.startswith("transformers.models.")
    if kind.__name__ not in _FAMILIES or not home or loaded.device.type != "cpu" or loaded.tree_refusal:
        return False
    config = loaded.model.config
    # What fused forwards do not read would be lost: a window over the last tokens is one of those.
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return False
    return str(loaded.model.model.rotary_emb.rope_type) not in _MOVING


def plain_config(config: Any) -> dict[str, Any]:
    """A config's values as JSON has them; what JSON has not is left out."""
    values = {}
    for name, value in config.to_dict().items():
        try:
            json.dumps(value)
        except TypeError:
            continue
        values[name] = value
    return values | {"name_or_path": str(config.name_or_path or ""), "is_encoder_decoder": False}


def _assemble(
    spec: PairSpec, want_draft: bool, sources: list[Source], cache: Path, record: dict[str, Any], tokenizer: bytes
) -> Pair | None:  # fmt: skip
    """The pair from its record; None on a machine where it would be loaded to something else than a CPU."""
    import torch

    from dsbd_cli.loading import hardware
    from dsbd_cli.loading.pair import Pair
    from dsbd_cli.loading.ready.tokenizer import ReadyTokenizer

    if record["formats"] and not formats.still(record["formats"], torch.get_num_threads()):
        return None  # a verdict was dropped, or is another one for so many threads
    asked = [spec.target_device, spec.draft_device][: len(sources)]
    if any(hardware.pick_device(name, "target").type != "cpu" for name in asked):
        return None
    folders = [key.folder_of(source, cache) for source in sources]
    packed = key.packed_places(
        sources, cache, [facts["dtype"] for _, facts in sorted(record["models"].items(), reverse=True)]
    )

    @functools.cache
    def whole() -> Pair:
        from dsbd_cli.loading.pair import load as load_whole

        return load_whole(spec, need_draft=want_draft, cache_dir=cache)

    def real_tokenizer() -> Any:
        from dsbd_cli.loading.model import load_tokenizer
        from dsbd_cli.loading.place import Place
        from dsbd_cli.loading.quiet import quiet_transformers

        with quiet_transformers():
            place = Place(sources[0], "target", str(folders[0]), {"local_files_only": True})
            return load_tokenizer(place, False)

    target_facts = record["models"]["target"]
    dtype = getattr(torch, target_facts["dtype"])
    target = _model(
        sources[0],
        target_facts,
        _weights(folders[0], "target", dtype),
        lambda: whole().target.model,
        packed[0],
    )
    draft = None
    if want_draft:
        facts = record["models"]["draft"]
        draft_dtype = getattr(torch, facts["dtype"])
        shared = folders[1] / SHARED_WEIGHTS
        if shared.is_file():
            weights = _borrowing(shared, target, draft_dtype)
        else:
            weights = _weights(folders[1], "draft", draft_dtype)
        if weights is None:
            return None
        draft = _model(sources[1], facts, weights, lambda: whole().draft.model, packed[1])  # type: ignore[union-attr]
    return Pair(
        target=target,
        draft=draft,
        tokenizer=ReadyTokenizer(record["tokenizer"], tokenizer, functools.cache(real_tokenizer)),
        eos_ids=tuple(record["eos_ids"]),
        vocab_size=record["vocab_size"],
        draft_ids=None if record["draft_ids"] is None else np.array(record["draft_ids"], np.int64),
        notes=list(record["notes"]),
        verdicts=record["verdicts"],
        formats=record["formats"],
    )


def _model(
    source: Source, facts: dict[str, Any], weights: dict[str, Any], real: Callable[[], Any], packed: Place
) -> Any:
    from dsbd_cli.loading.model import LoadedModel
    from dsbd_cli.loading.ready.llama import ReadyLlama

    model = ReadyLlama(facts["config"], facts["numbers"], weights, real, packed)
    return LoadedModel(
        model=model, name=source.name, device=model.device, dtype=model.dtype,
        max_positions=facts["max_positions"], vocab_rows=facts["vocab_rows"], tree_refusal=None,
        window=facts["window"], source=source, int8_activations=facts["int8_activations"],
    )  # fmt: skip


def _weights(folder: Path, role: str, dtype: Any) -> dict[str, Any]:
    """All tensors of a checkpoint, by name, mapped from its files where they are in `dtype` there."""
    from safetensors import safe_open

    from dsbd_cli.loading.checkpoint import weight_files

    found = {}
    for path in weight_files(folder, role):
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is no safetensors file")
        with safe_open(str(path), framework="pt", device="cpu") as stored:
            for name in stored.keys():  # noqa: SIM118 (it is no mapping)
                found[name] = stored.get_tensor(name).to(dtype)
    return found


def _borrowing(path: Path, target: Any, dtype: Any) -> dict[str, Any] | None:
    """A draft's own layers, and its target's embedding and head; None where they would have to be copied."""
    from dsbd_cli.loading.shared import dequantised

    if target.dtype != dtype:
        return None
    own = {name: weight.to(dtype) for name, weight in dequantised(path).items()}
    ends = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")
    tied = target.model.lm_head.weight is target.model.model.embed_tokens.weight
    state = dict(target.model.named_parameters())
    own |= {name: state[name] for name in ends if name in state and not (tied and name == ends[1])}
    return own
