"""Decoding the prompts of a batch, many at a time, and what is written about each.

One module, since files and streams are answered alike: from the same decoder, with the same records.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsbd_cli.batch import AUTO
from dsbd_cli.batch.echo import Echo
from dsbd_cli.batch.items import Item, form_of, json_note, read_items, refuse_raw
from dsbd_cli.batch.notes import Notes
from dsbd_cli.batch.progress import BatchProgress
from dsbd_cli.batch.store import Store
from dsbd_cli.counted import all_are, counted, of_were
from dsbd_cli.errors import Stopped, UserError
from dsbd_cli.group import joined
from dsbd_cli.idle import draws_nothing
from dsbd_cli.loading.spec import DTYPES
from dsbd_cli.result import Result
from dsbd_cli.settings import Settings, verifies_draws, width_from_target
from dsbd_cli.version import __version__

if TYPE_CHECKING:
    from dsbd_cli.batch.decode import Done
    from dsbd_cli.cli.options import Chosen
    from dsbd_cli.decoder import Decoder

# What may differ between two runs of one prompt, as names in a record's `stats`.
MEASURED = ("prefill_s", "decode_s", "tokens_per_s", "energy_j", "joules_per_token")
_SAMPLES = 64  # numbers of each weight that go into its fingerprint

Tell = Callable[[str], None]


class Refused(UserError):
    """Prompts that were refused, once all others are done.

    Attributes:
        results: of those others, as the run would have returned them.
    """

    def __init__(self, line: str, results: list[Result]) -> None:
        super().__init__(line)
        self.results = results


def run_file(
    chosen: Chosen, source: Path, output: Path, tell: Tell, *, bar: bool, batch: str = AUTO
) -> list[Result]:
    """Decode every prompt of `source` into `output`; goes on where an earlier run of the same was cut off.

    Args:
        chosen: models and settings.
        tell: receives notices. bar: draw progress on stderr.
        batch: how many at a time: a number, or `auto`.

    Returns:
        The results decoded by this process, now.

    Raises:
        UserError: input, output or settings that cannot work.
        Refused: once all others are done, if any prompt was refused.
        RunError: the run broke; what was written stays and the same command goes on from there.
    """
    if source.absolute() == output.absolute():
        raise UserError("--input and --output are one file")
    items, digest = read_items(source)
    _, settings = chosen.resolve()
    refuse_raw(items, settings, f"--input {source}")
    if form_of(source) == "text":
        way = f"{source.name} is read as texts; a .jsonl file takes {{}}"
        looks = (json_note(item.index + 1, str(item.prompt), way) for item in items)
        if line := next(filter(None, looks), None):
            tell(line)
    team = chosen.team()
    shard, group = team.shard, chosen.meet()
    seed_given = settings.seed is not None
    seed = settings.seed if settings.seed is not None else secrets.randbelow(2**31)
    facts = {
        "dsbd": __version__,
        "seed": seed,
        "settings": {name: value for name, value in settings.to_dict().items() if name != "seed"},
        "input": {"sha256": digest, "prompts": len(items), "form": form_of(source)},
        "sources": chosen.sources(),
    }
    store = Store(output, len(items), shard, tell) if team.first else Echo(output, len(items), shard, tell)
    results: list[Result] = []
    try:
        # What differs in settings or input is told before minutes of loading; other files, perhaps, after.
        if group.agreed(shard.world == 1 and store.is_of(facts, seed_given) and store.is_whole):
            _say_done(store, len(items), source, output, tell)
            return results
        device = shard.device() if team.size == 1 else None  # a team has chosen its cards
        places: dict[str, Any] = {"target_device": device, "draft_device": device} if device else {}
        decoder = _as_begun(chosen, store.models, chosen.load(**places), places, output)
        for line in chosen.notes(decoder):
            tell(line)
        decoder.ready(settings)
        facts |= {"models": decoded_by(decoder), "weights": weights(decoder)}
        if shard.world == 1 and (prices := _prices(decoder, settings, tell)) is not None:
            facts["prices"] = prices
        seed = group.agreed(store.claim(facts, seed_given))
        if group.agreed(shard.world == 1 and store.is_whole):
            _say_done(store, len(items), source, output, tell)
            return results
        mine = [item for item in items if shard.owns(item.index)]
        done = group.agreed(store.done)
        if resumed := sum(item.index in done for item in mine):
            tell(f"{resumed} of {counted(len(mine), 'prompt')} are done already: going on")
        refused: dict[int, str] = {}
        refused_before = {index: why for index, why in store.refused.items() if shard.owns(index)}

        from dsbd_cli.batch.decode import Running, decode_items

        notes = Notes(tell, _counted(source))
        left = [item for item in mine if item.index not in done]
        # Processes that share a terminal would draw over each other.
        shows = shard.rank == 0 or not bar
        try:
            with (
                Running(decoder, batch, tell) as running,
                BatchProgress(len(mine), resumed, tell if shows else _silent, bar=bar and shows) as progress,
            ):
                come = decode_items(decoder, settings, seed, left, running, progress.pulse)
                for item, record, result in come:
                    store.add(item.index, record)
                    notes.add(item.index + 1, record)
                    refused |= {item.index: record["error"]} if result is None else {}
                    results += [] if result is None else [result]
                    progress.step(result, running.load())
                notes.finish()
            store.finish()
        except KeyboardInterrupt:
            there = f"{resumed + len(refused) + len(results)} of {counted(len(mine), 'prompt')}"
            raise Stopped(f"stopped with {there}; the same command goes on") from None
        _say_unfinished(results, tell, f"`finished` in {output}", " given now" if resumed else "")
        if not seed_given and shard.rank == 0 and not draws_nothing(settings):
            tell(f"seed {seed}")
        _say_refused(refused_before | refused, len(mine), source, output, results)
        return results
    finally:
        store.close()


def _silent(line: str) -> None:
    """A `Tell` that says nothing."""


def _counted(source: Path) -> str:
    """What the number of a prompt of a file counts: blank lines of JSON are none."""
    return "line" if form_of(source) == "text" else "prompt"


def _say_done(store: Store, total: int, source: Path, output: Path, tell: Tell) -> None:
    """All prompts have their records already."""
    store.finish()  # a kill behind the last record leaves a part
    tell(f"{all_are(total, 'prompt')} done already: {output}")
    _say_refused(store.refused, total, source, output, [])


def _say_refused(
    refused: Mapping[int, str], total: int, source: Path, output: Path, results: list[Result]
) -> None:
    """A run ends alike whether its prompts were refused now or by the run that it went on from.

    Args:
        refused: why, by index. results: of the others.

    Raises:
        Refused: if any was.
    """
    if refused:
        others = "; the others are done" if len(refused) < total else ""
        first = min(refused)
        why = f"{_counted(source)} {first + 1}: {refused[first]}"
        raise Refused(
            f"{of_were(len(refused), total, 'prompt')} refused{others}; {why} (all in `error` of {output})",
            results,
        )


def _as_begun(
    chosen: Chosen, begun: Mapping[str, str | None], decoder: Decoder, places: Mapping[str, Any], output: Path
) -> Decoder:
    """The decoder in the number formats that the run was begun in: `auto` may be another one by now.

    Args:
        begun: `decoded_by` of the records that are there; nothing where there are none.

    Raises:
        UserError: this machine does not have them.
    """
    now = decoded_by(decoder)
    formats: dict[str, Any] = {}
    for role, text in begun.items():
        before, mine = (text or "").rsplit(" ", 2), (now.get(role) or "").rsplit(" ", 2)
        if before[::2] == mine[::2] and before != mine and before[1] in DTYPES:
            formats[f"{role}_dtype"] = before[1]
    if not formats:
        return decoder
    try:
        return chosen.load(**places, **formats)
    except UserError as error:
        names = ", ".join(f"{name.removesuffix('_dtype')} in {format_}" for name, format_ in formats.items())
        raise UserError(
            f"{output} was begun with the {names}, which is not to be had here ({error}): go on with it where it was "
            "begun, or give another --output"
        ) from None


def decoded_by(decoder: Decoder) -> dict[str, Any]:
    """Names, dtypes and kinds of device: the same for all ranks of one run."""
    found: dict[str, Any] = {}
    for role, model in decoder.models().items():
        found[role] = None
        if model is not None:
            ids = f" ({model['vocab']} ids)" if "vocab" in model else ""
            found[role] = f"{model['name']}{ids} {model['dtype']} {model['device'].split(':')[0]}"
    return found


def _prices(decoder: Decoder, settings: Settings, tell: Tell) -> str | None:
    """16 hex digits of the prices that a text depends on; None where it does not (docs/design.md section 3).

    It does where draws of the draft decide, and where widths or kept beams follow what was drafted.
    """
    widths = settings.threshold is not None and not width_from_target(settings)
    follows = verifies_draws(vars(settings)) or widths or settings.kv == "one"
    if not follows or not decoder.prices.wanted(settings):
        return None
    if (line := decoder.prices.announcement(settings)) is not None:
        tell(line)
    found = decoder.prices.look_up(settings)
    for note in found.notes:
        tell(decoder.named(note))
    if found.prices is None:
        return None
    table = json.dumps(found.prices.to_dict(), sort_keys=True)
    return hashlib.sha256(table.encode()).hexdigest()[:16]


def weights(decoder: Decoder) -> dict[str, str | None]:
    """A fingerprint of both models' weights, so that a draft trained anew under its old name is noticed."""
    models: dict[str, Any] = {"target": decoder.pair.target, "draft": decoder.pair.draft}
    return {role: None if loaded is None else _fingerprint(loaded.model) for role, loaded in models.items()}


