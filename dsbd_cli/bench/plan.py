"""What a bench will do, checked before anything heavy is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsbd_cli.bench.arms import Arm, build_arms
from dsbd_cli.bench.datasets import load_dataset
from dsbd_cli.bench.datasets.hub import repository
from dsbd_cli.bench.datasets.records import Dataset
from dsbd_cli.bench.datasets.sample import sample_folder
from dsbd_cli.bench.datasets.shots import DEFAULT_SHOTS, Shots, load_shots
from dsbd_cli.bench.files import read_run
from dsbd_cli.bench.methods import ONE_AT_A_TIME, parse_methods
from dsbd_cli.bench.runner import Job, schedule
from dsbd_cli.bench.sweep import Grid, parse_sweep
from dsbd_cli.errors import UserError
from dsbd_cli.loading.early import require_target
from dsbd_cli.names import near
from dsbd_cli.paths import refuse_no_folder
from dsbd_cli.settings import Settings

if TYPE_CHECKING:
    from dsbd_cli.cli.options import Chosen

DEFAULT_SEED = 1
DEFAULT_BASELINE = "beam"
# Chosen so that a bench with nothing but --dataset ends well within ten minutes on two cores with the default
# pair, which takes six seconds of one core for an answer of 48 tokens.
DEFAULT_LIMITS = {"spider": 6, "squad": 6, "mt-bench": 3, "jsonl": 6, "prose": 6}
DEFAULT_TOKENS = {"spider": 48, "squad": 32, "mt-bench": 64, "jsonl": 64, "prose": 64}
MOST_SHOTS = 64
# An example's answer is one line, and what follows is another question.
LINE_END = ("\n",)
# What is tried beside the plain methods where neither methods nor a sweep were named: enough for fronts.
DEFAULT_SWEEPS = ("width=2", "threshold=none,0.9", "draft_width=4")


@dataclass(frozen=True)
class Options:
    """What `dsbd bench` was asked for, beside models and settings.

    Attributes:
        dataset: name or file of prompts. data_dir: official files, or None for the built-in sample.
        methods, sweeps: as written. limit: items, 0 = all, None = the default.
        shots: worked examples before each question, 0 = the data set's own single one, None = the default.
        hf_limit: items for Hugging Face's methods, None = `limit`.
        batch: answers that share their forwards; None: as many as this machine does well.
        baseline: arm that speeds are compared with; None: beam, where it is an arm.
    """

    dataset: str
    data_dir: Path | None = None
    methods: str = "default"
    sweeps: Sequence[str] = ()
    limit: int | None = None
    shots: int | None = None
    hf_limit: int | None = None
    repeats: int = 1
    batch: int | None = 1
    out: Path | None = None
    baseline: str | None = None
    judge_url: str | None = None
    judge_model: str | None = None
    judge_timeout: float = 120.0
    keep_distinct: bool = False
    sql_timeout: float = 5.0
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Plan:
    """A checked bench: nothing heavy was loaded for it."""

    options: Options
    chosen: Any
    dataset: Dataset
    arms: list[Arm]
    settings: Settings
    seed: int
    out: Path
    digest: str
    baseline: str
    notes: list[str] = field(default_factory=list)
    shots: Shots | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Where an answer to a prompt of plain text ends: it has no turn to end."""
        return LINE_END if self.shots else self.dataset.raw_stops

    def items_of(self, arm: Arm) -> int:
        """How many items an arm answers."""
        limit = self.options.hf_limit if arm.hf else None
        return len(self.dataset.items) if limit is None else min(limit, len(self.dataset.items))

    def jobs(self) -> list[Job]:
        """All jobs in the order they are done; Hugging Face's arms may get the first few items only."""
        counts = {arm.name: self.items_of(arm) for arm in self.arms}
        place = {item.id: number for number, item in enumerate(self.dataset.items)}
        every = schedule(self.dataset.items, self.arms, self.options.repeats, self.seed)
        return [job for job in every if place[job.item.id] < counts[job.arm.name]]


