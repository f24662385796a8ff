"""For Hugging Face users: `model.generate(ids, custom_generate=dsbd_cli.generate, draft_model=draft, width=4)`.

transformers hands a custom decoding function its prepared inputs and `generation_config`, and those
extra keyword arguments that the function names itself. So what `generate` already has a name for
(temperature, top_k, top_p, do_sample, max_new_tokens, length_penalty, early_stopping,
num_return_sequences) is read from the config, and the rest are parameters here, under the names
of `Settings`. Checked with transformers 5.17 and 5.24.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import UserError
from dsbd_cli.loading import LoadedModel, Pair
from dsbd_cli.result import Result
from dsbd_cli.settings import DEFAULTS, DRAFTING, ONE_BEAM_METHODS, Settings

# What transformers puts into its lists for settings that are honoured here; anything else changes the law.
_KNOWN_PROCESSORS = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"}
_KNOWN_CRITERIA = {"MaxLengthCriteria", "EosTokenCriteria"}
_EARLY_STOPPING = {None: "heuristic", False: "heuristic", True: "first", "never": "never"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Iterable[Any] = (),
    stopping_criteria: Iterable[Any] = (),
    generation_config: Any = None,
    synced_gpus: bool = False,
    draft_model: Any = None,
    method: str = "dsbd",
    width: int = 4,
    draft_width: int = DEFAULTS["draft_width"],
    gamma: int = DEFAULTS["gamma"],
    verify: str = DEFAULTS["verify"],
    threshold: float | None = DEFAULTS["threshold"],
    min_width: int | None = None,
    tree: tuple[int, ...] | None = None,
    kv: str = "all",
    seed: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode a batch of prompts; not called directly but given to `model.generate` as `custom_generate`.

    Args:
        model: the target, a decoder-only model.
        input_ids: int64 [B x num_return_sequences, L], left-padded where `attention_mask` says so.
        draft_model: the draft; shares the target's token ids. beam and multinomial need none.
        method, width, draft_width, gamma, verify, threshold, min_width, tree, kv, seed: see `Settings`.
            `seed` None takes one from torch's generator, so that `torch.manual_seed` repeats a run.

    With `do_sample=False`, transformers' default, beam and dsbd are its deterministic beam search of
    `width` beams, token for token, and the other methods are greedy.

    Returns:
        int64 [B x num_return_sequences, L + longest answer], padded on the right; or, with
        `return_dict_in_generate`, a `GenerateBeamDecoderOnlyOutput` with `sequences_scores`.

    Raises:
        UserError: an option of `generate` that cannot be honoured, by name.
    """
    config = generation_config
    if config is None:
        raise UserError("give this function to model.generate(..., custom_generate=dsbd_cli.generate)")
    _refuse(model, input_ids, logits_processor, stopping_criteria, config, synced_gpus)
    budget = config.max_length - input_ids.shape[1]
    copies = config.num_return_sequences or 1
    settings = _settings(
        config, budget, copies, method=method, width=width, draft_width=draft_width, gamma=gamma, verify=verify,
        threshold=threshold, min_width=min(2, width) if min_width is None else min_width, tree=tree, kv=kv,
    )  # fmt: skip
    if method in DRAFTING and draft_model is None:
        raise UserError(f"{method} needs draft_model=..., or give method='beam'")
    decoder = _decoder(model, draft_model if method in DRAFTING else None, _eos(config))
    mask = model_kwargs.get("attention_mask")
    results = []
    for row in range(0, input_ids.shape[0], copies):
        ids = input_ids[row] if mask is None else input_ids[row][mask[row].bool()]
        results.append(decoder.generate(ids.tolist(), _seeded(settings, seed, row // copies)))
    return _output(model, input_ids, config, results, copies)


def _seeded(settings: Settings, seed: int | None, row: int) -> Settings:
    import dataclasses

    from dsbd_cli.batch.items import item_seed

    if seed is None:
        return dataclasses.replace(settings, seed=int(torch.randint(2**53, ()).item()))
    return dataclasses.replace(settings, seed=seed if row == 0 else item_seed(seed, row))


def _settings(config: Any, budget: int, copies: int, **given: Any) -> Settings:
    """`generation_config` and this function's own parameters as `Settings`."""

    def read(name: str, default: Any) -> Any:
        value = getattr(config, name, None)
        return default if value is None else value

    early = getattr(config, "early_stopping", None)
    given |= {
        "max_new_tokens": budget,
        "num_return": copies,
        "length_penalty": float(read("length_penalty", 1.0)),
        "early_stopping": _EARLY_STOPPING[early],
    }
    if read("do_sample", False):
        warp = {
            "temperature": float(read("temperature", 1.0)),
            "top_k": int(read("top_k", 0)),
            "top_p": float(read("top_p", 1.0)),
        }
        return Settings(**given | warp)
    if given["method"] in ONE_BEAM_METHODS:
        return Settings(**given | {"temperature": 0.0})
    # Nothing acts through T in beam search; the defaults of those settings are what it takes.
    plain = {name: value for name, value in given.items() if name not in ("threshold", "kv")}
    return Settings(**plain, deterministic=True)


def _refuse(
    model: Any,
    input_ids: Tensor,
    processors: Iterable[Any],
    criteria: Iterable[Any],
    config: Any,
    synced_gpus: bool,
) -> None:
    if model.config.is_encoder_decoder:
        raise UserError(f"{type(model).__name__} is no decoder-only model")
    if input_ids.shape[1] == 0:
        raise UserError("dsbd_cli.generate needs input_ids (inputs_embeds are not offered)")
    if synced_gpus:
        raise UserError("dsbd_cli.generate does not run under sharded parameters (synced_gpus)")
    if (config.num_beams or 1) > 1:
        raise UserError(
            "num_beams is called width here: generate(..., custom_generate=dsbd_cli.generate, width=4)"
        )
    names = [type(entry).__name__ for entry in processors]
    if other := [name for name in names if name not in _KNOWN_PROCESSORS]:
        raise UserError(f"{other[0]} is not offered: it would change the target's law between beams")
    if other := [
        name for name in (type(entry).__name__ for entry in criteria) if name not in _KNOWN_CRITERIA
    ]:
        raise UserError(f"{other[0]} is not offered: sequences end at EOS or at max_new_tokens")
    if asked := [name for name in _OUTPUTS if getattr(config, name, None)]:
        raise UserError(f"{asked[0]} is not offered")


def _eos(config: Any) -> tuple[int, ...]:
    value = config.eos_token_id
    if value is None:
        return ()
    return tuple(sorted({int(value)} if isinstance(value, int) else {int(entry) for entry in value}))


class _Silent:
    """Stands for the tokenizer: `generate` deals in ids, so nothing is ever shown as text."""

    bos_token_id = None
    chat_template = None

    def decode(self, ids: Any, **_: Any) -> str:
        return ""


def _decoder(model: Any, draft: Any, eos_ids: tuple[int, ...]) -> Decoder:
    """A decoder for these two, kept on the target for the next call, and made anew once weights moved.

    (A change in place through `.data` cannot be seen: `forget` the model then.)
    """
    state = (_state(model), None if draft is None else _state(draft), eos_ids)
    kept = model.__dict__.get("_dsbd_decoder")
    if kept is not None and kept[0] == state:
        return kept[1]  # type: ignore[no-any-return]
    target = _loaded(model, "target")
    small = None if draft is None else _loaded(draft, "draft")
    # Ids beyond the smaller head are padding: without a tokenizer nothing else says how many there are.
    rows = min(one.vocab_rows for one in (target, small) if one is not None)
    decoder = Decoder(Pair(target, small, _Silent(), eos_ids, rows))
    model.__dict__["_dsbd_decoder"] = (state, decoder)
    return decoder


def forget(model: Any) -> None:
    """Let go of what was prepared for `model`: its caches, and copies of its weights in a faster layout."""
    model.__dict__.pop("_dsbd_decoder", None)


def _loaded(model: Any, role: str) -> LoadedModel:
    from dsbd_cli.loading.model import describe
    from dsbd_cli.loading.source import Source

    return describe(model, Source(str(model.config.name_or_path or role), "hub"))


def _state(model: Any) -> tuple[Any, ...]:
    """Changes whenever weights are replaced or written to."""
    weights = tuple((weight.data_ptr(), weight._version) for weight in model.parameters())
    return (id(model), model.training, weights)


def _output(model: Any, input_ids: Tensor, config: Any, results: list[Result], copies: int) -> Any:
    """Answers behind their prompts, in transformers' shape."""
    eos = _eos(config)
    pad = config.pad_token_id if config.pad_token_id is not None else (eos[0] if eos else 0)
    answers: list[list[int]] = []
    scores: list[float] = []
    for result in results:
        # There may be fewer distinct sequences than asked for; a tensor has no gaps, so the best stands in.
        beams = result.beams + result.beams[:1] * (copies - len(result.beams))
        answers += [beam.token_ids for beam in beams]
        scores += [beam.score for beam in beams]
    longest = max(map(len, answers))
    tail = torch.full((len(answers), longest), int(pad), dtype=input_ids.dtype, device=input_ids.device)
    for row, ids in enumerate(answers):
        tail[row, : len(ids)] = torch.tensor(ids, dtype=input_ids.dtype)
    sequences = torch.cat([input_ids, tail], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

    output: Any = GenerateBeamDecoderOnlyOutput
    return output(sequences=sequences, sequences_scores=torch.tensor(scores))
