"""A model may say anything: at a terminal no control code of its reaches the screen, in a pipe every byte is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsbd_cli.cli import output
from dsbd_cli.loading import progress
from dsbd_cli.loading.ready.key import code_sum
from dsbd_cli.prices import Curve, Prices, formats, host, store
from dsbd_cli.version import __version__
from tests import builders
from tests.cli.conftest import Call, environment, pair, program
from tests.terminal import Terminal

Models = Callable[..., str]
WORDS = ("\x1b[31mred\x1b]0;owned\x07", "ok\r\n", "\x9b1m\u202e\tend")
RAW = "".join(WORDS)
SHOWN = "\\x1b[31mred\\x1b]0;owned\\x07ok\n\\x9b1m\\u202e\tend"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout and stderr count as terminals for what is written, and panels cannot be drawn."""
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)


@pytest.mark.parametrize("how", [[], ["-q"], ["--no-stream"], ["--method", "beam"]])
def test_plain_answers(dsbd: Call, models: Models, screen: None, how: list[str]) -> None:
    ran = dsbd("generate", "hi", *pair(models("says", *WORDS)), "--seed", "1", *how)
    assert (ran.code, ran.text) == (0, SHOWN + "\n")


@pytest.mark.parametrize("how", [[], ["-q"], ["--no-stream"]])
def test_pipes_get_the_bytes(dsbd: Call, models: Models, how: list[str]) -> None:
    ran = dsbd("generate", "hi", *pair(models("says", *WORDS)), "--seed", "1", *how)
    assert (ran.code, ran.out) == (0, (RAW + "\n").encode())


@pytest.mark.parametrize("how", [["--json"], ["--num-return", "1", "--json"], ["--num-return", "2"]])
def test_json_means_the_same_and_holds_no_code(
    dsbd: Call, models: Models, screen: None, how: list[str]
) -> None:
    ran = dsbd("generate", "hi", *pair(models("says", *WORDS)), "--seed", "1", *how)
    assert ran.code == 0
    assert not set(ran.text) & set("\x1b\x07\x9b\u202e\r")
    said = json.loads(ran.text.splitlines()[0])
    assert (said["text"] if isinstance(said, dict) else said) == RAW


def test_lines_of_a_batch(dsbd: Call, models: Models, screen: None) -> None:
    ran = dsbd("generate", "--lines", *pair(models("says", *WORDS)), "--seed", "1", stdin=b"a\nb\n")
    assert not set(ran.text) & set("\x1b\x07\x9b\u202e\r")
    assert [json.loads(line) for line in ran.text.splitlines()] == [RAW, RAW]


def test_chat_and_a_comparison(dsbd: Call, tmp_path: Path, screen: None) -> None:
    builders.says(tmp_path, *WORDS)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    builders.tok(tmp_path, WORDS, chat_template=template)
    ran = dsbd("chat", *pair(str(tmp_path)), "-q", stdin=b"hi\n/compare\n")
    assert ran.code == 0, ran.err
    assert ran.text == f"{SHOWN}\n[dsbd]\n{SHOWN}\n[beam]\n{SHOWN}\n"
    assert not set(ran.err) & set("\x1b\x07\x9b")


def test_errors_that_quote_a_users_words(dsbd: Call, screen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = dsbd("generate", "hi", "--target", "./\x1b]0;owned\x07")
    assert ran.code == 2
    assert "\\x1b]0;owned\\x07" in ran.err
    assert not set(ran.err) & set("\x1b\x07")


CODES = "\x1b]0;owned\x07\u202e\x9b1m"


def clean(text: str) -> bool:
    return not set(text) & set("\x1b\x07\x9b\u202e\r")


def test_what_the_doctor_reads_in_files(
    dsbd: Call, screen: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone may have written into a folder that is shared."""
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path))
    mine = {"dsbd": __version__, "code": code_sum()}
    verdict = formats.Verdict("float32", {}, f"timed {CODES}\nprices     none")
    store.found_or_measured(formats.KIND, mine | {"name": f"big{CODES}"}, lambda: verdict)
    prices = Prices(Curve((1,), (1.0,)), origin=CODES)
    store.found_or_measured(store.PRICES, mine | {"target": {"name": CODES}}, lambda: prices)
    times = host.HostPrices(1.0, 1.0, 1.0, 1.0, CODES)
    store.found_or_measured(host.KIND, mine | {"python": CODES}, lambda: times)
    told, parsed = dsbd("doctor"), dsbd("doctor", "--json")
    assert (told.code, parsed.code) == (0, 0)
    assert clean(told.text)
    assert clean(parsed.text)
    assert "big\\x1b]0;owned\\x07" in told.text
    assert "\nprices     none" not in told.text
    assert parsed.json["prices"] == [f"{CODES} (None, None), torch None: {CODES}"]


def test_presets_statistics_and_stages(
    dsbd: Call, models: Models, screen: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text('target: "./a\\e]0;owned\\a\\u202e"\n')
    shown = dsbd("presets", "show", preset)
    assert shown.code == 0, shown.err
    assert clean(shown.text)
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(Prices.assumed(0.2, 0.03).to_dict() | {"origin": CODES}))
    ran = dsbd("generate", "hi", *pair(models("says", "a")), "--seed", "1", "--prices", prices, "--stats")
    assert ran.code == 0, ran.err
    assert "owned" in ran.err
    assert clean(ran.err)
    shown_at: list[str] = []
    bar = SimpleNamespace(start=lambda: None, stop=lambda: None, update=lambda *_, **__: None,
                          add_task=lambda stage, **_: shown_at.append(stage))  # fmt: skip
    monkeypatch.setattr(progress, "_bar", lambda: bar)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    with progress.TerminalProgress() as tell:
        tell(f"loading {CODES}")
    assert clean("".join(shown_at))


def test_a_stage_without_bytes_shows_none() -> None:
    code = (
        "from dsbd_cli.loading.progress import TerminalProgress\n"
        "with TerminalProgress() as tell:\n    tell('timing number formats')\n    tell('reading', 5, {})"
    )
    for total, said in ((0, "5/? bytes"), (10, "5/10 bytes")):
        terminal = Terminal([sys.executable, "-c", code.format(total)], env=environment(TERM="xterm"))
        assert terminal.finish() == 0
        timing = terminal.text.partition("reading")[0]
        assert "timing number formats" in timing
        assert "bytes" not in timing
        assert said in terminal.text


def test_a_line_end_that_comes_in_two_pieces_stays_one(
    screen: None, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = output.Out()
    for piece in ("a\r", "\nb\r", "c\r", "\r\nd\r"):
        out.write(piece)
    output.Out().write("\n")
    assert capsysbinary.readouterr().out == b"a\nb\\x0dc\\x0d\nd\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["-q"], ["--no-stream"]])
def test_at_a_real_terminal(models: Models, how: list[str]) -> None:
    terminal = Terminal(program("generate", "hi", *pair(models("says", *WORDS)), "--seed", "1", *how),
                        env=environment(TERM="xterm", LANG="C.UTF-8"))  # fmt: skip
    assert terminal.finish() == 0
    assert b"\x1b]0;owned" not in terminal.output
    assert b"\x1b[31mred" not in terminal.output
    assert "\\x1b[31mred\\x1b]0;owned\\x07ok" in terminal.after_panels
