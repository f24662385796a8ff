"""`generation_config`, logits processors and stopping criteria as `Settings`: honoured, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from dsbd_cli.errors import UserError
from dsbd_cli.hf.call import Call
from dsbd_cli.settings import DEFAULTS, ONE_BEAM_METHODS, SAMPLING_ONLY, Settings, check_value

_EARLY_STOPPING = {None: "heuristic", False: "heuristic", True: "first", "never": "never"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_MODES = {"greedy_search", "sample", "beam_search", "beam_sample"}
# What switches off a processor that a checkpoint's generation_config brings.
_OFF = {
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty=1.0",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size=0",
    "MinLengthLogitsProcessor": "min_length=0, min_new_tokens=0",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens=0",
    "TypicalLogitsWarper": "typical_p=1.0",
    "EpsilonLogitsWarper": "epsilon_cutoff=0.0",
    "EtaLogitsWarper": "eta_cutoff=0.0",
}
DEFAULT_WIDTH = 4


class Options(NamedTuple):
    """What a `generate` call asks for.

    Attributes:
        settings: everything but the seed.
        eos_ids: ascending.
        copies: sequences to return for a prompt.
        repeats: rows that transformers made of each prompt.
    """

    settings: Settings
    eos_ids: tuple[int, ...]
    copies: int
    repeats: int


def read_options(
    config: Any,
    processors: Iterable[Any],
    criteria: Iterable[Any],
    prompt_length: int,
    call: Call,
    checkpoint: Any,
    width: int | None,
    **given: Any,
) -> Options:
    """Everything that decides the text.

    Args:
        prompt_length: of the padded prompts, in tokens.
        checkpoint: the model's own generation config: what it says yields to what the caller gives.
        width: W, or None for `num_beams` where that is set.
        given: the other `Settings` that the caller gave.

    Raises:
        UserError: what cannot be honoured, by name.
    """
    _refuse_modes(config, call)
    beams = int(config.num_beams or 1)
    width = _width(beams, width, given["method"], call, checkpoint)
    copies = int(config.num_return_sequences or 1)
    length, eos_ids = _ends(criteria, config)
    early = getattr(config, "early_stopping", None)
    if early not in _EARLY_STOPPING:
        raise UserError(f"early_stopping must be True, False or 'never', not {early!r}")
    penalty = getattr(config, "length_penalty", None)
    given |= {
        "width": width,
        "max_new_tokens": max(0, length - prompt_length),
        "num_return": copies,
        "length_penalty": 1.0 if penalty is None else float(penalty),
        "early_stopping": _EARLY_STOPPING[early],
    }
    if given["min_width"] is None:
        given["min_width"] = min(2, width)
    sample = bool(config.do_sample)
    one_beam = given["method"] in ONE_BEAM_METHODS
    processors = [entry for entry in processors if not _idle(entry, prompt_length)]
    warp = _warp(processors, beams, harmless=one_beam and not sample, sample=sample)
    if sample:
        settings = Settings(**given | warp)
    elif one_beam:
        settings = Settings(**given | {"temperature": 0.0})
    else:
        for name in SAMPLING_ONLY:
            if given.get(name, DEFAULTS[name]) != DEFAULTS[name]:
                raise UserError(f"{name} has no meaning beside do_sample=False: leave it out, or sample")
        settings = Settings(**given, deterministic=True)
    return Options(settings, eos_ids, copies, max(beams, copies))


def _refuse_modes(config: Any, call: Call) -> None:
    if call.assistant_model is not None:
        raise UserError("assistant_model is called draft_model here: generate(..., draft_model=draft)")
    mode = config.get_generation_mode(None)
    name = str(getattr(mode, "value", mode))
    if name not in _MODES:
        raise UserError(f"{name} is not offered: dsbd_cli.generate samples, or searches with beams")
    if asked := [entry for entry in _OUTPUTS if getattr(config, entry, None)]:
        raise UserError(f"{asked[0]} is not offered")
    if getattr(config, "use_mtp", None):
        raise UserError("use_mtp is not offered: the draft is draft_model")
    if getattr(config, "cache_implementation", None) == "quantized":
        raise UserError(
            "cache_implementation='quantized' is not offered: keys and values keep the model's dtype"
        )


def _width(beams: int, width: int | None, method: str, call: Call, checkpoint: Any) -> int:
    """W: the caller's `width`, else `num_beams`, else the default."""
    if width is None and beams == 1 and "num_beams" in call.given and method not in ONE_BEAM_METHODS:
        return 1
    from_caller = "num_beams" in call.given or beams != int(getattr(checkpoint, "num_beams", None) or 1)
    if beams > 1 and from_caller:
        if method in ONE_BEAM_METHODS:
            raise UserError(f"num_beams={beams} has no meaning for {method}, which keeps one: leave it out")
        if width not in (None, beams):
            raise UserError(f"num_beams={beams} and width={width} say different things: give one of them")
    if width is not None:
        check_value("width", width)
        return width
    return beams if beams > 1 else DEFAULT_WIDTH


