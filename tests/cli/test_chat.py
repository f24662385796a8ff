from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli import Decoder, Settings
from dsbd_cli.cli import chat
from dsbd_cli.cli.chat import Session
from dsbd_cli.ui import look
from tests import builders
from tests.cli.conftest import Call, environment, pair, program
from tests.terminal import Terminal

Models = Callable[..., str]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a chat template that answers with a few words of its own, then ends."""
    folder = tmp_path_factory.mktemp("chatty")
    torch.manual_seed(0)
    words = [f"<{i}>" for i in range(6)]
    table = torch.zeros(builders.VOCAB + 6, builders.VOCAB + 6)
    table[:, builders.VOCAB :] = torch.rand(builders.VOCAB + 6, 6) / 6
    table[builders.VOCAB :, 1] = 0.15
    builders.markov(folder, table / table.sum(1, keepdim=True), words)
    tokenizer = builders.tok(folder, words)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def answers(text: str) -> list[str]:
    return text.splitlines()


def test_turns_commands_and_numbers(dsbd: Call, chatty: str) -> None:
    script = (
        b"hello\n\n/method beam\nagain\n/settings width=2 temperature=0.5\n"
        b"/compare dsbd multinomial\n/quit\nnever\n"
    )
    ran = dsbd("chat", *pair(chatty), "--seed", "1", "--max-new-tokens", "12", stdin=script)
    assert ran.code == 0, ran.err
    lines = answers(ran.text)
    assert len(lines) == 6
    assert (lines[2], lines[4]) == ("[dsbd]", "[multinomial]")
    assert all(line.startswith("<") for place, line in enumerate(lines) if place not in (2, 4))
    for said in ("method beam", "width = 2", "temperature = 0.5", "layers/target call", "dsbd: dsbd: ",
                 "dsbd: multinomial: "):  # fmt: skip
        assert said in ran.err


def test_settings_are_shown_as_they_can_be_typed() -> None:
    for settings in (
        Settings(),
        Settings(method="specinfer", tree=(2, 1), stop=("x",), deterministic=False, seed=3),
    ):
        for name, value in settings.to_dict().items():
            kept = settings.merged({name: chat._parse(name, chat._shown(value))})
            assert kept.to_dict()[name] == value, name
    talked = Settings(system="be brief", stop=("x",)).merged(
        {name: chat._parse(name, "none") for name in ("system", "stop")}
    )
    assert (talked.system, talked.stop) == (None, ())


@pytest.mark.parametrize("columns", [40, None])
def test_help_hangs_beside_its_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int | None
) -> None:
    monkeypatch.setattr(look, "columns_of", lambda stream: columns)
    Session(None, Settings()).take("/help")  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(("/", " " * 24)) and line[24] != " " for line in lines)
    assert max(map(len, lines)) <= 40 if columns else len(lines) == 5


def test_a_turn_is_the_same_as_the_conversation_given_to_generate(chatty: str) -> None:
    decoder = Decoder.from_pair(chatty, chatty, settings=Settings(seed=3, max_new_tokens=12))
    for method in ("dsbd", "speculative", "beam"):
        session = Session(decoder, Settings(seed=3, max_new_tokens=12, method=method), quiet=True)
        fresh = Decoder.from_pair(chatty, chatty)
        for turn in ("one", "two", "three"):
            session.take(turn)
            expected = fresh.generate(session.messages[:-1], session.settings)
            assert session.messages[-1] == {"role": "assistant", "content": expected.text}
        assert [message["role"] for message in session.messages] == ["user", "assistant"] * 3


def test_history_stays_in_the_caches(chatty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn computes its own words, not those of the first turn nor the answer to it."""
    for settings in (Settings(seed=3, max_new_tokens=12), Settings(seed=1, max_new_tokens=12, method="beam"),
                     Settings(seed=3, max_new_tokens=12, deterministic=True)):  # fmt: skip
        decoder = Decoder.from_pair(chatty, chatty)
        begins: list[int] = []
        plan: Any = decoder.target.tree.prompt_plan

        def spy(begin: int, end: int, plan: Any = plan, begins: list[int] = begins) -> Any:
            begins.append(begin)
            return plan(begin, end)

        monkeypatch.setattr(decoder.target.tree, "prompt_plan", spy)
        session = Session(decoder, settings, quiet=True)
        session.take("one")
        assert session.last is not None
        first = session.last
        known = first.stats.prompt_tokens + first.stats.new_tokens - (first.finish_reason == "eos")
        begins.clear()
        session.take("two")
        # The answer's last word was drawn, but never an input of the model.
        assert begins[0] >= known - 1
        begins.clear()
        session.take("/reset")
        session.take("something else")
        assert begins[0] <= len("[user]")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/metod beam", ["/metod", "/method"]),
        ("/method", ["/method NAME"]),
        ("/method greedy", ["greedy"]),
        ("/settings widht=3", ["widht", "width"]),
        ("/settings width", ["width needs a value", "/settings width=VALUE", "it is 4"]),
        ("/settings --seed", ["seed needs a value", "/settings seed=VALUE"]),
        ("/settings width=many", ["width"]),
        ("/settings raw=true", ["raw"]),
        ("/settings top_p=2", ["top-p"]),
        ("/compare", ["none yet"]),
        ("/compare a b", ["/compare"]),
    ],
)
def test_wrong_commands_are_one_line(dsbd: Call, chatty: str, line: str, words: list[str]) -> None:
    dsbd("chat", *pair(chatty), stdin=line.encode() + b"\n").refused("line 1: ", *words)


