from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli import Decoder, Settings
from dsbd_cli.cli import typed
from dsbd_cli.cli.chat import Session
from dsbd_cli.decoding import Text
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
            if name in typed.UNLISTED:
                continue
            kept = settings.merged({name: typed.parse(name, typed.shown(value))})
            assert kept.to_dict()[name] == value, name
    talked = Settings(system="be brief", stop=("x",)).merged(
        {name: typed.parse(name, "none") for name in ("system", "stop")}
    )
    assert (talked.system, talked.stop) == (None, ())


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("system=Be terse.", {"system": "Be terse."}),
        ("  --system=Don't  say 'no'. ", {"system": "Don't  say 'no'."}),
        ('system="Be terse." width=2', {"system": "Be terse.", "width": 2}),
        ("width=2 'system=Be terse.' gamma=3", {"width": 2, "system": "Be terse.", "gamma": 3}),
        (r"""stop='\n "' top-p=0.5""", {"stop": (r'\n "',), "top_p": 0.5}),
        ("stop=a stop=b", {"stop": ("a", "b")}),
        ("stop=the end", {"stop": ("the end",)}),
        ("prices=/a b/c.json", {"prices": "/a b/c.json"}),
        ("system= width=2", {"system": "", "width": 2}),
        ("system=none", {"system": None}),
    ],
)
def test_values_with_spaces_can_be_given(line: str, given: dict[str, Any]) -> None:
    assert typed.read(line, Settings().to_dict()) == given


def test_a_system_turn_of_several_words_is_used(chatty: str) -> None:
    session = Session(Decoder.from_pair(chatty, chatty), Settings())
    session.take("/settings system=Be terse.")
    assert session.settings.system == "Be terse."


def test_what_a_chat_has_no_place_for_is_not_offered(dsbd: Call, chatty: str, tmp_path: Path) -> None:
    ran = dsbd("chat", *pair(chatty), stdin=b"/settings\n")
    assert (ran.code, "width = 4" in ran.err) == (0, True)
    asked = dsbd("chat", "--help").text
    assert "--width" in asked
    for name in typed.UNLISTED:
        assert f"{name} = " not in ran.err
        assert f"--{name.replace('_', '-')}" not in asked
        assert f"--{name.replace('_', '-')}" in dsbd("generate", "--help").text


def test_what_a_preset_holds_that_has_no_place_in_a_chat_yields(
    dsbd: Call, chatty: str, tmp_path: Path
) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text(f"target: {chatty}\ndraft: {chatty}\nraw: true\nnum_return: 2\nseed: 1\n")
    command = ["--max-new-tokens", "8", "-q"]
    ran = dsbd("chat", "--preset", preset, *command, stdin=b"hello\n")
    assert ran.code == 0, ran.err
    assert ran.out == dsbd("chat", *pair(chatty), "--seed", "1", *command, stdin=b"hello\n").out


def test_a_drawn_seed_is_reported(dsbd: Call, chatty: str) -> None:
    command = ["chat", *pair(chatty), "--max-new-tokens", "12"]
    ran = dsbd(*command, stdin=b"hello\n")
    seed = ran.err.rpartition(", seed ")[2].strip()
    again = dsbd(*command, "--seed", seed, stdin=b"hello\n")
    assert again.out == ran.out
    assert "seed" not in again.err
    assert "seed" not in dsbd(*command, "--temperature", "0", stdin=b"hello\n").err


class Interrupted:
    """A decoder whose answer is stopped after some words."""

    def __init__(self, *words: str) -> None:
        self.words, self.draft = words, None

    def stream(self, *_: Any, **__: Any) -> Iterator[Any]:
        for word in self.words:
            yield Text(word)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("half ", "an"), "what was said of the answer stays in the conversation, seed "),
        ((), "no part of the conversation"),
    ],
)
def test_a_stop_says_what_stays(words: tuple[str, ...], said: str) -> None:
    decoder: Any = Interrupted(*words)
    session = Session(decoder, Settings(method="beam"))
    with pytest.raises(KeyboardInterrupt):
        session.take("hello")
    assert said in session.left
    assert [message["content"] for message in session.messages] == (["hello", "half an"] if words else [])
    assert (session.seed is not None) == bool(words)
    assert session.left.endswith(f"seed {session.seed}" if words else "conversation")
    session.take("/reset")
    assert session.left == "the conversation is as it was"


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
        ("/settings raw=true", ["raw has no place in a chat"]),
        ("/settings num_return=1", ["num_return has no place in a chat"]),
        ("/settings width=2 system=Be terse.", ["no setting 'terse.'", 'system="..."']),
        ("/settings width=2 system=Don't", ["a quote is not closed", 'NAME="..."']),
        ("/settings method=beam dsbd", ["no setting 'dsbd'"]),
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
    assert terminal.until(lambda output: b"stopped; what was said" in output and output.endswith(b"> "), 60)
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
