"""Ctrl-C anywhere in a call, or a caller's time limit: the next one gives what an undisturbed decoder gives."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock

from dsbd_cli import Decoder, Settings
from dsbd_cli.decoding import Node
from dsbd_cli.decoding.forward import native
from dsbd_cli.decoding.model import hf_model
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.model.path_model import PathModel
from dsbd_cli.decoding.model.shared import SharedModel
from dsbd_cli.energy import EnergyMeter
from dsbd_cli.errors import RunError, UserError, let_by, suppressed
from dsbd_cli.group import Group
from dsbd_cli.hf import inputs
from dsbd_cli.loading import gguf_file
from dsbd_cli.loading.hardware import NumberFormat
from dsbd_cli.loading.model import load_config
from dsbd_cli.loading.place import Place
from dsbd_cli.loading.source import Source
from dsbd_cli.many import Batch
from dsbd_cli.prices import Prices, slices, store
from dsbd_cli.prices.measure import measure
from tests import builders
from tests.interrupting import Late, interrupted, limited, points_of, some, stopped
from tests.test_many import captured, told

# Points tried in each case; all of them take minutes.
COUNT = int(os.environ.get("DSBD_TEST_POINTS", "10"))
SHORT = Settings(seed=1, max_new_tokens=5, width=2, draft_width=2, gamma=2, top_k=5, threshold=None)
WAYS = {
    "cover": SHORT,
    "paper": dataclasses.replace(SHORT, verify="paper", forest="full"),
    "trees": dataclasses.replace(SHORT, method="specinfer", tree=(2, 1)),
    "beam": dataclasses.replace(SHORT, method="beam", width=3),
    "lookup": dataclasses.replace(SHORT, lookup=2),
    "whole rows": dataclasses.replace(SHORT, top_k=0, top_p=0.9),
    "multinomial": dataclasses.replace(SHORT, method="multinomial"),
}
CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# A pair on forwards in C; as a card runs it; on the models' own code; path by path; on a card.
CASES = [
    *[("native", way) for way in ("cover", "whole rows", "lookup", "beam")],
    *[("captured", way) for way in ("cover", "paper", "trees", "beam", "whole rows")],
    ("own", "cover"),
    ("windows", "cover"),
    ("paths", "multinomial"),
    *[pytest.param("card", way, marks=CARD) for way in ("cover", "paper", "trees", "beam", "whole rows")],
]
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("pair")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.2}  # heads of 16
    for name, seed in (("t", 0), ("d", 1)):
        builders.rand(base / name, seed=seed, **sizes)
        builders.rand(base / f"gpt2 {name}", "gpt2", seed=seed, initializer_range=0.2)
        builders.rand(base / f"window {name}", "mistral", seed=seed, sliding_window=8, initializer_range=0.2)
    builders.rand(base / "path t", "mamba", hidden_size=32, num_hidden_layers=1, state_size=4)
    return base


@pytest.fixture(scope="module")
def decoders(folder: Path) -> Callable[[str], Decoder]:
    """By kind, made once."""
    made: dict[str, Decoder] = {}

    def decoder(kind: str) -> Decoder:
        if kind not in made:
            made[kind] = new(folder, kind)
        return made[kind]

    return decoder


def new(folder: Path, kind: str) -> Decoder:
    names = {"own": "gpt2 ", "windows": "window ", "paths": "path "}.get(kind, "")
    draft = None if kind == "paths" else folder / f"{names}d"
    device = "cuda" if kind == "card" else "cpu"
    decoder = Decoder.from_pair(folder / f"{names}t", draft, dtype="float32", device=device)
    return captured(decoder) if kind == "captured" else decoder


def alone(decoder: Decoder, settings: Settings) -> Any:
    return told(decoder.generate(PROMPT, settings, energy=False))


def turn(decoder: Decoder, settings: Settings, more: list[int] | None = None) -> Any:
    """A chat's turn: the prompt, and what it shares with the last one is kept."""
    *_, last = decoder.stream([*PROMPT, *(more or [])], settings, reuse=True, energy=False)
    return told(last.result)  # type: ignore[union-attr]


