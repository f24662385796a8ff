"""For Hugging Face users: `model.generate(ids, custom_generate=dsbd_cli.generate, draft_model=draft, width=4)`.

transformers hands a custom decoding function its prepared inputs and `generation_config`, and those
extra keyword arguments that the function names itself. So what `generate` already has a name for
(temperature, top_k, top_p, do_sample, max_new_tokens, length_penalty, early_stopping,
num_return_sequences, num_beams) is read from there, and the rest are parameters here, under the names
of `Settings`. Checked with transformers 5.17 and 5.24.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import Finished, Notice, Text
from dsbd_cli.errors import UserError
from dsbd_cli.hf.call import running_call
from dsbd_cli.hf.inputs import check_model, check_padding, prompts
from dsbd_cli.hf.kept import Ids, decoder_for, evaluated, forget, kept, tell
from dsbd_cli.hf.options import Options, read_options
from dsbd_cli.result import Result
from dsbd_cli.settings import DEFAULTS, DRAFTING, Settings

__all__ = ["forget", "generate"]


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Iterable[Any] = (),
    stopping_criteria: Iterable[Any] = (),
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    draft_model: Any = None,
    method: str = "dsbd",
    width: int | None = None,
    draft_width: int = DEFAULTS["draft_width"],
    gamma: int = DEFAULTS["gamma"],
    verify: str = DEFAULTS["verify"],
    draws: str = DEFAULTS["draws"],
    threshold: float | None = DEFAULTS["threshold"],
    width_rule: str = DEFAULTS["width_rule"],
    min_width: int | None = None,
    tree: tuple[int, ...] | None = None,
    tree_rule: str = DEFAULTS["tree_rule"],
    kv: str = "all",
    seed: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode a batch of prompts; not called directly but given to `model.generate` as `custom_generate`.

    Args:
        model: the target, a decoder-only model.
        input_ids: int64 [B x rows, L], left-padded where `attention_mask` says so; transformers makes
            `num_return_sequences` or `num_beams` rows of each prompt.
        streamer: gets each token once no live beam disagrees about it, and always its `end()`; one prompt.
        draft_model: the draft; shares the target's token ids. beam and multinomial need none.
        width: W; without it `num_beams` where that is more than 1, else 4.
        method, draft_width, gamma, verify, draws, threshold, width_rule, min_width, tree, tree_rule, kv, seed: see
            `Settings`. `seed` None takes one from torch's generator, so that `torch.manual_seed` repeats a run.

    With `do_sample=False`, transformers' default, beam and dsbd are its deterministic beam search of
    `width` beams, token for token, and the other methods are greedy. Models are run as in eval mode, and
    their flags are then as before. Calls on one model wait for each other.

    Returns:
        int64 [B x num_return_sequences, L + longest answer], padded on the right; or, with
        `return_dict_in_generate`, a `GenerateBeamDecoderOnlyOutput` with `sequences_scores`.

    Raises:
        UserError: an option or input that cannot be honoured, by name.
    """
    call = running_call()
    streamer = call.streamer if streamer is None else streamer
    try:
        if generation_config is None:
            raise UserError("give this function to model.generate(..., custom_generate=dsbd_cli.generate)")
        if synced_gpus:
            raise UserError("dsbd_cli.generate does not run under sharded parameters (synced_gpus)")
        check_model(model)
        options = read_options(
            generation_config, logits_processor, stopping_criteria, input_ids.shape[1], call,
            model.generation_config, width,
            method=method, draft_width=draft_width, gamma=gamma, verify=verify, draws=draws,
            threshold=threshold, width_rule=width_rule, min_width=min_width, tree=tree,
            tree_rule=tree_rule, kv=kv,
        )  # fmt: skip
        texts = prompts(model, input_ids, model_kwargs, options.repeats)
        draft = draft_model if method in DRAFTING else None
        if method in DRAFTING and draft is None:
            raise UserError(f"{method} needs draft_model=..., or give method='beam'")
        if draft is not None:
            if not isinstance(draft, torch.nn.Module):
                raise UserError(f"draft_model must be a loaded model, not a {type(draft).__name__}")
            check_model(draft)
        if streamer is not None and (len(texts) > 1 or options.copies > 1):
            raise UserError("a streamer takes one prompt and one sequence")
        with kept(model).lock, evaluated(model, draft):
            decoder = decoder_for(model, draft, options.eos_ids, options.settings)
            _check_context(decoder, texts, options)
            check_padding(
                model, input_ids, model_kwargs.get("attention_mask"), options.settings.max_new_tokens
            )
            results = []
            for row, ids in enumerate(texts):
                run = _events(decoder, ids, _seeded(options.settings, seed, row))
                results.append(_followed(run, streamer))
    finally:
        if streamer is not None:
            streamer.end()
    return _output(input_ids[:: options.repeats], generation_config, results, options)