def _ends(criteria: Iterable[Any], config: Any) -> tuple[int, tuple[int, ...]]:
    """The most tokens of a sequence, prompt included, and the ids that end one."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    length, eos = int(config.max_length), set(eos_of(config))
    for entry in criteria:
        if type(entry) is MaxLengthCriteria:
            length = min(length, int(entry.max_length))
        elif type(entry) is EosTokenCriteria:
            eos |= {int(one) for one in entry.eos_token_id.flatten().tolist()}
        else:
            raise UserError(
                f"{type(entry).__name__} is not offered: sequences end at EOS or at max_new_tokens"
            )
    return length, tuple(sorted(eos))


def eos_of(config: Any) -> tuple[int, ...]:
    """The config's end-of-text ids, ascending."""
    value = config.eos_token_id
    if value is None:
        return ()
    return tuple(sorted({int(value)} if isinstance(value, int) else {int(entry) for entry in value}))


def _idle(entry: Any, prompt_length: int) -> bool:
    """Whether a processor never changes what is decoded here: lengths that the prompt has, logits that end a run."""
    from transformers.generation import logits_process as hf

    if type(entry) is hf.MinLengthLogitsProcessor:
        return int(entry.min_length) <= prompt_length
    return type(entry) is hf.InfNanRemoveLogitsProcessor


def _warp(processors: Iterable[Any], beams: int, *, harmless: bool, sample: bool) -> dict[str, Any]:
    """Temperature, top-k and top-p, as the processors that transformers prepared say.

    Args:
        harmless: greedy, one beam: none of the three moves an argmax.
    """
    from transformers.generation import logits_process as hf

    order = (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper)
    warp: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    last = -1
    for entry in processors:
        name = type(entry).__name__
        if type(entry) is hf.LogitNormalization and (last < 0 or beams == 1):
            continue  # of what is normalised already, or is about to be
        if type(entry) not in order:
            way_out = f"; {_OFF[name]} leaves it out" if name in _OFF else ""
            raise UserError(f"{name} is not offered: it would change the target's law between beams{way_out}")
        place = order.index(type(entry))
        if not sample and not harmless:
            raise UserError(
                f"{name} beside do_sample=False is not offered: it would change the beams' scores"
            )
        if place <= last:
            raise UserError("temperature, top-k and top-p are applied once each, in this order")
        last = place
        if place and getattr(entry, "filter_value", -float("inf")) != -float("inf"):
            raise UserError(f"a filter_value of {name} other than -inf is not offered")
        if place == 2 and beams == 1 and getattr(entry, "min_tokens_to_keep", 1) > 1:
            raise UserError(f"min_tokens_to_keep of {name} is not offered")
        field = ("temperature", "top_k", "top_p")[place]
        warp[field] = int(entry.top_k) if field == "top_k" else float(getattr(entry, field))
    return warp