def together(decoder: Decoder, settings: Settings) -> Any:
    prompts = [PROMPT, PROMPT[:5], PROMPT[7:20]]
    return [told(one) for one in decoder.generate_many(prompts, settings, batch=2)]


Use = Callable[[Decoder, Settings], Any]
Stop = Callable[[], None]


def break_everywhere(
    decoder: Decoder, use: Use, checks: list[Callable[[], Any]], settings: Settings, stop: Stop = stopped
) -> None:
    """Interrupt `use` here and there, now and then twice in a row; the checks say the same after as before."""
    wanted = [check() for check in checks]
    use(decoder, settings)
    decoder.step._torn = True  # what is done for an interrupted call can be interrupted too
    points = some(points_of(partial(use, decoder, settings)), COUNT)
    came = 0
    for number, point in enumerate(points):
        came += interrupted(partial(use, decoder, settings), point, stop)
        if number % 4:
            check = number % len(checks)
            assert checks[check]() == wanted[check], point
    assert came > len(points) // 2
    for check, known in zip(checks, wanted, strict=True):
        assert check() == known


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_one_prompt(decoders: Callable[[str], Decoder], kind: str, way: str) -> None:
    one, settings = decoders(kind), WAYS[way]
    break_everywhere(one, alone, [partial(alone, one, settings)], settings)


@pytest.mark.parametrize(
    ("kind", "way"), [case for case in CASES if case not in (("native", "beam"), ("captured", "beam"))]
)
def test_a_time_limit_of_the_caller(decoders: Callable[[str], Decoder], kind: str, way: str) -> None:
    """What its handler raises is an error as others are, and yet nothing that a model or a device did wrong."""
    one, settings = decoders(kind), WAYS[way]
    with limited() as late_now:
        break_everywhere(one, alone, [partial(alone, one, settings)], settings, late_now)
    models = [one.target, *([] if one.draft is None else [one.draft])]
    assert all(model.captured for model in models) is (kind in ("captured", "card"))
    assert not [note for note in (*one.target.notes, *one.engines.notes) if "captur" in note]
    assert not one.engines._refused


@pytest.mark.parametrize("kind", ["native", "captured", "own", "windows", pytest.param("card", marks=CARD)])
def test_a_chat(decoders: Callable[[str], Decoder], kind: str) -> None:
    """What is kept of the last prompt is none of an interrupted one, or as good."""
    one = decoders(kind)
    checks = [partial(turn, one, SHORT, more) for more in ([50, 51, 52, 53], [60, 61], [50, 51, 62])]
    break_everywhere(one, lambda decoder, settings: turn(decoder, settings, [50, 51, 52]), checks, SHORT)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("native", "cover"),
        ("captured", "cover"),
        ("captured", "beam"),
        ("own", "beam"),
        ("paths", "multinomial"),
        pytest.param("card", "cover", marks=CARD),
        pytest.param("card", "beam", marks=CARD),
    ],
)
def test_many_prompts(decoders: Callable[[str], Decoder], kind: str, way: str) -> None:
    one, settings = decoders(kind), WAYS[way]
    checks = [partial(together, one, settings), partial(alone, one, settings)]
    break_everywhere(one, together, checks, settings)


@pytest.mark.parametrize(
    ("kind", "use", "most"),
    [("native", alone, 1000), ("captured", alone, 3 * COUNT), ("native", together, 3 * COUNT)],
)
def test_operations_on_the_books_of_a_tree(
    decoders: Callable[[str], Decoder], kind: str, use: Use, most: int
) -> None:
    one = decoders(kind)
    wanted = use(one, SHORT)
    points = points_of(partial(use, one, SHORT))
    books = [point for point in points if "/decoding/cache/t" in point.code.co_filename]
    came = 0
    for point in some(books, most):
        came += interrupted(partial(use, one, SHORT), point)
        assert use(one, SHORT) == wanted, point
    assert came > 20


