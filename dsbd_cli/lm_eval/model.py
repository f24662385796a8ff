"""The harness's view of a pair: answers by our methods, likelihoods by the target alone."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from dsbd_cli.bench.measure import seed_of
from dsbd_cli.cli.options import PARAMETERS, chosen_from
from dsbd_cli.errors import UserError
from dsbd_cli.names import near
from dsbd_cli.settings import Settings

LOG = logging.getLogger("dsbd")
DEFAULT_SEED, DEFAULT_DEVICE = 1, "cuda:0"
# Options of `dsbd generate` without a meaning here: the harness says where answers end, and takes one each.
NOT_HERE = {"stop", "num_return", "system", "raw"}
OPTIONS = tuple(parameter.name for parameter in PARAMETERS if parameter.name not in NOT_HERE)
# Arguments of the harness's own Hugging Face model that mean the same for ours.
HARNESS = (
    "max_length", "max_batch_size", "add_bos_token", "prefix_token_id", "softmax_dtype", "logits_cache",
    "truncation", "enable_thinking", "think_end_token", "chat_template_args",
)  # fmt: skip
# What of a task's generation settings is obeyed; the others are told once.
ENDS = ("until", "max_gen_toks")


class DsbdLM(HFLM):  # type: ignore[misc, unused-ignore]
    """`--model dsbd`.

    Everything but generation is the harness's own Hugging Face model on the loaded target: the same tokens, chat
    templates and batched likelihoods as `--model hf`.

    Args:
        batch_size: of likelihood requests; answers are decoded one after the other.
        arguments: options of `dsbd generate` with underscores (`preset`, `target`, `draft`, `method`, `width`, ...;
            a tree is written 2x2x1), and those of `HARNESS`.

    Raises:
        UserError: an argument that is not known, settings or models that cannot work.
    """

    def __init__(self, batch_size: int | str = 1, **arguments: Any) -> None:
        mine, theirs = _sorted(arguments)
        # What the harness says where nothing was said; its own models too then take the CPU.
        if mine.get("device") == DEFAULT_DEVICE and not torch.cuda.is_available():
            del mine["device"]
        self.decoder = chosen_from(mine).load(quiet=True)
        self.settings: Settings = self.decoder.settings
        self.decoder.target.require_tree()
        for note in self.decoder.notes:
            LOG.warning(note)
        target = self.decoder.pair.target
        theirs.setdefault("max_length", target.max_positions)
        with _quiet():
            super().__init__(
                pretrained=target.model,
                tokenizer=self.decoder.pair.tokenizer,
                batch_size=batch_size,
                **theirs,
            )
        if isinstance(self.think_end_token, int):
            raise UserError("think_end_token must be the token's text, not its number")
        self._told: set[str] = set()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each request, by the method and the sampling settings of `--model_args`.

        An answer's seed comes from the run's seed, its prompt and, where a prompt is asked more than once, the number
        of the repeat: it does not depend on the order.

        Raises:
            UserError: a budget that leaves no room for a prompt.
        """
        times: Counter[str] = Counter()
        answers = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running generate_until requests"):
            context, task = request.args
            seed = seed_of(
                DEFAULT_SEED if self.settings.seed is None else self.settings.seed, context, times[context]
            )
            times[context] += 1
            answers.append(self._answer(context, task, seed))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _answer(self, context: str, task: Mapping[str, Any], seed: int) -> str:
        wanted = normalize_gen_kwargs(dict(task), self.settings.max_new_tokens)
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stops = [text for text in handle_stop_sequences(wanted["until"], eos=eos) if text]
        budget = wanted["max_gen_toks"]
        room = self.max_length - budget
        if room < 1:
            raise UserError(
                f"max_gen_toks {budget} leaves no room for a prompt: the target's limit is {self.max_length}"
            )
        self._tell(task)
        # The prompt as `--model hf` sees it, cut on the left where it is too long.
        ids = self.tok_batch_encode([context], left_truncate_len=room, truncation=self.truncation)[0][
            0
        ].tolist()
        settings = dataclasses.replace(self.settings, seed=seed, max_new_tokens=budget, stop=tuple(stops))
        result = self.decoder.generate(ids, settings, energy=False)
        return str(postprocess_generated_text(self.tok_decode(result.token_ids), stops, self.think_end_token))

    def _tell(self, task: Mapping[str, Any]) -> None:
        """Say once what a task asks for that `--model_args` decide here."""
        greedy = not task.get("do_sample") and not task.get("temperature")
        sampled = self.settings.temperature > 0 and not self.settings.deterministic
        if greedy and sampled:
            self._once(
                f"the task asks for greedy decoding; {self.settings.method} samples at temperature "
                f"{self.settings.temperature:g}, as the preset or --model_args say (temperature=0 is greedy)"
            )
        names = ("do_sample", "temperature", "max_new_tokens", "max_tokens", "max_completion_tokens", *ENDS)
        if others := sorted(set(task) - set(names)):
            self._once(f"the task's {', '.join(others)} are not used: --model_args decide how is decoded")

    def _once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            LOG.warning(text)

    def get_model_info(self) -> dict[str, Any]:
        """What was run, for the harness's result file."""
        return {"dsbd": {"models": self.decoder.models(), "settings": self.settings.to_dict()}}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness warns of a model that it did not load itself, which is how this one works."""
    log = logging.getLogger("lm_eval.models.huggingface")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _sorted(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`--model_args` as (our options, the harness's).

    Raises:
        UserError: a name that is neither.
    """
    mine: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in HARNESS:
            theirs[name] = value
        elif name in OPTIONS:
            mine[name] = value.replace("x", ",") if name == "tree" and isinstance(value, str) else value
        else:
            raise UserError(f"--model_args: unknown argument {name!r}{near(name, (*OPTIONS, *HARNESS))}")
    return mine, theirs
