from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from dsbd_cli.decoding.tree.events import Finished
from dsbd_cli.settings import Settings
from dsbd_cli.ui.frame import frame, kilo
from dsbd_cli.ui.monitor import Monitor
from dsbd_cli.ui.snapshot import LiveBeam, Snapshot
from tests.ui.fake import FakeDecoder, stream


@pytest.fixture(scope="module")
def shot() -> Snapshot:
    decoder = FakeDecoder()
    monitor = Monitor(decoder, "Tell me [bold]about[/bold] rivers.\n")  # type: ignore[arg-type]
    for event in stream(decoder, 60):
        if isinstance(event, Finished) or monitor.tokens > 40:
            break
        monitor.see(event)
    return monitor.snapshot()


def draw(shot: Snapshot, width: int, height: int, unicode: bool = True, **console: object) -> str:
    options = {"force_terminal": True, "color_system": "256"} | console
    screen = Console(file=io.StringIO(), width=width, height=height, **options)  # type: ignore[arg-type]
    screen.print(frame(shot, screen, width, height, unicode), end="")
    return screen.file.getvalue()  # type: ignore[attr-defined]


def plain(picture: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", picture).rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [20, 40, 56, 60, 100, 200])
@pytest.mark.parametrize("height", [6, 10, 24, 30, 60])
def test_the_picture_fills_the_terminal_and_never_more(shot: Snapshot, width: int, height: int) -> None:
    for what in (shot, Snapshot()):
        lines = plain(draw(what, width, height))
        assert len(lines) == height
        assert max(cell_len(line) for line in lines) <= width


@pytest.mark.parametrize("width", [60, 100, 200])
def test_all_numbers_are_shown(shot: Snapshot, width: int) -> None:
    text = "\n".join(plain(draw(shot, width, 30)))
    for word in ("answer", "live beams", "acceptance", "beam width", "drawn", "distinct", "layer 1", "layer 3",
                 "tok/s", "layers/call", "KV 214", "W_L = 4", "Big-135M", "dsbd", "(30 tokens)",
                 "n/a J/token"):  # fmt: skip
        assert word in text, word


def test_words_of_the_model_are_neither_markup_nor_control_codes(shot: Snapshot) -> None:
    hostile = Snapshot(
        models="[red]m[/red]", prompt="[/INST]", confirmed="[/INST] list[int] [red]x[/red] :smile: \x1b[2J",
        contested="\x07[link=x]", beams=[LiveBeam(1.0, "[b]\x1b]0;t\x07")], notes=["[x].yaml"],
    )  # fmt: skip
    text = "\n".join(plain(draw(hostile, 100, 24)))
    for word in ("[/INST] list[int] [red]x[/red] :smile: \\x1b[2J\\x07[link=x]", "[red]m[/red]",
                 "[b]\\x1b]0;t\\x07", "[x].yaml"):  # fmt: skip
        assert word in text
    assert "\x07" not in text
    assert "\x1b" not in text


def test_contested_text_is_dim_and_confirmed_text_plain() -> None:
    picture = draw(Snapshot(confirmed="sure ", contested="maybe"), 40, 10)
    assert "sure \x1b[2mmaybe" in picture


def test_ascii_terminals_get_ascii(shot: Snapshot) -> None:
    assert draw(shot, 100, 30, unicode=False).isascii()
    assert not draw(shot, 100, 30).isascii()


def test_no_colour_keeps_dim_but_has_no_colour(shot: Snapshot) -> None:
    codes = set(re.findall(r"\x1b\[([0-9;]*)m", draw(shot, 100, 30, no_color=True)))
    assert codes <= {"", "0", "1", "2"}
    assert "2" in codes


def test_sixteen_colours_suffice(shot: Snapshot) -> None:
    codes = set(re.findall(r"\x1b\[([0-9;]*)m", draw(shot, 100, 30, color_system="standard")))
    assert not any(code.startswith("38") for code in codes)


def test_a_long_answer_shows_its_end() -> None:
    text = "\n".join(plain(draw(Snapshot(confirmed="one " * 5000 + "\nand the end"), 60, 24)))
    assert "and the end" in text
    assert len(plain(draw(Snapshot(confirmed="w" * 60_000 + "END"), 60, 24))) == 24
    assert "END" in "".join(plain(draw(Snapshot(confirmed="w" * 60_000 + "END"), 60, 24)))


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "n/a B"), (999, "999 B"), (12_345_678, "12.3 MB"), (10**15, "1000.0 TB")]
)
def test_kilo(value: int | None, expected: str) -> None:
    assert kilo(value, "B") == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            Settings(),
            "on this machine drafting is expected to cost more time than it saves (--forest full",
        ),
        (Settings(gamma=0), "gamma 0 drafts nothing"),
        (Settings(method="beam"), "method beam drafts nothing"),
    ],
)
@pytest.mark.parametrize("width", [40, 80, 120])
def test_why_nothing_is_drafted_is_said_while_it_is_so(settings: Settings, words: str, width: int) -> None:
    monitor = Monitor(FakeDecoder(settings), "hi")  # type: ignore[arg-type]
    for event in stream(FakeDecoder(Settings(gamma=0)), 12):
        if not isinstance(event, Finished):
            monitor.see(event)
    lines = plain(draw(monitor.snapshot(), width, 40))
    # The words stand in the left half, over some rows.
    left = " ".join(line[: width // 2].strip() if width >= 56 else line.strip() for line in lines)
    assert words in " ".join(left.split())


@pytest.mark.parametrize("unicode", [True, False])
def test_what_is_cut_says_so(unicode: bool) -> None:
    shot = Snapshot(
        models="A-long-target-1.7B + a-draft", method="dsbd cover, width 4, gamma 4", notes=["no " * 40]
    )
    for width in (50, 40, 20):
        lines = plain(draw(shot, width, 20, unicode))
        end = "…" if unicode else "..."
        assert lines[0].endswith(end)
        assert next(line for line in lines if line.startswith("!")).endswith(end)
    assert plain(draw(shot, 80, 20, unicode))[0].endswith("gamma 4")