def make_plan(options: Options, chosen: Chosen) -> Plan:
    """Check names, settings, files and sweeps.

    Raises:
        UserError: anything that cannot work, before a model is loaded.
    """
    if options.repeats < 1:
        raise UserError(f"--repeats must be at least 1, not {options.repeats}")
    if options.batch is not None and options.batch < 1:
        raise UserError(f"--batch must be at least 1, not {options.batch}")
    for name in ("limit", "hf_limit"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise UserError(f"--{name.replace('_', '-')} must be at least 0 (0 = all), not {value}")
    for name in ("sql_timeout", "judge_timeout"):
        check_seconds(f"--{name.replace('_', '-')}", getattr(options, name))
    if options.shots is not None and not 0 <= options.shots <= MOST_SHOTS:
        raise UserError(f"--shots must lie in 0..{MOST_SHOTS}, not {options.shots}")
    methods = parse_methods(options.methods)
    preset_sweep, base = _preset(chosen)
    named = options.methods != "default" or options.sweeps
    grids = [_grid(text, preset_sweep) for text in (options.sweeps if named else DEFAULT_SWEEPS)]
    dataset = load_dataset(options.dataset, options.data_dir, sample_folder())
    digest = dataset.digest()
    limit = DEFAULT_LIMITS[dataset.kind] if options.limit is None else options.limit or None
    dataset = dataset.select(limit)
    shots = _shots(options, dataset)
    given = dict(chosen.settings)
    if shots is not None and given.get("system", base.system) is None:
        given.setdefault("raw", True)
    given.setdefault("max_new_tokens", min(base.max_new_tokens, DEFAULT_TOKENS[dataset.kind]))
    seed = given.pop("seed", base.seed)
    arms, notes = build_arms(methods, base, given, grids, asked=bool(options.sweeps))
    spec, _ = chosen.resolve()
    drafting = [arm.name for arm in arms if arm.needs_draft]
    if drafting and spec.draft is None:
        require_target(spec)  # what was written is looked at before what was not
        raise UserError(f"{drafting[0]} needs a draft model: give --draft, or name other --methods")
    if options.batch != 1 and any(arm.method in ONE_AT_A_TIME for arm in arms):
        notes.append(
            f"Hugging Face's generate assists one prompt only: {ONE_AT_A_TIME[0]} runs one at a time"
        )
    if len(dataset.items) < dataset.total:
        hint = "" if options.limit is not None else " (--limit 0 takes all)"
        notes.append(f"{len(dataset.items)} of {dataset.total} items{hint}")
    if dataset.kind == "mt-bench" and options.judge_url is None:
        notes.append(
            "nobody rates the answers, so that scores stay n/a: give --judge-url and --judge-model, or rate them later "
            "with dsbd bench judge"
        )
    elif not any(getattr(item, "references", True) for item in dataset.items):
        notes.append(f"{options.dataset} holds no references, so that scores stay n/a")
    if dataset.kind == "prose":
        notes.append(
            f"the references of {options.dataset} are prose, which no answer matches exactly: the score is F1, the "
            "words that a whole answer shares with them"
        )
    _refuse_idle(options, dataset.kind, arms)
    if (options.judge_url is None) != (options.judge_model is None):
        raise UserError("--judge-url and --judge-model go together")
    if options.judge_url is not None and dataset.kind != "mt-bench":
        raise UserError("a judge rates MT-Bench only: leave out --judge-url")
    out = options.out or Path(f"bench-{Path(options.dataset).stem if dataset.is_file else dataset.kind}")
    refuse_no_folder(out, "--out")
    baseline = _baseline(options.baseline, arms, out, notes)
    seed = DEFAULT_SEED if seed is None else seed
    longest = max(arm.settings.max_new_tokens for arm in arms)
    settings = dataclasses.replace(arms[0].settings, max_new_tokens=longest)
    return Plan(options, chosen, dataset, arms, settings, seed, out, digest, baseline, notes, shots)


def _baseline(given: str | None, arms: Sequence[Arm], out: Path, notes: list[str]) -> str:
    """The arm that speeds are compared with: one of this run, or of the run in `out` that it goes on with."""
    there = (read_run(out) or {}).get("arms", {})
    names = [*dict.fromkeys([*(arm.name for arm in arms), *there])]
    if given is None:
        if DEFAULT_BASELINE not in names:
            notes.append(
                f"speeds are compared with nothing: {DEFAULT_BASELINE} is no arm of this run (--baseline names another)"
            )
        return DEFAULT_BASELINE
    if given not in names:
        raise UserError(
            f"--baseline {given} is no arm of this run{near(given, names)}; it has {', '.join(names)}"
        )
    return given


def _refuse_idle(options: Options, kind: str, arms: Sequence[Arm]) -> None:
    """Refuse by name what was asked for and nothing here would read."""
    usual = Options(options.dataset)
    for name in ("keep_distinct", "sql_timeout"):
        if kind != "spider" and getattr(options, name) != getattr(usual, name):
            raise UserError(f"--{name.replace('_', '-')} means nothing to {options.dataset}: leave it out")
    if options.judge_url is None and options.judge_timeout != usual.judge_timeout:
        raise UserError(
            "--judge-timeout without a judge: leave it out, or give --judge-url and --judge-model"
        )
    if options.hf_limit is not None and not any(arm.hf for arm in arms):
        raise UserError("--hf-limit means nothing here: none of the --methods is Hugging Face's")


def _shots(options: Options, dataset: Dataset) -> Shots | None:
    """The worked examples of a run, None for none."""
    known = dataset.kind in DEFAULT_SHOTS
    if not known and options.shots:
        raise UserError(
            f"--shots means nothing to {options.dataset}: only {', '.join(DEFAULT_SHOTS)} have examples"
        )
    count = DEFAULT_SHOTS[dataset.kind] if known and options.shots is None else options.shots
    if not count:
        return None
    folder = None if repository(options.data_dir) is not None else options.data_dir
    shots = load_shots(dataset.kind, folder, sample_folder(), count)
    for item in dataset.items:
        shots.of(item)
    return shots


def check_seconds(option: str, value: float) -> None:
    """Refuse a time limit that is none: 0, negative, infinite or not a number."""
    if not 0 < value <= 86_400:  # nan is neither
        raise UserError(f"{option} must be seconds above 0 and up to 86400, not {value}")


def _preset(chosen: Chosen) -> tuple[dict[str, Any], Settings]:
    """The preset's sweep, and the settings before what the command line says."""
    from dsbd_cli.presets import DEFAULT_PRESET, load_preset

    if chosen.preset is None and "target" in chosen.spec:
        return {}, Settings()
    preset = load_preset(chosen.preset or DEFAULT_PRESET)
    return dict(preset.sweep), preset.settings


def _grid(text: str, preset_sweep: dict[str, Any]) -> Grid:
    if text.strip() != "preset":
        return parse_sweep(text)
    if not preset_sweep:
        raise UserError("--sweep preset: the preset carries no sweep")
    return {
        name: [tuple(v) if isinstance(v, list) else v for v in values]
        for name, values in preset_sweep.items()
    }