def later(decoder: Decoder, times: int) -> Iterator[None]:
    """Inside: Ctrl-C in a forward, not the first."""
    count = 0

    def stopped(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == times:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        run, shared = HfTreeModel._run, SharedModel._run
        patch.setattr(HfTreeModel, "_run", lambda *given: (stopped(), run(*given))[1])
        patch.setattr(SharedModel, "_run", lambda *given: (stopped(), shared(*given))[1])
        yield


@pytest.mark.parametrize("use", [alone, turn, together])
@pytest.mark.parametrize("kind", ["native", "captured"])
def test_a_second_one_while_the_first_is_seen_to(
    decoders: Callable[[str], Decoder], kind: str, use: Use
) -> None:
    one = decoders(kind)
    wanted = use(one, SHORT)

    def stopped() -> None:
        with contextlib.contextmanager(later)(one, 4), contextlib.suppress(KeyboardInterrupt):
            use(one, SHORT)

    behind = points_of(stopped)[-60:]
    for point in some(behind, COUNT):
        interrupted(stopped, point)
        assert use(one, SHORT) == wanted, point


def test_a_forward_that_is_given_up_costs_a_chat_nothing(decoders: Callable[[str], Decoder]) -> None:
    """Nothing is left of it, so what was computed before is still good; as Ctrl-C mostly comes in one."""
    one = decoders("native")
    tree = one.target.tree
    turn(one, SHORT)
    tree = one.target.tree
    with contextlib.contextmanager(later)(one, 4), pytest.raises(KeyboardInterrupt):
        turn(one, SHORT, [50, 51])
    assert one.target.undone is None
    turn(one, SHORT, [50, 51, 52])
    assert one.target.tree is tree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tree), "plan", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            turn(one, SHORT, [50, 51])
    turn(one, SHORT, [50, 51])
    assert one.target.tree is not tree


@pytest.mark.parametrize("how", ["ctrl-c", "time limit"])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_self_test(folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: int, how: str) -> None:
    """It ends as it would have: with the same forward, and each that disagrees told once."""

    def check(tree: HfTreeModel, *given: Any) -> str | None:
        found = real(tree, *given)
        return "off" if tree._ways.refused < wrong else found

    real = hf_model.check_tree
    monkeypatch.setattr(hf_model, "check_tree", check)
    pair = new(folder, "native").pair
    once = Decoder(pair)
    wanted = once.verdicts(), alone(once, SHORT), once.target.notes
    points = [
        point
        for point in points_of(lambda: Decoder(pair).verdicts())
        if point.code.co_name not in ("__init__", "<module>")
    ]
    with limited() as late_now:
        for point in some(points, COUNT):
            one = Decoder(pair)
            interrupted(one.verdicts, point, stopped if how == "ctrl-c" else late_now)
            assert (one.verdicts(), alone(one, SHORT), one.target.notes) == wanted, point


def test_prices_that_are_being_measured(
    decoders: Callable[[str], Decoder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are measured in the models' own caches: who decodes with these has lost them."""
    one = decoders("native")
    wanted = turn(one, SHORT)
    plain = dataclasses.replace(SHORT, method="beam")
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path))
    left = one.stream(PROMPT, plain, energy=False)
    next(left)
    monkeypatch.setattr("dsbd_cli.prices.pair.measure", partial(measure, counts=(1, 4), budget=0.0))
    one.prices.measured(again=True)
    with pytest.raises(UserError, match="another prompt was begun"):
        list(left)

    def stopped(target: HfTreeModel, draft: HfTreeModel | None) -> Prices:
        target.prefill(PROMPT[::-1], Node(-1, None))
        raise KeyboardInterrupt

    monkeypatch.setattr("dsbd_cli.prices.pair.measure", stopped)
    before = one.target.tree
    with pytest.raises(KeyboardInterrupt):
        one.prices.measured(again=True)
    assert turn(one, SHORT) == wanted
    assert one.target.tree is not before


