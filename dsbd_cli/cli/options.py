"""The options that decide what is loaded and decoded, written once for generate, bench and chat.

`decoding_options` puts them into a command's signature, and hands the command one `Chosen` record. One module, since
the list of options and what is made of it name the same fields.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from dsbd_cli.cli import ranks
from dsbd_cli.errors import UserError
from dsbd_cli.group import ALONE, Group, Team
from dsbd_cli.setting_text import parse_setting
from dsbd_cli.settings import DRAFTING, FIELDS, Settings
from dsbd_cli.ui import waiting

if TYPE_CHECKING:
    import torch

    from dsbd_cli.decoder import Decoder

MODEL, DECODING, SAMPLING = "Models", "Decoding", "Sampling and stopping"


def _option(kind: Any, *names: str, help: str, panel: str, **more: Any) -> inspect.Parameter:
    name = names[0].removeprefix("--").split("/")[0].replace("-", "_")
    annotation = Annotated[kind, typer.Option(*names, help=help, rich_help_panel=panel, **more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


Text, Int, Float, Flag = str | None, int | None, float | None, bool | None
PARAMETERS = [
    _option(
        Text,
        "--preset",
        help="Preset name or YAML file (`dsbd presets` lists them); smol if absent and no --target is given. Its "
        "values hold where no option does (`dsbd presets show NAME`).",
        panel=MODEL,
    ),
    _option(Text, "--target", help="Target: folder, hub id, .gguf file, or wheel:… reference.", panel=MODEL),
    _option(Text, "--draft", help="Draft: as --target, or embedded:NAME.", panel=MODEL),
    _option(Text, "--revision", help="Hub revision of the target.", panel=MODEL),
    _option(Text, "--draft-revision", help="Hub revision of the draft.", panel=MODEL),
    _option(Flag, "--trust-remote-code", help="Run model code from the hub.", panel=MODEL),
    _option(Text, "--quantization", help="Load with bitsandbytes: 8bit or 4bit.", panel=MODEL),
    _option(Text, "--device-map", help="accelerate device map for a large target, e.g. auto.", panel=MODEL),
    _option(
        Int,
        "--tensor-parallel",
        help="Under torchrun: how many processes hold one target together, each on a card of its own.",
        panel=MODEL,
        metavar="N",
    ),
    _option(
        Int,
        "--draft-vocab",
        help="How many ids the draft proposes on a CPU, the first ones; 0 is all of them.",
        panel=MODEL,
        metavar="N",
    ),
    _option(Text, "--device", help="auto, cpu, cuda:N or mps, for both models.", panel=MODEL),
    _option(Text, "--target-device", help="Device of the target alone.", panel=MODEL),
    _option(Text, "--draft-device", help="Device of the draft alone.", panel=MODEL),
    _option(
        Text, "--dtype", help="auto, float32, bfloat16, float16, or int8 (CPU), for both models.", panel=MODEL
    ),
    _option(Text, "--target-dtype", help="Dtype of the target alone.", panel=MODEL),
    _option(Text, "--draft-dtype", help="Dtype of the draft alone.", panel=MODEL),
    _option(Text, "--method", help="dsbd, beam, speculative, specinfer or multinomial.", panel=DECODING),
    _option(Int, "--width", help="W: draws per layer, and beams kept.", panel=DECODING),
    _option(
        Int, "--draft-width", help="W_S: draws (cover: continuations) per drafted layer.", panel=DECODING
    ),
    _option(Int, "--gamma", help="Layers drafted per target call.", panel=DECODING),
    _option(Text, "--verify", help="paper, continue or cover; all give the same law.", panel=DECODING),
    _option(
        Text,
        "--draws",
        help="iid, or distinct: draws without replacement, so that W draws are W beams.",
        panel=DECODING,
    ),
    _option(Text, "--threshold", help="t of the dynamic width, or none for a fixed width.", panel=DECODING),
    _option(
        Text,
        "--width-rule",
        help="What t bounds: paper, the chance to pass; distinct, the mass of so many beams; auto is the draws' own.",
        panel=DECODING,
    ),
    _option(Int, "--min-width", help="W_min: the dynamic width never goes below.", panel=DECODING),
    _option(
        Text,
        "--forest",
        help="adaptive: on a CPU, draft as much as recently paid, or propose what followed the last tokens before; "
        "full: always gamma layers of W_S.",
        panel=DECODING,
    ),
    _option(
        Int,
        "--forest-nodes",
        help="Keep the most probable nodes of a forest, this many at most; 0 keeps all (cover only).",
        panel=DECODING,
    ),
    _option(
        Int,
        "--lookup",
        help="Prompt lookup in the draft's forests: beside its layers up to this many tokens that followed the last "
        "ones before; 0 adds none (cover only). Forests without the draft (adaptive) need none of it.",
        panel=DECODING,
    ),
    _option(
        Text,
        "--prices",
        help="What an adaptive forest costs: auto (measured here, once), off (assumed), or a file of prices.",
        panel=DECODING,
    ),
    _option(Text, "--tree", help="SpecInfer's expansion per depth, e.g. 2,2,1.", panel=DECODING),
    _option(
        Text,
        "--tree-rule",
        help="How specinfer verifies a node: specinfer, spectr (k-sequential) or rsd (draws without replacement); "
        "all give the same law.",
        panel=DECODING,
    ),
    _option(
        Text,
        "--kv",
        help="all, or one: after each target call only the likeliest unfinished beam goes on (less memory; "
        "outside the exactness theorem).",
        panel=DECODING,
    ),
    _option(
        Flag,
        "--deterministic/--sampled",
        help="Beam search without sampling: token for token Hugging Face's generate(num_beams=W, "
        "do_sample=False); for beam and dsbd.",
        panel=DECODING,
    ),
    _option(
        Float,
        "--temperature",
        help="0 is greedy: one sequence for every method (for beam search see --deterministic).",
        panel=SAMPLING,
    ),
    _option(Int, "--top-k", help="Keep the k likeliest of the joint; 0 is off.", panel=SAMPLING),
    _option(Float, "--top-p", help="Keep the smallest head of that mass; 1 is off.", panel=SAMPLING),
    _option(Int, "--max-new-tokens", help="Budget of generated tokens.", panel=SAMPLING),
    _option(Float, "--length-penalty", help="alpha in score = logprob / length**alpha.", panel=SAMPLING),
    _option(Text, "--early-stopping", help="first, heuristic or never.", panel=SAMPLING),
    _option(
        list[str] | None, "--stop", help="Stop before this text; may be given more than once.", panel=SAMPLING
    ),
    _option(Text, "--system", help="System turn before the prompt.", panel=SAMPLING),
    _option(
        Flag,
        "--raw/--chat",
        help="Give the prompt as it is, without the chat template; a text, not messages.",
        panel=SAMPLING,
    ),
    _option(Int, "--seed", help="Same seed, same text; drawn and reported when not given.", panel=SAMPLING),
    _option(
        Int,
        "--num-return",
        help="How many of the best beams to return, as JSON strings; fewer if fewer are distinct.",
        panel=SAMPLING,
    ),
]
# Names people know from other tools; each would change the law, so it is refused by name.
REFUSED = {
    "--repetition-penalty": "it would change the target's law between beams",
    "--presence-penalty": "it would change the target's law between beams",
    "--frequency-penalty": "it would change the target's law between beams",
    "--min-p": "use --top-k and --top-p, which act on the joint of all beams",
    "--typical-p": "use --top-k and --top-p, which act on the joint of all beams",
    "--no-repeat-ngram-size": "it would make a token's law depend on text the draft cannot see",
    "--logit-bias": "it would change the target's law",
    "--num-beams": "the option is --width",
    "--do-sample": "every method samples; --temperature 0 is greedy",
    "--max-tokens": "the option is --max-new-tokens",
}
_SPEC = {
    "revision", "draft_revision", "trust_remote_code", "quantization", "device_map", "tensor_parallel", "draft_vocab",
}  # fmt: skip


def was_given(context: typer.Context, name: str) -> bool:
    """Whether the command line names this option, rather than leaving it at its default."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


