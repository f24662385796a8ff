"""A whole bench: check everything cheap, load, run or resume, judge, sum up, report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from dsbd_cli.bench import context
from dsbd_cli.bench.files import Record, differences, key_of
from dsbd_cli.bench.measure import Backend
from dsbd_cli.bench.plan import Plan
from dsbd_cli.bench.prepare import check_plan, fingerprint, make_judge, open_pair
from dsbd_cli.bench.progress import BenchProgress, draws, tell
from dsbd_cli.bench.prompting import Prompter, prompter_of_spec
from dsbd_cli.bench.resume import cut_items
from dsbd_cli.bench.runner import Job, Runner
from dsbd_cli.bench.score import PRIMARY, Scorer
from dsbd_cli.bench.scoring.mt_bench import Judge
from dsbd_cli.bench.store import Store
from dsbd_cli.bench.together import TogetherRunner
from dsbd_cli.bench.windows import windows_of
from dsbd_cli.bench.world import World
from dsbd_cli.counted import all_are, counted
from dsbd_cli.errors import Stopped
from dsbd_cli.loading.stamp import stamps
from dsbd_cli.others import Window
from dsbd_cli.ui import waiting


def run_bench(plan: Plan, *, open_backend: Callable[[Plan, World], Backend] = open_pair,
              prompter: Prompter | None = None) -> Path:  # fmt: skip
    """Run or resume a bench, and write summary and report.

    Returns:
        The run's folder.

    Raises:
        UserError: input that cannot work. RunError: the run broke; what was measured stays.
    """
    world = World(plan.options.tensor_parallel)
    first = world.rank == 0
    with Scorer(
        plan.dataset.kind, sql_timeout=plan.options.sql_timeout, keep_distinct=plan.options.keep_distinct
    ) as scorer:
        spec, _ = plan.chosen.resolve()
        if not any(arm.needs_draft for arm in plan.arms):
            spec = spec.replace(draft=None, draft_revision=None)
        waiting.waiting("reading the prompts")
        prompter = prompter or prompter_of_spec(spec, plan.settings, plan.shots)
        for note in plan.notes if first else []:
            tell(note)
        plan = check_plan(plan, prompter, scorer)
        judge = make_judge(plan) if first else None
        facts = fingerprint(plan, prompter, scorer)
        with Store(plan.out, world.rank, world.size, tell) as store:
            results = store.mend() if first else []
            jobs = plan.jobs()
            done = {key_of(record) for record in results}
            if first and world.size == 1 and _finished(store, facts, _sources(plan), jobs, done):
                tell(f"{all_are(len(jobs), 'answer')} there already: {plan.out}")
            else:
                world.start()
                try:
                    _measure(plan, world, store, scorer, prompter, facts, open_backend, results)
                finally:
                    world.close()
            if first:
                finish(plan, store, judge)
    return plan.out


def _sources(plan: Plan) -> dict[str, Any]:
    """What changes when the models' files do."""
    spec, _ = plan.chosen.resolve()
    return stamps(spec, need_draft=spec.draft is not None)


def _finished(
    store: Store, facts: dict[str, Any], sources: dict[str, Any], jobs: Sequence[Job], done: set[Any]
) -> bool:
    """Whether nothing is left to do, in a run of these facts; told without loading a model.

    Files that are not those of the run may still hold its weights: that is told by loading them.
    """
    there = store.read_run()
    if (
        there is None
        or there.get("sources") != _plain(sources)
        or not jobs
        or not all(job.key in done for job in jobs)
    ):
        return False
    known = {name: there["fingerprint"].get(name) for name in facts}
    for arm in {job.arm.name: job.arm for job in jobs}.values():
        if differences(there["arms"].get(arm.name, {}).get("settings", {}), arm.shown()):
            return False
    return not differences(known, _plain(facts))


