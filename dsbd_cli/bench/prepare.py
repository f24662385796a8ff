"""What comes before the first answer of a bench: the pair, items that work, the judge, what must not change."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from dsbd_cli.bench.backend import PairBackend
from dsbd_cli.bench.measure import Backend
from dsbd_cli.bench.plan import Plan
from dsbd_cli.bench.progress import tell
from dsbd_cli.bench.prompting import Prompter, check_prompts
from dsbd_cli.bench.score import Scorer
from dsbd_cli.bench.scoring.mt_bench import Judge
from dsbd_cli.bench.world import World
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.ui import waiting
from dsbd_cli.version import __version__


def open_pair(plan: Plan, world: World) -> Backend:
    """Load the pair this process decodes with."""
    from dsbd_cli.decoder import Decoder
    from dsbd_cli.loading import load_pair
    from dsbd_cli.loading.progress import TerminalProgress

    spec, _ = plan.chosen.resolve()
    if world.device and world.tensor_parallel == 1:
        spec = spec.replace(target_device=world.device, draft_device=world.device)
    need_draft = any(arm.needs_draft for arm in plan.arms)
    waiting.waiting(plan.chosen.what(spec, need_draft))
    with TerminalProgress() as progress:

        def show(stage: str, done: int = 0, total: int = 0) -> None:
            with contextlib.suppress(OSError):  # the screen may be gone
                progress(stage, done, total)

        pair = load_pair(spec, need_draft=need_draft, progress=show if world.rank == 0 else None)
    decoder = Decoder(pair, plan.settings)
    decoder.preset = plan.chosen.preset_name()
    waiting.waiting("checking that forwards agree with the models' own")
    for arm in plan.arms:
        if not arm.hf:
            decoder.ready(arm.settings)
    for note in decoder.notes:
        tell(note)
    return PairBackend(decoder)


def check_plan(plan: Plan, prompter: Prompter, scorer: Scorer) -> Plan:
    """The plan less the items whose gold fails or whose prompt does not fit; both are counted and told.

    Raises:
        UserError: the template refuses a prompt, no prompt fits, or no gold works.
    """
    dataset = plan.dataset
    faults = scorer.faults(dataset)
    if faults:
        good = tuple(item for item in dataset.items if item.id not in faults)
        first = next(iter(faults.items()))
        if not good:
            raise UserError(f"{dataset.source}: no gold query works; {first[0]}: {first[1]}")
        skipped = {**dataset.skipped, "gold query fails": len(faults)}
        dataset = dataclasses.replace(dataset, items=good, skipped=skipped)
        tell(
            f"left out, because the gold query fails: {counted(len(faults), 'item')}; {first[0]}: {first[1]}"
        )
    checked = check_prompts(prompter, dataset)
    if len(checked.items) < len(dataset.items):
        reason, count = list(checked.skipped.items())[-1]
        tell(f"left out, {reason}: {counted(count, 'item')}")
    return dataclasses.replace(plan, dataset=checked)


def make_judge(plan: Plan) -> Judge | None:
    """The judge, found to be there; None where none was asked for."""
    options = plan.options
    if options.judge_url is None or options.judge_model is None:
        return None
    prompts = plan.dataset.extras.get("judge_prompts") or {}
    if not prompts:
        raise UserError(f"{plan.dataset.source}: no judge_prompts.jsonl, which the judge needs")
    judge = Judge(options.judge_url, options.judge_model, prompts, timeout_s=options.judge_timeout)
    judge.check()
    return judge


def fingerprint(plan: Plan, prompter: Prompter, scorer: Scorer) -> dict[str, Any]:
    """What must not change between sessions of one run, less what only the loaded models tell."""
    spec, _ = plan.chosen.resolve()
    batch = plan.options.batch
    return {
        "dsbd": __version__,
        "data": {"kind": plan.dataset.kind, "builtin": plan.dataset.builtin, "sha256": plan.digest},
        "prompt_form": prompter.form,
        "shots": plan.shots.facts() if plan.shots else {"count": 0},
        "stops": list(plan.stops) if prompter.form == "plain text" else [],
        "system": plan.settings.system,
        "max_new_tokens": plan.settings.max_new_tokens,
        "seed": plan.seed,
        "rule": scorer.rule(),
        "pair": spec.to_dict(),
        "tensor_parallel": plan.options.tensor_parallel,
        # None as in runs that are older than the option: they go on.
        "batch": None if batch == 1 else batch or "auto",
    }