@dataclass(frozen=True)
class Chosen:
    """What the command line says about models and settings; unset options are absent.

    Attributes:
        preset: name or file, or None for the default.
        spec: given fields of `PairSpec`.
        settings: given fields of `Settings`.
    """

    preset: str | None
    spec: dict[str, Any]
    settings: dict[str, Any]

    def resolve(self) -> tuple[Any, Settings]:
        """(PairSpec, Settings): command line over preset over default; nothing is loaded yet."""
        from dsbd_cli.presets import DEFAULT_PRESET, load_preset

        if self.preset is None and "target" in self.spec:
            from dsbd_cli.loading import PairSpec

            base, settings = PairSpec(target=self.spec["target"], draft=None), Settings()
        else:
            preset = load_preset(DEFAULT_PRESET if self.preset is None else self.preset)
            base, settings = preset.pair, preset.settings
            # A preset's draft belongs to the preset's target, and a revision to the model that it is one of.
            if "target" in self.spec:
                base = base.replace(revision=None, **({} if "draft" in self.spec else {"draft": None}))
            if "target" in self.spec or "draft" in self.spec:
                base = base.replace(draft_revision=None, draft_vocab=0)
        return base.replace(**self.spec), settings.merged(self.settings)

    def without(self, name: str) -> Chosen:
        """The same, had this setting not been given."""
        return replace(self, settings={key: value for key, value in self.settings.items() if key != name})

    def notes(self, decoder: Decoder) -> list[str]:
        """What a user should know before anything is decoded.

        A line for each reason for which options that were given change nothing (`dsbd_cli/idle.py`), then the
        decoder's own notes.
        """
        from dsbd_cli.idle import in_vain

        _, settings = self.resolve()
        return [*in_vain(settings, self.settings), *decoder.notes]

    def preset_name(self) -> str | None:
        """The preset whose pair this is; None where options made it another one, which no preset measures anew."""
        from dsbd_cli.presets import DEFAULT_PRESET, load_preset

        if self.preset is None and "target" in self.spec:
            return None
        name = DEFAULT_PRESET if self.preset is None else self.preset
        return name if self.resolve()[0] == load_preset(name).pair else None

    def sources(self) -> dict[str, Any]:
        """The models asked for, in a form that changes when their files do (`loading/stamp.py`).

        Raises:
            UserError: a source that is not there.
        """
        from dsbd_cli.loading.stamp import stamps

        spec, settings = self.resolve()
        return stamps(spec, need_draft=_wants_draft(spec, settings, False))

    def check(self, *, every_method: bool = False) -> None:
        """Refuse what can be known without torch, whose import takes seconds: settings, paths, files.

        Raises:
            UserError: as `load`, for all that is told by names, files and settings alone.
        """
        from dsbd_cli.loading import early

        spec, settings = self.resolve()
        early.look(spec, need_draft=_wants_draft(spec, settings, every_method))

    def team(self) -> Team:
        """Who holds the target with this process; all but the first of them are silent from now on.

        Raises:
            UserError: too few processes.
        """
        spec, _ = self.resolve()
        team = Team.of(spec.tensor_parallel)
        if not team.first:
            ranks.hush()
        return team

    def meet(self) -> Group:
        """Meet the processes that hold the target with this one, before any of them can leave by itself."""
        spec, _ = self.resolve()
        if spec.tensor_parallel == 1:
            return ALONE
        from dsbd_cli.loading.sharded import meet

        return meet(spec)[0]

    def load(
        self, *, every_method: bool = False, quiet: bool = False, typing: bool = False, **spec_fields: Any
    ) -> Decoder:
        """The decoder with these settings; loads the pair.

        Args:
            every_method: load a draft where one is named, though the method does not need it.
            quiet: say nothing about the wait.
            typing: as for `waiting.waiting`.
            spec_fields: used where the pair's own are still `auto`.
        """
        self.check(every_method=every_method)
        spec, settings = self.resolve()
        free = {name: value for name, value in spec_fields.items() if getattr(spec, name) == "auto"}
        spec = spec.replace(**free)
        wanted = _wants_draft(spec, settings, every_method)
        if not quiet:
            waiting.waiting(self.what(spec, wanted), typing=typing)
        try:
            decoder = _open(spec, settings, wanted)
        finally:
            waiting.ready()
        decoder.preset = self.preset_name()
        return decoder

    @staticmethod
    def what(spec: Any, draft: bool) -> str:
        """What a loading line says: the models by their short names."""
        from dsbd_cli.loading.source import parse_source

        texts = [spec.target, *([spec.draft] if draft and spec.draft else [])]
        return "loading " + " + ".join(parse_source(text).name for text in texts)