def test_in_a_pipe_as_at_a_terminal_a_wrong_line_is_told_and_the_chat_goes_on(
    dsbd: Call, chatty: str
) -> None:
    command = ["chat", *pair(chatty), "--seed", "1", "--max-new-tokens", "8", "-q"]
    right = dsbd(*command, stdin=b"hello\nagain\n")
    script = b"/foo\nhello\n\ncaf\xe9\n/settings widht=3\nagain\n/quit\n/bar\n"
    ran = dsbd(*command, stdin=script)
    assert (right.code, ran.code, ran.out) == (0, 2, right.out)
    said = ran.err.splitlines()
    assert [line.partition(": ")[2].partition(":")[0] for line in said] == ["line 1", "line 4", "line 5"]
    for line, word in zip(said, ("/foo", "not UTF-8", "widht"), strict=True):
        assert word in line


def test_models_and_options_that_cannot_chat(dsbd: Call, models: Models, chatty: str) -> None:
    dsbd("chat", *pair(models("says", "A")), stdin=b"hi\n").refused("chat template")
    dsbd("chat", *pair(chatty), "--raw").refused("--raw")
    dsbd("chat", *pair(chatty), "--num-return", "2").refused("--num-return")
    assert dsbd("chat", *pair(chatty)).code == 0
    dsbd("chat", "--target", chatty, "--method", "beam", stdin=b"/method dsbd\n").refused("draft")


def test_a_draft_is_there_for_methods_chosen_later(dsbd: Call, chatty: str) -> None:
    ran = dsbd("chat", *pair(chatty), "--method", "beam", "--seed", "1", "-q", stdin=b"/method dsbd\nhi\n")
    assert ran.code == 0, ran.err


def test_no_room_left_is_told_and_leaves_the_conversation(chatty: str) -> None:
    decoder = Decoder.from_pair(chatty, chatty)
    decoder.target.max_positions = 40
    session = Session(decoder, Settings(seed=3, max_new_tokens=4), quiet=True)
    session.take("one")
    before = list(session.messages)
    with pytest.raises(Exception, match="no room"):
        session.take("x" * 60)
    assert session.messages == before


@pytest.mark.slow
def test_at_a_terminal(chatty: str, tmp_path: Path) -> None:
    terminal = Terminal(program("chat", *pair(chatty), "--seed", "1", "--max-new-tokens", "8"),
                        env=environment(TERM="xterm", HOME=str(tmp_path)))  # fmt: skip
    assert terminal.until(lambda output: output.endswith(b"> "), 120)
    terminal.send(b"hello\r")
    assert terminal.until(lambda output: b"tok/s" in output and output.endswith(b"> "), 60)
    terminal.send(b"/nope\r")
    assert terminal.until(lambda output: b"no command" in output and output.endswith(b"> "), 60)
    terminal.send(b"/compare\r")
    assert terminal.until(lambda output: "┌".encode() in output and output.endswith(b"> "), 60)
    mark = len(terminal.output)
    # A terminal drops what is under way when Ctrl-C comes, at times the new prompt too: press it again.
    assert any(
        terminal.send(b"half a line\x03")
        or terminal.until(lambda output: output[mark:].endswith(b"\n> "), 12)
        for _ in range(5)
    )
    terminal.send(b"\x04")
    code = terminal.finish()
    assert code == 0, terminal.text
    assert "Traceback" not in terminal.text


@pytest.mark.slow
def test_ctrl_c_stops_the_turn_only(tmp_path: Path) -> None:
    table = builders.torch.zeros(builders.VOCAB + 2, builders.VOCAB + 2)
    table[:, builders.VOCAB] = table[:, builders.VOCAB + 1] = 0.5
    builders.markov(tmp_path, table, ["so ", "on "], max_position_embeddings=1_000_000)
    tokenizer = builders.tok(tmp_path, ["so ", "on "])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(tmp_path))
    command = program("chat", *pair(str(tmp_path)), "--max-new-tokens", "100000", "--method", "multinomial")
    terminal = Terminal(command, env=environment(TERM="xterm", HOME=str(tmp_path)))
    assert terminal.until(lambda output: output.endswith(b"> "), 120)
    terminal.send(b"hello\r")
    assert terminal.until(lambda output: b"so on" in output or b"on so" in output, 60)
    terminal.send(b"\x03")
    assert terminal.until(lambda output: b"stopped" in output and output.endswith(b"> "), 60)
    terminal.send(b"/quit\r")
    assert terminal.finish() == 0
    assert "Traceback" not in terminal.text


def test_settings_without_effect_are_noted(dsbd: Call, chatty: str) -> None:
    lines = b"/method beam\n/settings gamma=2\n/settings width=3\n"
    ran = dsbd("chat", *pair(chatty), "--min-width", "1", stdin=lines)
    assert ran.code == 0, ran.err
    said = [line for line in ran.err.splitlines() if "no effect" in line]
    assert said == [
        "dsbd: min-width has no effect without a threshold",
        "dsbd: gamma has no effect with method beam",
    ]