def _measure(
    plan: Plan,
    world: World,
    store: Store,
    scorer: Scorer,
    prompter: Prompter,
    facts: dict[str, Any],
    open_backend: Callable[[Plan, World], Backend],
    results: list[Record],
) -> None:
    """Load, warm up, answer what is not answered yet, and merge."""
    from dsbd_cli.bench.figures import Figures  # scipy takes a second to import

    _collect(world, store, results)
    if world.rank == 0 and not draws():  # what is drawn says it, below the waiting line
        given = {key_of(record) for record in results}
        # With none left the models are loaded to see whether they are those of the run.
        if left := sum(job.key not in given for job in plan.jobs()):
            arms, items = counted(len(plan.arms), "arm"), counted(len(plan.dataset.items), "item")
            tell(f"{counted(left, 'answer')} to give ({arms}, {items}), into {plan.out}: loading the models")
    backend = open_backend(plan, world)
    facts = {**facts, "models": backend.facts(), "devices": _device_names(backend)}
    session = context.session(backend.devices(), context.command_line())
    idle = backend.meter.idle_watts
    number = 0
    if world.rank == 0:
        arms_before = (store.read_run() or {}).get("arms", {})
        number = store.claim(
            {
                "fingerprint": _plain(facts),
                "sources": _plain(_sources(plan)),
                "session": {**session, "idle_watts": idle, "processes": world.size},
                "arms": {
                    arm.name: _plain(
                        {"method": arm.method, "settings": arm.shown(), "swept": dict(arm.swept)}
                    )
                    for arm in plan.arms
                },
                "data": _data_facts(plan),
                "baseline": plan.baseline,
                "energy": {
                    "source": backend.meter.source,
                    "reason": backend.meter.reason,
                    "devices": backend.meter.devices,
                },
            }
        )
        if backend.meter.reason:
            tell(f"energy is not measured: {backend.meter.reason}")
        if plan.options.batch == 1:  # a window's answers are there together or not at all
            _drop_cut(plan, store, results, arms_before)
    number = world.broadcast(number)
    done = {tuple(key) for key in world.broadcast([list(key_of(record)) for record in results])}
    own = {item.id for item in world.mine(plan.dataset.items)}
    mine = [job for job in plan.jobs() if job.item.id in own]
    todo = [job for job in mine if job.key not in done]
    if len(todo) < len(mine) and world.rank == 0:
        tell(f"{len(mine) - len(todo)} of {counted(len(mine), 'answer')} are there already: going on")
    together = plan.options.batch != 1
    runner = (TogetherRunner if together else Runner)(backend, prompter, scorer, plan.seed, plan.stops)
    figures = Figures(PRIMARY[plan.dataset.kind][0], (arm.name for arm in plan.arms))
    figures.add(results)
    written = 0
    label = f"{plan.dataset.label}, {counted(len(plan.arms), 'arm')}"
    watched = Window()
    try:
        with BenchProgress(len(mine), len(mine) - len(todo), figures, label, world.rank == 0) as progress:
            if todo:
                progress.stage("warming up")
                waiting = {job.arm.name: job.arm for job in todo}
                common = {"session": number, "rank": world.rank}

                def write(records: Sequence[Record]) -> None:
                    nonlocal written
                    if world.leader:
                        store.append_all(records)
                        written += len(records)

                if isinstance(runner, TogetherRunner):
                    at_a_time = backend.at_a_time(plan.options.batch)
                    runner.warm_up_many(list(waiting.values()), todo, at_a_time)
                    windows = list(windows_of(mine, done, at_a_time, plan.seed))
                    runner.run_windows(windows, at_a_time, write, progress, common)
                else:
                    runner.warm_up(list(waiting.values()), todo[0].item)
                    runner.run(todo, lambda record: write([record]), progress, common)
    except KeyboardInterrupt:
        there = f"{len(done) + written} of {counted(len(plan.jobs()), 'answer')}"
        raise Stopped(f"stopped with {there}; the same command goes on") from None
    finally:
        if world.rank == 0:
            # Of several processes each would count the rest of them among the others.
            others = watched.share() if world.size == 1 else None
            store.end_session(number, {"load_at_end": context.load(), "others": others})
    _merge(world, store, results, written)


def _drop_cut(plan: Plan, store: Store, results: list[Record], arms: Collection[str]) -> None:
    """Take back the answers of items that a session was cut in: they are given again, together."""
    cut = cut_items(results, plan.jobs(), arms)
    kept = [record for record in results if (record["item"], record["repeat"]) not in cut]
    if len(kept) < len(results):
        names = ", ".join(sorted({item for item, _ in cut}))
        tell(
            f"{counted(len(results) - len(kept), 'answer')} to {names}: given again, for the run was cut there, and "
            "clocks of two sessions are no pair"
        )
        results[:] = kept
        store.write_results(results)


def _collect(world: World, store: Store, results: list[Record]) -> None:
    """Bring what an earlier, cut run left in parts on any machine to rank 0, before anything is asked."""
    if world.size == 1:
        return
    kept = world.gather(store.own_lines() if world.leader else [])
    if kept is not None and _add_new(results, kept):
        store.write_results(results)
    world.broadcast(True)
    store.drop_own_part()


def _add_new(results: list[Record], gathered: Sequence[Sequence[Record]]) -> int:
    """Append results that are not there yet; how many."""
    known = {key_of(record) for record in results}
    new = 0
    for record in (record for lines in gathered for record in lines):
        if key_of(record) not in known:
            known.add(key_of(record))
            results.append(record)
            new += 1
    return new


def _merge(world: World, store: Store, results: list[Record], written: int) -> None:
    """Bring every process's results to rank 0."""
    if world.size == 1:
        return
    total = world.total(written)
    gathered = world.gather(store.own_lines() if world.leader else [])
    if gathered is not None:
        new = _add_new(results, gathered)
        if world.tensor_parallel == 1 and new != total:
            tell(f"given twice and counted once: {counted(total - new, 'result')}")
        store.write_results(results)
    world.broadcast(True)
    store.drop_own_part()


def finish(plan: Plan, store: Store, judge: Judge | None) -> None:
    """Judge what is not judged yet, then summary and report.

    Raises:
        RunError: the judge was away and ratings are missing; the report is there and says so.
    """
    from dsbd_cli.bench.judging import rate_all
    from dsbd_cli.bench.report import write_report

    rated = rate_all(store, plan.dataset, judge) if judge is not None else None
    waiting.waiting("summing up, drawing the report")
    try:
        write_report([plan.out])
    finally:
        waiting.ready()
    if rated is not None:
        rated.check()


def _data_facts(plan: Plan) -> dict[str, Any]:
    dataset = plan.dataset
    return {
        "kind": dataset.kind,
        "label": dataset.label,
        "builtin": dataset.builtin,
        "source": dataset.source,
        "total": dataset.total,
        "items": len(dataset.items),
        "skipped": dict(dataset.skipped),
    }


def _device_names(backend: Backend) -> list[str]:
    return sorted({context.device_name(name) for name in backend.devices()})


def _plain(value: Any) -> Any:
    """As JSON gives it back: tuples are lists."""
    import json

    return json.loads(json.dumps(value))