def _open(spec: Any, settings: Settings, wanted: bool) -> Decoder:
    """A decoder over a pair as it was remembered, or loaded in full and then remembered."""
    try:
        return _opened(spec, settings, wanted)
    finally:
        if not gc.isenabled():  # `main.main` has put it off; what is there now stays
            gc.freeze()
            gc.enable()


def _opened(spec: Any, settings: Settings, wanted: bool) -> Decoder:
    from dsbd_cli.loading import load_pair
    from dsbd_cli.loading.progress import TerminalProgress
    from dsbd_cli.loading.ready import pair as ready

    known = ready.load(
        spec, need_draft=wanted
    )  # before anything that imports torch: it may not need all of it

    from dsbd_cli.decoder import Decoder

    if known is not None:
        return Decoder(known, settings)
    with TerminalProgress() as progress:
        pair = load_pair(spec, need_draft=wanted, progress=progress)
    make_current(pair.target.device)
    decoder = Decoder(pair, settings)
    if pair.target.device.type == "cpu":
        with contextlib.suppress(UserError):  # what is not served is said when it is asked for
            if ready.remember(spec, pair, decoder.verdicts()):
                decoder.keep_packed(ready.places(spec, pair))
    return decoder


def make_current(device: torch.device) -> None:
    """Make a card the process's current one: Triton launches there, and only there.

    Without it a model on another card than the first would run on other kernels, slower and rounded otherwise.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def _wants_draft(spec: Any, settings: Settings, every_method: bool) -> bool:
    """Whether a draft is to be loaded. Raises UserError where one is needed and none is named."""
    if settings.method in DRAFTING and spec.draft is None:
        from dsbd_cli.loading import early

        early.require_target(spec)  # what was written is looked at before what was not
        raise UserError(f"method {settings.method} needs a draft model: give --draft, or --method beam")
    return settings.method in DRAFTING or (every_method and spec.draft is not None)


def decoding_options(command: Callable[..., Any], unlisted: Sequence[str] = ()) -> Callable[..., Any]:
    """Add the shared options to a typer command whose first parameter is `chosen: Chosen`.

    Args:
        unlisted: names of options that the command refuses by name, and so does not offer.
    """
    shared = [_hidden(one) if one.name in unlisted else one for one in PARAMETERS]

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        mine = {parameter.name: values.pop(parameter.name) for parameter in PARAMETERS}
        return command(chosen=chosen_from(mine), **values)

    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "chosen"
    ]
    wrapper.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *shared]}
    del wrapper.__wrapped__  # typer would look through it at the bare signature
    return wrapper


def _hidden(parameter: inspect.Parameter) -> inspect.Parameter:
    """The same option, not shown by --help."""
    kind, option = get_args(parameter.annotation)
    option = copy.copy(option)
    option.hidden = True
    return parameter.replace(annotation=Annotated[kind, option])


def chosen_from(values: dict[str, Any]) -> Chosen:
    """Sort option values into spec and settings, and parse those that are lists or `none`."""
    given = {name: value for name, value in values.items() if value is not None}
    if given.get("stop") == []:
        del given["stop"]
    spec = {name: given[name] for name in _SPEC if name in given}
    for name in ("device", "dtype"):
        for role in ("target", "draft"):
            value = given.get(f"{role}_{name}", given.get(name))
            if value is not None:
                spec[f"{role}_{name}"] = value
    for name in ("target", "draft"):
        if name in given:
            spec[name] = given[name]
    settings = {name: parse_setting(name, given[name]) for name in FIELDS if name in given}
    return Chosen(given.get("preset"), spec, settings)
