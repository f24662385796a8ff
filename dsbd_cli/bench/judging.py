"""Rating all MT-Bench answers of a run that its judge has not rated yet; needs no model of ours."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_cli.bench.datasets import load_dataset
from dsbd_cli.bench.datasets.records import Dataset, MtBenchItem
from dsbd_cli.bench.datasets.sample import sample_folder
from dsbd_cli.bench.files import Record, read_ratings, read_results, read_run, write_whole
from dsbd_cli.bench.progress import tell
from dsbd_cli.bench.scoring.mt_bench import Judge, JudgeAway, is_result
from dsbd_cli.bench.store import Store
from dsbd_cli.errors import RunError, Stopped, UserError

EVERY = 20
# Requests in a row that did not reach the judge, each with its own retries, before the rating stops.
AWAY = 3


@dataclass(frozen=True)
class Rated:
    """How far a rating came: ratings asked for and given now, and those still missing, with the last reason."""

    given: int
    missing: int
    reason: str = ""

    def check(self) -> None:
        """Say what is missing.

        Raises:
            RunError: ratings are missing.
        """
        if self.missing:
            raise RunError(
                f"{self.missing} ratings are missing ({self.reason}): the same command asks for them again"
            )


def rate_all(store: Store, dataset: Dataset, judge: Judge) -> Rated:
    """Rate what is not rated; each rating is on disk before the next is asked for.

    Ratings are kept apart from results and name their judge, so another judge can rate the same answers. A request
    that did not reach the judge leaves no line, and is made again by the next call; `AWAY` of them in a row end this
    one.

    Raises:
        UserError: the judge refuses the key or the model. Stopped: Ctrl-C.
    """
    _record_judge(store, judge)
    waiting = list(_waiting(store, dataset, judge))
    given = away = 0
    reason = ""
    try:
        for record, item, answers, turn, mark in waiting:
            try:
                rating = judge.rate(item, answers, turn)
            except JudgeAway as error:
                reason = str(error)
                away += 1
                if away == AWAY:
                    break
                continue
            away = 0
            line: dict[str, Any] = {
                "item": record["item"],
                "arm": record["arm"],
                "repeat": record["repeat"],
                "turn": turn,
                "judge": judge.model,
                "value": rating.value,
                "reason": rating.reason,
                "reply": rating.reply,
                "template": rating.template,
                "text": mark,
            }
            store.append_rating(line)
            given += 1
            if given % EVERY == 0:
                tell(f"{given} of {len(waiting)} ratings")
    except KeyboardInterrupt:
        raise Stopped(f"stopped with {given} of {len(waiting)} ratings; the same command goes on") from None
    return Rated(given, len(waiting) - given, reason)


def _waiting(
    store: Store, dataset: Dataset, judge: Judge
) -> Iterator[tuple[Record, MtBenchItem, list[str], int, str]]:
    """(result, item, its answers, turn, digest of what is rated) of each turn without a rating."""
    items = {item.id: item for item in dataset.items if isinstance(item, MtBenchItem)}
    done = {
        (r["item"], r["arm"], r["repeat"], r["turn"], r["text"])
        for r in read_ratings(store.folder)
        if r.get("judge") == judge.model and is_result(r)
    }
    for record in read_results(store.folder):
        item = items.get(record["item"])
        if item is None:
            continue
        answers = [turn["text"] for turn in record["turns"]]
        for turn in range(len(answers)):
            mark = hashlib.sha256("\0".join(answers[: turn + 1]).encode("utf-8", "replace")).hexdigest()[:16]
            if (record["item"], record["arm"], record["repeat"], turn, mark) not in done:
                yield record, item, answers, turn, mark


def rate_folder(folder: Path, url: str, model: str, timeout_s: float, data_dir: Path | None) -> Path:
    """Rate the answers of an existing run, and write its summary and report again.

    Raises:
        UserError: no MT-Bench run there, other questions than were asked, or no judge.
        RunError: ratings are missing; those that came are kept.
    """
    from dsbd_cli.bench.report import write_report

    run = read_run(folder)
    if run is None or run["data"]["kind"] != "mt-bench":
        raise UserError(f"{folder}: no MT-Bench run (no run.json of one)")
    if data_dir is None and not run["data"]["builtin"]:
        raise UserError(f"{folder} asked questions of {run['data']['source']}: give --data-dir")
    dataset = load_dataset("mt-bench", data_dir, sample_folder())
    if dataset.digest() != run["fingerprint"]["data"]["sha256"]:
        raise UserError(f"{dataset.source} is not the data that {folder} was run on")
    prompts = dataset.extras.get("judge_prompts") or {}
    if not prompts:
        raise UserError(f"{dataset.source}: no judge_prompts.jsonl, which the judge needs")
    judge = Judge(url, model, prompts, timeout_s=timeout_s)
    judge.check()
    with Store(folder, 0, 1, tell) as store:
        store.mend()
        rated = rate_all(store, dataset, judge)
        write_report([folder])
    rated.check()
    return folder


def _record_judge(store: Store, judge: Judge) -> None:
    """Say in `run.json` which judge the summary reads."""
    run = store.read_run()
    if run is not None:
        run["judge"] = judge.settings()
        write_whole(store.folder / "run.json", json.dumps(run, ensure_ascii=False, indent=1) + "\n")