def test_a_lock_of_prices_that_are_being_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path))
    prices, facts = Prices.assumed(0.2, 0.1), {"a": "test"}

    def measured() -> None:
        store.kept_or_measured(facts, lambda: prices, again=True)

    for point in points_of(measured):
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(measured, point)
        with FileLock(f"{store.path_of(facts)}.lock", timeout=0):
            pass  # it is nobody's


def asked_for_energy(stop: Stop, patch: pytest.MonkeyPatch) -> None:
    EnergyMeter([SimpleNamespace(name="card", start=stop)]).start()  # type: ignore[list-item]


def compiled(stop: Stop, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(native, "_failures", [])
    try:
        native.compiled(stop)
    finally:
        assert native.failure() is None


def sliced(stop: Stop, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slices, "Slice", lambda *_: stop())
    slices.judge(None, None, [NumberFormat(torch.float32)], int8=False, trust=False)  # type: ignore[arg-type]


def padded(stop: Stop, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inputs, "_last_logits", lambda *_: stop())
    plain = SimpleNamespace(get_text_config=SimpleNamespace)
    inputs.check_padding(SimpleNamespace(config=plain), torch.ones(1, 3), torch.tensor([[0, 1, 1]]), 1)


def loaded(stop: Stop, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: stop())
    load_config(Place(Source("a/model", "hub"), "target", "a/model"), False)


def parsed(stop: Stop, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("gguf.GGUFReader", lambda *_: stop())
    gguf_file._parse(Path("x.gguf"), "target", 1, 1)


def wrapped(stop: Stop, patch: pytest.MonkeyPatch) -> None:
    """As libraries do it, that say in an error of their own that something went wrong."""

    def opened(*_: object, **__: object) -> None:
        try:
            stop()
        except Exception:
            raise OSError("there is no such model") from None

    patch.setattr("transformers.AutoConfig.from_pretrained", opened)
    load_config(Place(Source("a/model", "hub"), "target", "a/model"), False)


def waited_for_prices(stop: Stop, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FileLock, "acquire", lambda *_, **__: stop())
    store.found_or_measured(store.PRICES, {"a": "pair"}, lambda: pytest.fail("measured"))


def set_aside(stop: Stop, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "_values", lambda *_: stop())
    store.set_aside(Path("x.json"))


@pytest.mark.parametrize(
    "work",
    [asked_for_energy, compiled, sliced, padded, loaded, parsed, wrapped, waited_for_prices, set_aside],
)
def test_a_time_limit_is_no_fault_of_what_it_comes_into(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Stop, pytest.MonkeyPatch], None]
) -> None:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError  # an OSError, as compilers and files have them

    with limited(late) as late_now, pytest.raises(TimeoutError):
        work(late_now, monkeypatch)


def missing() -> None:
    raise OSError("nothing there")


def test_a_time_limit_that_the_caller_sees_to_is_over() -> None:
    """What goes wrong meanwhile and is seen to here is nobody else's."""
    for missed in (let_by, lambda error: None):
        with limited() as late_now:
            try:
                late_now()
            except Late:
                try:
                    missing()
                except OSError as error:
                    missed(error)
                with suppressed(OSError):
                    missing()
    with limited() as late_now, pytest.raises(Late), suppressed(Exception):
        late_now()


def test_whether_a_path_has_a_cache(folder: Path) -> None:
    loaded = new(folder, "paths").pair.target

    def path() -> PathModel:
        return PathModel(loaded.model, vocab_size=256, role="target", name="path", device=loaded.device)

    once = path()
    once.require_tree()
    with limited() as late_now:
        for point in points_of(path().require_tree):
            for stop in (stopped, late_now):
                again = path()
                assert interrupted(again.require_tree, point, stop), point
                again.require_tree()
                assert (again.notes, again._steps.cached) == (once.notes, True), point