def _fingerprint(model: Any) -> str:
    """16 hex digits over names, shapes and `_SAMPLES` evenly spaced numbers of every weight."""
    import torch

    digest = hashlib.sha256()
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            flat = weight.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLES)]
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            digest.update(some.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def run_lines(
    decoder: Decoder,
    settings: Settings,
    prompts: Callable[[Callable[[], bool]], Iterable[str | None]],
    write: Callable[[str], None],
    tell: Tell,
    *,
    json: bool,
    batch: str = AUTO,
    bar: bool = False,
) -> list[Result]:
    """Answer prompts as they come, one output line each, in order.

    Args:
        prompts: given whether to wait for one, the prompts; None for "none just now".
        write: receives each line as soon as it is complete.
        json: a whole record a line; else the answer alone as a JSON string (an answer may hold line
            ends), with several to return a list of them, and null for a prompt that was refused.
        batch: how many at a time, at most: a number, or `auto`.
        bar: draw progress on stderr.

    Raises:
        Stopped: by Ctrl-C, with how many lines were written.
        Refused: after the last line, if any prompt was.
    """
    import json as encoder

    from dsbd_cli.batch.decode import Running, decode_items
    from dsbd_cli.many import in_order

    seed = settings.seed if settings.seed is not None else secrets.randbelow(2**31)
    results: list[Result] = []
    refused: list[str] = []
    total = 0
    notes = Notes(tell, "line")
    seed = joined().agreed(seed)
    try:
        with (
            Running(decoder, batch, tell) as running,
            BatchProgress(None, 0, _silent, bar=bar) as progress,
        ):
            asked = _numbered(_for_all(prompts(lambda: running.idle)), tell)

            def finished() -> Iterator[Done]:
                for done in decode_items(decoder, settings, seed, asked, running, progress.pulse):
                    progress.step(done[2], running.load())
                    yield done

            for item, record, result in in_order(finished(), lambda done: done[0].index):
                notes.add(item.index + 1, record)
                if result is None:
                    refused.append(f"line {item.index + 1}: {record['error']}")
                else:
                    results.append(result)
                said = record if json else _answer(result)
                write(encoder.dumps(said, ensure_ascii=False, allow_nan=False) + "\n")
                total = item.index + 1
    except KeyboardInterrupt:
        raise Stopped(
            f"stopped after {counted(total, 'line')}; --input with --output can go on later"
        ) from None
    notes.finish()
    if not json:
        _say_unfinished(results, tell, "--json")
    if results and settings.seed is None and not draws_nothing(settings):
        tell(f"seed {seed}")
    if refused:
        raise Refused(f"{of_were(len(refused), total, 'prompt')} refused; {refused[0]}", results)
    return results


def _say_unfinished(results: Iterable[Result], tell: Tell, where: str, of_which: str = "") -> None:
    """How many beams did not end by themselves, if any did not.

    Args:
        where: what says which. of_which: what the results are among all, in words behind theirs.
    """
    beams = [(beam, result.settings.num_return) for result in results for beam in result.beams]
    if cut := sum(not beam.finished for beam, _ in beams):
        what = "answers" if all(wanted == 1 for _, wanted in beams) else "beams"
        tell(f"{cut} of {len(beams)} {what}{of_which} are unfinished ({where} says which)")


def _for_all(prompts: Iterable[str | None]) -> Iterator[str | None]:
    """The prompts of the first process of a team, as they come to it."""
    group = joined()
    if group.size == 1:
        yield from prompts
        return
    own = iter(prompts)
    while (come := group.agreed(_next(own) if group.first else None)) is not None:
        yield come[0]


def _next(prompts: Iterator[str | None]) -> list[str | None] | None:
    """What comes: a prompt in a list, or the end."""
    return list(itertools.islice(prompts, 1)) or None


def _numbered(prompts: Iterable[str | None], tell: Tell) -> Iterator[Item | None]:
    """The items of lines; told once if one is most likely meant for `--input`."""
    index, told = 0, False
    for prompt in prompts:
        if prompt is None:
            yield None
        else:
            if not told and (line := json_note(index + 1, prompt, "--lines takes texts; --input takes {}")):
                tell(line)
                told = True
            yield Item(index, prompt)
            index += 1


def _answer(result: Result | None) -> str | list[str] | None:
    if result is None:
        return None
    return result.text if result.settings.num_return == 1 else [beam.text for beam in result.beams]