def _check_context(decoder: Decoder, texts: list[list[int]], options: Options) -> None:
    """A run that the context would cut short is refused: transformers' own would go on."""
    asked = options.settings.max_new_tokens
    for ids in texts:
        limit = decoder.target.limit_for(len(ids))
        if limit is not None and len(ids) + asked > limit:
            raise UserError(
                f"a prompt of {len(ids)} tokens and {asked} new ones go beyond the target's {limit}: "
                f"give max_new_tokens={max(0, limit - len(ids))} or less"
            )


def _events(decoder: Decoder, ids: list[int], settings: Settings) -> Iterator[Any]:
    return iter(decoder.stream(ids, settings, energy=False))


def _followed(events: Iterator[Any], streamer: Any) -> Result:
    """The result of a run; its confirmed tokens go to `streamer` one at a time, as transformers' own do."""
    sent = 0

    def put(ids: list[int]) -> None:
        for token in ids:
            streamer.put(torch.tensor([token]))

    for event in events:
        if isinstance(event, Notice):
            tell([event.text])
        elif isinstance(event, Text) and streamer is not None:
            new = Ids.ids_of(event.new)
            put(new)
            sent += len(new)
        elif isinstance(event, Finished):
            result = event.result
    tell(result.stats.notes)
    if streamer is not None:
        put(result.token_ids[sent:])
    return result


def _seeded(settings: Settings, seed: int | None, row: int) -> Settings:
    from dsbd_cli.batch.items import item_seed

    if seed is None:
        return dataclasses.replace(settings, seed=int(torch.randint(2**53, ()).item()))
    return dataclasses.replace(settings, seed=seed if row == 0 else item_seed(seed, row))


def _output(input_ids: Tensor, config: Any, results: list[Result], options: Options) -> Any:
    """Answers behind their prompts, in transformers' shape.

    Args:
        input_ids: int64 [B, L], one row a prompt.
    """
    copies = options.copies
    pad = _filler(config, options)
    answers: list[list[int]] = []
    scores: list[float] = []
    for result in results:
        # There may be fewer distinct sequences than asked for; a tensor has no gaps, so the best stands in.
        beams = result.beams + result.beams[:1] * (copies - len(result.beams))
        answers += [beam.token_ids for beam in beams]
        scores += [beam.score for beam in beams]
    longest = max(map(len, answers))
    tail = torch.full((len(answers), longest), pad, dtype=input_ids.dtype, device=input_ids.device)
    for row, ids in enumerate(answers):
        tail[row, : len(ids)] = torch.tensor(ids, dtype=input_ids.dtype)
    sequences = torch.cat([input_ids.repeat_interleave(copies, 0), tail], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

    output: Any = GenerateBeamDecoderOnlyOutput
    return output(sequences=sequences, sequences_scores=torch.tensor(scores))


def _filler(config: Any, options: Options) -> int:
    """What stands behind an answer that ended: `pad_token_id`, or the first EOS id as the config has them.

    transformers' beam search takes that EOS for a `pad_token_id` of 0 too; one beam is its greedy search, which
    does not.
    """
    given = config.eos_token_id
    ends = [] if given is None else [int(given)] if isinstance(given, int) else [int(one) for one in given]
    pad = config.pad_token_id
    searched = options.settings.deterministic and options.settings.width > 1
    if ends and (pad is None or (pad == 0 and searched)):
        return ends[0]
    return 0 if pad is None else int(pad)