def test_a_run_beside_one_that_is_interrupted_says_that_it_lost_its_caches(
    decoders: Callable[[str], Decoder],
) -> None:
    one = decoders("native")
    wanted = alone(one, SHORT), together(one, SHORT)
    left = one.stream(PROMPT, SHORT, energy=False)
    next(left)
    prompts = [PROMPT, PROMPT[:5], PROMPT[7:20]]
    many = one.generate_many(prompts, SHORT, batch=2)
    first = told(next(many))
    one.step._torn = True
    with pytest.raises(UserError, match="another prompt was begun"):
        list(left)
    assert alone(one, SHORT) == wanted[0]
    assert [first, *map(told, many)] == wanted[1]  # its caches are its own


@pytest.mark.parametrize("kind", ["native", "captured"])
def test_what_is_thrown_in_from_outside(decoders: Callable[[str], Decoder], kind: str) -> None:
    """Into a stream between two events, and from the caller's own iterators: nothing is torn then."""
    one = decoders(kind)
    wanted, several = alone(one, SHORT), together(one, SHORT)
    for events in range(1, 6):
        tree = one.target.tree
        left: Any = one.stream(PROMPT, SHORT, reuse=True, energy=False)
        for _ in range(events):
            next(left)
        with pytest.raises(KeyboardInterrupt):
            left.throw(KeyboardInterrupt())
        assert alone(one, SHORT) == wanted
        assert one.target.tree is tree

        def prompts(count: int) -> Iterator[list[int]]:
            yield from [PROMPT] * count
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(one.generate_many(prompts(events), SHORT, batch=2))
        assert together(one, SHORT) == several


def test_a_batch_is_closed_once_and_then_serves_nobody(decoders: Callable[[str], Decoder]) -> None:
    one = decoders("captured")
    asked = [(PROMPT, SHORT)] * 4
    with Batch(one, 2) as batch:
        answers = batch.answers(asked)
        next(answers)
        batch.close()
        kept = one.buffers
        batch.close()
        assert one.buffers is kept
        with pytest.raises(UserError, match="closed"):
            list(answers)
    assert one.buffers is kept


def test_threads_beside_an_interrupted_one(decoders: Callable[[str], Decoder]) -> None:
    """As a card runs it, where forwards, captures and caches are one: each waits for its turn."""
    one = decoders("captured")
    wanted = alone(one, SHORT), together(one, SHORT)
    point = random.Random(0).choice(points_of(partial(alone, one, SHORT)))
    with ThreadPoolExecutor(5) as pool:
        uses: list[Use] = [alone, together, alone, together]
        running = [pool.submit(use, one, SHORT) for use in uses]
        stopped = pool.submit(interrupted, partial(alone, one, SHORT), point)
        assert [work.result(timeout=60) for work in running] == [*wanted, *wanted]
        assert stopped.result(timeout=60)


def test_processes_that_hold_a_target_together_say_that_they_are_out_of_step(folder: Path) -> None:
    one = new(folder, "native")
    one.pair.target.model.dsbd_group = Group(0, 2)
    one.step._torn = True
    for _ in range(2):
        with pytest.raises(RunError, match="out of step"):
            alone(one, dataclasses.replace(SHORT, seed=1))


def test_a_batch_that_is_torn_is_left_as_it_is(
    decoders: Callable[[str], Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it is given back, to be kept for the next one: its books may say what is not so."""
    one = decoders("native")
    left: list[bool] = []
    leave = Batch._leave
    monkeypatch.setattr(Batch, "_leave", lambda batch: (left.append(batch._torn), leave(batch))[1])
    wanted = together(one, SHORT)
    assert len(left) == 1
    with contextlib.contextmanager(later)(one, 4), pytest.raises(KeyboardInterrupt):
        together(one, SHORT)
    assert len(left) == 1
    assert together(one, SHORT) == wanted
    assert len(left) == 2
