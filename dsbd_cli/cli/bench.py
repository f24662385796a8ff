"""`dsbd bench`: methods against each other on quality, speed and energy; and reports from its folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dsbd_cli.batch import AUTO
from dsbd_cli.bench.extra import need_extra
from dsbd_cli.cli.options import Chosen, decoding_options
from dsbd_cli.cli.output import Out
from dsbd_cli.errors import UserError
from dsbd_cli.names import near
from dsbd_cli.paths import refuse_no_folder
from dsbd_cli.ui import waiting
from dsbd_cli.ui.look import columns_of

DATA, RUN, JUDGE = "Data and methods", "Run", "MT-Bench judge"


class DefaultRun(TyperGroup):
    """`dsbd bench --dataset ...` is `dsbd bench run --dataset ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        elif not args[0].startswith("-") and args[0] not in self.commands:
            known = ", ".join(self.commands)
            raise UserError(
                f"dsbd bench {args[0]}: no such command{near(args[0], self.commands)}; there are {known}, and a data "
                "set is named with --dataset"
            )
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="bench",
    cls=DefaultRun,
    help="Compare methods on quality, speed and energy. `dsbd bench --dataset spider` is `dsbd bench run ...`.",
    rich_markup_mode=None,
)


@app.command("run", short_help="Run or resume a benchmark (its options: bench run --help).")
@decoding_options
def run(
    chosen: Chosen,
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            help="spider, squad, mt-bench, or a file of prompts: .txt (one a line) or .jsonl (`prompt` "
            "and optional `references`).",
            rich_help_panel=DATA,
        ),
    ],
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            help="Folder with the official files, or hub (squad, mt-bench); without it the small built-in "
            'sample is used. What it holds: docs/bench.md, "Data".',
            rich_help_panel=DATA,
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Comma-separated: multinomial, beam, speculative, specinfer, specinfer:spectr, specinfer:rsd, dsbd, "
            "dsbd:paper, dsbd:continue, dsbd:cover, dsbd-kv-one, hf-sample, hf-beam-sample, hf-beam-search, "
            "hf-assisted; "
            "or ours, hf, all. Default: the first five and a few settings of beam and dsbd.",
            rich_help_panel=DATA,
        ),
    ] = "default",
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            help='Settings to try, e.g. "gamma=2,3 draft_width=2..6 threshold=none,0.9"; may be given more '
            "than once (united), `preset` takes the preset's.",
            rich_help_panel=DATA,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            help="Items, 0 = all. Default: few enough for ten minutes on two cores.",
            rich_help_panel=DATA,
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            "--shots",
            help="Worked examples before each question, from the training data in --data-dir or else the "
            "built-in sample; 0 = one written example. Default: 3 for squad, 5 for spider.",
            rich_help_panel=DATA,
        ),
    ] = None,
    hf_limit: Annotated[
        int | None,
        typer.Option(
            "--hf-limit", help="Items for the Hugging Face methods; default --limit.", rich_help_panel=DATA
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Answers per item and method.", rich_help_panel=RUN)
    ] = 1,
    batch: Annotated[
        str,
        typer.Option(
            "--batch",
            help="Answers that share their forwards: 1 measures each by itself, a number or auto the throughput of "
            "each method (Hugging Face in padded batches).",
            rich_help_panel=RUN,
        ),
    ] = "1",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for results; the same command goes on in it. Default bench-DATASET.",
            rich_help_panel=RUN,
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", help="Arm that speeds are compared with. Default: beam.", rich_help_panel=RUN
        ),
    ] = None,
    keep_distinct: Annotated[
        bool,
        typer.Option(
            "--keep-distinct",
            help="Spider: compare with DISTINCT kept (the published default strips it).",
            rich_help_panel=RUN,
        ),
    ] = False,
    sql_timeout: Annotated[
        float, typer.Option("--sql-timeout", help="Spider: seconds per query.", rich_help_panel=RUN)
    ] = 5.0,
    judge_url: Annotated[
        str | None,
        typer.Option(
            "--judge-url",
            help="OpenAI-compatible endpoint, e.g. http://localhost:8000/v1; the key comes from "
            "DSBD_JUDGE_API_KEY or OPENAI_API_KEY.",
            rich_help_panel=JUDGE,
        ),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option("--judge-model", help="Model name there.", rich_help_panel=JUDGE)
    ] = None,
    judge_timeout: Annotated[
        float, typer.Option("--judge-timeout", help="Seconds per rating.", rich_help_panel=JUDGE)
    ] = 120.0,
) -> None:
    """Run or resume a benchmark, and leave results, a summary and a report in a folder.

    Interrupted at any time, the same command goes on where it was.
    """
    from dsbd_cli.bench.command import run_bench
    from dsbd_cli.bench.plan import Options, make_plan
    from dsbd_cli.bench.world import is_first_here
    from dsbd_cli.cli.batch import check_batch
    from dsbd_cli.loading import early
    from dsbd_cli.loading.source import parse_source

    need_extra()
    check_batch(batch)
    team = chosen.team()
    options = Options(
        dataset=dataset,
        data_dir=data_dir,
        methods=methods,
        sweeps=tuple(sweep or ()),
        limit=limit,
        shots=shots,
        hf_limit=hf_limit,
        repeats=repeats,
        batch=None if batch == AUTO else int(batch),
        out=out,
        baseline=baseline,
        judge_url=judge_url,
        judge_model=judge_model,
        judge_timeout=judge_timeout,
        keep_distinct=keep_distinct,
        sql_timeout=sql_timeout,
        tensor_parallel=team.size,
    )
    spec, _ = chosen.resolve()
    parse_source(spec.target, "target")  # a mistyped path is a worse fault than a missing draft
    plan = make_plan(options, chosen)
    draft = any(arm.needs_draft for arm in plan.arms)
    early.look(spec, need_draft=draft)
    waiting.waiting(Chosen.what(spec, draft))
    folder = run_bench(plan)
    if is_first_here():
        show(folder)


@app.command("report", short_help="Rebuild the summary and the report of one or more runs.")
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of finished or cut runs.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the report goes; default the (first) folder itself.")
    ] = None,
) -> None:
    """Rebuild the summary and the report; several folders are compared in one report."""
    need_extra()
    from dsbd_cli.bench.report import write_report

    show(write_report(folders, out))


@app.command("compare", short_help="Compare two runs of the same items, with paired tests.")
def compare(
    one: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run.")],
    two: Annotated[Path, typer.Argument(metavar="B", help="Folder of the run it is compared with.")],
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            help="Arm to compare; given twice: one of A, one of B. Default: all that both have.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the tables as CSV, Markdown and LaTeX.")
    ] = None,
) -> None:
    """Compare two runs of the same items: settings side by side, and paired tests of speed and quality."""
    need_extra()
    from dsbd_cli.bench.compare import compare_runs, write_comparison

    if out is not None:
        refuse_no_folder(out, "--out")
    comparison = compare_runs(one, two, tuple(arm or ()))
    if out is not None:
        write_comparison(comparison, out)
    Out().write(comparison.text(columns_of(sys.stdout)))


@app.command("judge", short_help="Rate the answers of an MT-Bench run later, or elsewhere.")
def judge(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an MT-Bench run.")],
    judge_url: Annotated[str, typer.Option("--judge-url", help="OpenAI-compatible endpoint.")],
    judge_model: Annotated[str, typer.Option("--judge-model", help="Model name there.")],
    judge_timeout: Annotated[float, typer.Option("--judge-timeout", help="Seconds per rating.")] = 120.0,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder with the official files, as in the run.")
    ] = None,
) -> None:
    """Rate the answers of an MT-Bench run later, or elsewhere; no model is loaded."""
    need_extra()
    from dsbd_cli.bench.judging import rate_folder
    from dsbd_cli.bench.plan import check_seconds

    check_seconds("--judge-timeout", judge_timeout)
    show(rate_folder(folder, judge_url, judge_model, judge_timeout, data_dir))


def show(folder: Path) -> None:
    """The table on stdout, and where the rest is."""
    waiting.ready()
    from dsbd_cli.bench.terminal import summary_text

    Out().write(summary_text(folder, columns_of(sys.stdout)))
