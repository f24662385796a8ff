"""Whatever is asked, in a preset, on the command line, as a prompt or a stop string: a result, or one line
and exit 2. 10,000 cases."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsbd_cli import Decoder, Settings
from dsbd_cli.decoding.tree.events import Finished, Text
from dsbd_cli.errors import UserError
from dsbd_cli.presets import load_preset
from dsbd_cli.settings import DEFAULTS, FIELDS, METHODS, NONE
from tests import builders

pytestmark = pytest.mark.slow
SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def cases(count: int) -> settings:
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=SLOW_IS_FINE)


numbers = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([10**6, 2**63, -(2**40)]),
    st.floats(allow_nan=True),
    st.floats(0, 1.2),
)
words = st.one_of(
    st.sampled_from(
        [*METHODS, "cover", "paper", "continue", "first", "never", "all", "one", "none", "auto", ""]
    ),
    st.text(max_size=8),
)
values = st.one_of(numbers, words, st.booleans(), st.none(), st.lists(st.one_of(numbers, words), max_size=3))
names = st.one_of(st.sampled_from(FIELDS), st.sampled_from([*FIELDS, "widht", "temp", "Width", ""]))
asked = st.dictionaries(names, values, max_size=5)
# Mostly plausible, so that many combinations are accepted and go on to decoding.
plausible = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(METHODS),
        "width": st.integers(1, 6),
        "draft_width": st.integers(1, 6),
        "gamma": st.integers(0, 4),
        "verify": st.sampled_from(["cover", "paper", "continue"]),
        "threshold": st.one_of(st.none(), st.floats(0.01, 1.0)),
        "min_width": st.integers(1, 4),
        "kv": st.sampled_from(["all", "one"]),
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0, 1e6]),
        "top_k": st.integers(0, 300),
        "top_p": st.floats(0, 1),
        "length_penalty": st.sampled_from([0.0, 1.0, 2.0, -1.0]),
        "early_stopping": st.sampled_from(["first", "heuristic", "never"]),
        "seed": st.integers(0, 2**40),
    },
)


def one_line(error: BaseException) -> None:
    said = str(error)
    assert said
    assert "\n" not in said


@cases(5500)
@given(asked)
def test_settings(given_values: dict[str, Any]) -> None:
    try:
        made = Settings().merged(given_values)
    except UserError as error:
        one_line(error)
        return
    json.dumps(made.to_dict())
    assert Settings(**made.to_dict() | {"tree": made.tree, "stop": made.stop}) == made
    for name, value in given_values.items():
        kept = getattr(made, name)
        if kept is None:
            assert value is None or value.lower() in NONE
        else:
            assert kept == (tuple(value) if isinstance(value, list) else value)
    for name in set(FIELDS) - set(given_values):
        assert getattr(made, name) == DEFAULTS[name] or name == "min_width"


scalars = st.one_of(
    st.sampled_from(["4", '"4"', "4.0", "1e-1", "1e-5", "0.8", "no", "yes", "null", "~", "", "[1, 2]", "{a: 1}", "&a 1",
                     "*a", "!!python/object/apply:os.system [id]", "|", "- x", "'", "0x10", "1_000", "0o7", ".nan",
                     "2026-01-01", "dsbd", "paper", "# none", "\t1", "@x", "%"]),
    st.text(max_size=6),
)  # fmt: skip
lines = st.one_of(
    st.builds("{}: {}".format, names, scalars),
    st.builds("{}:{}".format, st.sampled_from(FIELDS), scalars),
    st.text(max_size=12),
    st.sampled_from(["---", "...", "- a", "", "  width: 4", "\twidth: 4", "target: ./t", "draft: ./t"]),
)


@cases(2500)
@given(
    st.lists(lines, max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff"]),
)
def test_presets(tmp_path_factory: pytest.TempPathFactory, parts: list[str], end: str, head: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "property.yaml"
    path.write_bytes(head + end.join(parts).encode("utf-8", "surrogatepass"))
    try:
        preset = load_preset(path)
    except UserError as error:
        one_line(error)
        return
    json.dumps(preset.settings.to_dict())


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = tmp_path_factory.mktemp("property")
    table = (
        builders.torch.rand(builders.VOCAB + 3, builders.VOCAB + 3, generator=builders.torch.manual_seed(0))
        ** 8
    )
    table[:, [1, builders.VOCAB, builders.VOCAB + 1]] += 3.0
    builders.markov(
        base / "t", table / table.sum(1, keepdim=True), ["stop", "🙂", " a"], max_position_embeddings=200
    )
    builders.markov(base / "d", (table + 0.05) / (table + 0.05).sum(1, keepdim=True), ["stop", "🙂", " a"])
    return Decoder.from_pair(base / "t", base / "d")


prompts = st.one_of(
    st.text(max_size=20), st.sampled_from(["", " ", "<s>", "</s>", "<|eot|>stop", "\x00", "\ufffd", "🙂" * 9,
                                            "q" * 190]),
    st.lists(st.integers(-2, 270), max_size=6),
)  # fmt: skip
stops = st.lists(
    st.one_of(st.text(max_size=3), st.sampled_from(["stop", "st", "op🙂", "🙂🙂", " a a", "\ufffd"])),
    max_size=3,
)


@cases(1200)
@given(prompts, stops, plausible, st.integers(0, 5))
def test_prompts_and_stop_strings(
    decoder: Decoder, prompt: Any, stop: list[str], given_values: dict[str, Any], budget: int
) -> None:
    try:
        chosen = Settings(max_new_tokens=budget, min_width=1).merged(given_values | {"stop": stop})
        events = list(decoder.stream(prompt, chosen))
    except UserError as error:
        one_line(error)
        return
    assert isinstance(events[-1], Finished)
    result = events[-1].result
    assert "".join(event.new for event in events if isinstance(event, Text)) == result.text
    result.text.encode("utf-8")
    assert result.stats.new_tokens == len(result.token_ids) <= budget
    json.loads(result.to_json())
    if stop:
        # A text that ends within a character shows that mark, and may go on from there.
        assert not any(entry in result.text for entry in stop if "\ufffd" not in entry)


options = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([f"--{name.replace('_', '-')}" for name in FIELDS]),
                  st.one_of(numbers.map(str), words, scalars)),
        st.sampled_from([("--json",), ("--no-stream",), ("--quiet",), ("--stats",), ("--deterministic",), ("--raw",),
                         ("--show-tokens",), ("--lines",), ("--chat",), ("--nonsense",), ("--",), ("-",), ("-x",)]),
        st.text(max_size=5).map(lambda text: (text,)),
    ),
    max_size=4,
)  # fmt: skip


@cases(800)
@given(
    options, st.one_of(st.binary(max_size=10), st.text(max_size=10).map(lambda text: text.encode("utf-8")))
)
def test_command_lines(decoder: Decoder, parts: list[tuple[str, ...]], stdin: bytes) -> None:
    from dsbd_cli.cli.main import run

    arguments = ["generate", "--target", "x", "--draft", "x", *(word for part in parts for word in part)]
    # Long answers prove nothing here; whatever the case says comes first, so that it may still be wrong.
    arguments[5:5] = ["--max-new-tokens", "3", "--seed", "1"]
    out, err = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(err):
        patch.setattr("dsbd_cli.loading.load_pair", lambda spec, **_: decoder.pair)
        patch.setattr("dsbd_cli.loading.early.look", lambda spec, **_: [])
        patch.setattr("dsbd_cli.decoder.Decoder", lambda pair, chosen: _with(decoder, chosen))
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        patch.setattr(sys, "stdout", out)
        code = run(arguments)
    said = err.getvalue()
    assert code in (0, 2), said
    assert "Traceback" not in said
    if code == 2:
        assert said.endswith("\n")
        assert said.splitlines()[-1].startswith("dsbd: ")
    out.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]


def _with(decoder: Decoder, chosen: Settings) -> Decoder:
    decoder.settings = chosen
    return decoder


def test_there_are_ten_thousand() -> None:
    here = Path(__file__).read_text()
    import re

    assert sum(int(count) for count in re.findall(r"^@cases\((\d+)\)", here, re.MULTILINE)) >= 10_000
