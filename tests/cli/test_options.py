"""Options, prompts, templates and presets through the whole tool: what is taken, and what is one line and exit 2."""

from __future__ import annotations

import json as encoder
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from tests import builders
from tests.cli.conftest import METHODS, Call, pair

Models = Callable[..., str]


@pytest.fixture(scope="module")
def rand_pair(models: Models) -> list[str]:
    return pair(models("rand"), models("rand", seed=1))


@pytest.mark.parametrize("method", METHODS)
def test_temperature_0_is_greedy_for_every_method(
    dsbd: Call, rand_pair: list[str], method: str, tmp_path: Path
) -> None:
    preset = tmp_path / "warm.yaml"
    preset.write_text("temperature: 1\ntop_k: 0\n")

    def ids(*options: str) -> list[int]:
        command = [
            "generate",
            "hello",
            "--preset",
            str(preset),
            *rand_pair,
            "--max-new-tokens",
            "12",
            "--json",
        ]
        ran = dsbd(*command, "--method", method, *options)
        assert ran.code == 0, ran.err
        return ran.json["token_ids"]

    greedy = [
        ids("--temperature", value, "--seed", str(seed)) for value in ("0", "0.0") for seed in (1, 2, 3)
    ]
    assert all(one == greedy[0] for one in greedy)
    # One greedy text for all methods: that of the target alone.
    alone = dsbd("generate", "hello", *rand_pair, "--method", "multinomial", "--temperature", "0",
                 "--max-new-tokens", "12", "--json").json  # fmt: skip
    assert greedy[0] == alone["token_ids"]
    assert ids("--temperature", "1e-6", "--seed", "1") == greedy[0]
    assert ids("--temperature", "1e-300", "--seed", "1") == greedy[0]
    assert ids("--seed", "1") != greedy[0]
    preset.write_text("temperature: 0\n")
    assert ids("--seed", "5") == greedy[0]


@pytest.mark.parametrize("method", METHODS)
def test_the_best_token_always_survives(dsbd: Call, rand_pair: list[str], method: str) -> None:
    def ids(*options: str) -> list[int]:
        ran = dsbd("generate", "hello", *rand_pair, "--method", method, "--max-new-tokens", "10", "--seed", "3",
                   "--json", *options)  # fmt: skip
        assert ran.code == 0, ran.err
        return ran.json["token_ids"]

    greedy = ids("--temperature", "0")
    for top_p in ("0", "1e-9", "1e-3"):
        assert ids("--top-p", top_p) == greedy
        assert ids("--top-p", top_p, "--top-k", "0") == greedy
    assert ids("--top-k", "1") == greedy
    # Too large a k is no filter, and 0 is off: all the same as the whole vocabulary.
    off = ids("--top-k", "0", "--top-p", "1")
    # (Beams share one joint, so there a k of the vocabulary's size still cuts.)
    for top_k in ("1000000",) if method in ("beam", "dsbd") else ("259", "260", "1000000"):
        assert ids("--top-k", top_k, "--top-p", "1") == off
    assert len(ids("--top-k", "258", "--top-p", "1")) == 10
    for dtype in ("bfloat16",):
        narrow = ids("--dtype", dtype, "--top-p", "1e-3")
        assert narrow == ids("--dtype", dtype, "--temperature", "0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--temperature", "inf"], ["temperature"]),
        (["--temperature", "warm"], ["--temperature", "number"]),
        (["--top-p", "1.5"], ["top-p", "1.5"]),
        (["--top-p", "-0.1"], ["top-p", "-0.1"]),
        (["--top-p", "nan"], ["top-p"]),
        (["--top-k", "-1"], ["top-k", "-1"]),
        (["--top-k", "1.5"], ["top-k"]),
        (["--width", "0"], ["width"]),
        (["--draft-width", "0"], ["draft-width"]),
        (["--gamma", "-1"], ["gamma"]),
        (["--max-new-tokens", "-1"], ["max-new-tokens"]),
        (["--num-return", "5"], ["num-return", "4"]),
        (["--num-return", "2", "--method", "speculative"], ["num-return"]),
        (["--method", "greedy"], ["greedy", "dsbd, beam"]),
        (["--method", "dsdb"], ["did you mean dsbd"]),
        (["--verify", "all"], ["verify"]),
        (["--threshold", "0"], ["threshold"]),
        (["--threshold", "much"], ["threshold", "none"]),
        (["--min-width", "9"], ["min-width 9", "width 4"]),
        (["--tree", "2,0"], ["tree"]),
        (["--tree", "a"], ["tree"]),
        (["--tree", "2,2"], ["tree", "specinfer"]),
        (["--method", "specinfer", "--tree", "2,2", "--gamma", "2"], ["gamma", "tree"]),
        (["--tree-rule", "rds"], ["tree-rule", "did you mean rsd"]),
        (["--deterministic", "--temperature", "1"], ["temperature", "deterministic"]),
        (["--deterministic", "--top-k", "10"], ["top-k"]),
        (["--deterministic", "--kv", "one"], ["kv"]),
        (["--deterministic", "--threshold", "0.9"], ["threshold"]),
        (["--deterministic", "--method", "multinomial"], ["deterministic"]),
        (["--early-stopping", "true"], ["early-stopping", "first"]),
        (["--kv", "two"], ["kv"]),
        (["--seed", "-1"], ["seed"]),
        (["--stop", ""], ["stop"]),
        (["--stop", "a\ufffd"], ["stop", "U+FFFD"]),
        (["--length-penalty", "nan"], ["length-penalty"]),
        (["--repetition-penalty", "1.2"], ["repetition-penalty"]),
        (["--min-p=0.1"], ["min-p", "top-p"]),
        (["--num-beams", "4"], ["--width"]),
        (["--temperatur", "1"], ["--temperatur", "temperature"]),
        (["--device", "tpu"], ["device", "tpu"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--dtype", "int9"], ["dtype", "int9", "int8"]),
        (["--trace"], ["--trace"]),
        (["more", "words"], ["words"]),
        (["--lines"], ["PROMPT", "--lines"]),
        (["--input", "x.txt"], ["--output"]),
        (["--output", "x.jsonl"], ["--input"]),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line_and_exit_2(
    dsbd: Call, rand_pair: list[str], options: list[str], words: list[str]
) -> None:
    dsbd("generate", "hi", *rand_pair, *options).refused(*words)


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (["hi"], b"", "hi"),
        (["hi"], b"not this", "hi"),
        ([], b"hi", "hi"),
        ([], b"hi\n", "hi"),
        ([], b"hi\r\n", "hi"),
        ([], b"hi\n\n", "hi\n"),
        (["-"], b"hi\n", "hi"),
        (["--", "-5 degrees"], b"", "-5 degrees"),
        (["--", "-"], b"hi", "hi"),
        ([], "héllo 🙂\n".encode(), "héllo 🙂"),
    ],
)
def test_how_a_prompt_arrives(
    dsbd: Call, rand_pair: list[str], arguments: list[str], stdin: bytes, said: str
) -> None:
    options = ["--max-new-tokens", "1", "--show-tokens"]
    ran = dsbd("generate", *rand_pair, *options, *arguments, stdin=stdin)
    assert ran.code == 0, ran.err
    ids = " ".join(str(token) for token in builders_ids(said))
    assert f"prompt tokens: {ids}\n" in ran.err


def builders_ids(text: str) -> list[int]:
    from tokenizers import pre_tokenizers

    from tests.builders import SPECIAL

    alphabet = {
        char: len(SPECIAL) + place for place, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [alphabet[char] for piece, _ in split for char in piece]


@pytest.mark.parametrize(("arguments", "stdin"), [([""], b""), ([], b""), ([], b"\n"), (["-"], b"")])
def test_an_empty_prompt_starts_from_bos(
    dsbd: Call, models: Models, tmp_path: Path, arguments: list[str], stdin: bytes
) -> None:
    target = models("says", "A")
    ran = dsbd("generate", *pair(target), *arguments, "--show-tokens", stdin=stdin)
    assert (ran.code, ran.out) == (0, b"A\n")
    assert "prompt tokens: 0\n" in ran.err
    without = tmp_path / "t"
    shutil.copytree(target, without)
    tokenizer = builders.tok(without, ["A"])
    tokenizer.bos_token = None
    tokenizer.save_pretrained(str(without))
    dsbd("generate", *pair(str(without)), *arguments, stdin=stdin).refused("empty", "BOS")


def test_an_empty_prompt_is_refused_where_a_turn_would_ask_nothing(
    dsbd: Call, models: Models, tmp_path: Path
) -> None:
    target = pair(template_model(models, tmp_path / "t", "{{ messages[0].content }}"))
    for arguments, stdin in ([""], b""), ([" \t"], b""), ([], b""), ([], b"\n"), (["-"], b" \r\n"):
        dsbd("generate", *target, *arguments, stdin=stdin).refused("the prompt is empty", "--raw")
    assert dsbd("generate", *target, "", "--raw").out == b"A\n"
    # Line i of the output belongs to line i of the input.
    ran = dsbd("generate", *target, "--lines", stdin=b"a\n\nb\n  \n")
    assert (ran.code, ran.out) == (2, b'"A"\nnull\n"A"\nnull\n')
    assert "2 of 4 prompts were refused; line 2: the prompt is empty" in ran.err
    (tmp_path / "p.txt").write_text("a\n\n")
    ran = dsbd("generate", *target, "--input", tmp_path / "p.txt", "--output", tmp_path / "o.jsonl")
    assert ran.code == 2
    assert "1 of 2 prompts were refused; the others are done" in ran.err
    records = [encoder.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert records[0]["text"] == "A"
    assert records[1]["error"].startswith("the prompt is empty")


def test_prompts_that_are_not_text(dsbd: Call, rand_pair: list[str]) -> None:
    dsbd("generate", *rand_pair, stdin=b"caf\xe9").refused("UTF-8", "byte 3")
    dsbd("generate", *rand_pair, "caf\udce9").refused("UTF-8")


@pytest.mark.parametrize("form", ["lines", "file"])
@pytest.mark.parametrize(("prompts", "answered"), [("a\n\nb\n", 2), ("\n", 0)])
def test_a_refused_prompt_takes_no_statistics_away(
    dsbd: Call, models: Models, tmp_path: Path, form: str, prompts: str, answered: int
) -> None:
    source = tmp_path / "in.txt"
    source.write_text(prompts)
    options = [
        "generate",
        *pair(template_model(models, tmp_path / "t", "{{ messages[0].content }}")),
        "--stats",
    ]
    if form == "lines":
        ran = dsbd(*options, "--lines", stdin=prompts.encode())
    else:
        ran = dsbd(*options, "--input", source, "--output", tmp_path / "out.jsonl")
    assert ran.code == 2
    assert f"prompts                  {answered}\n" in ran.err
    assert ran.err.splitlines()[-1].startswith(f"dsbd: 1 of {answered + 1} prompt")
    assert "held no prompt" not in ran.err


def template_model(models: Models, folder: Path, template: str | None) -> str:
    """A model whose tokenizer adds BOS itself and has this chat template."""
    shutil.copytree(models("says", "A"), folder)
    tokenizer = builders.tok(folder, ["A"])
    core: Any = tokenizer._tokenizer
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mode", [[], ["--raw"]])
def test_exactly_one_bos(dsbd: Call, models: Models, tmp_path: Path, method: str, mode: list[str]) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    target = template_model(models, tmp_path / "t", template)
    for prompt in ("hi", "<s>hi"):
        ran = dsbd("generate", prompt, *pair(target), "--method", method, "--show-tokens", *mode)
        assert ran.code == 0, ran.err
        # In a turn a special word that a user types is text.
        text = "hi" if mode else prompt
        assert f"prompt tokens: 0 {' '.join(map(str, builders_ids(text)))}\n" in ran.err


def test_templates_that_are_missing_refuse_or_break(dsbd: Call, models: Models, tmp_path: Path) -> None:
    said = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    picky = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + said
    )
    refuses = "{{ raise_exception('turns must alternate') }}"
    make = lambda name, template: template_model(models, tmp_path / name, template)  # noqa: E731

    plain = make("plain", None)
    assert dsbd("generate", "hi", *pair(plain)).code == 0
    dsbd("generate", "hi", *pair(plain), "--system", "be kind").refused("chat template", "system")
    folded = dsbd("generate", "hi", *pair(make("picky", picky)), "--system", "be kind", "--show-tokens")
    assert folded.code == 0, folded.err
    assert (
        f"prompt tokens: {' '.join(map(str, builders_ids('[user]be kind' + chr(10) * 2 + 'hi')))}\n"
        in folded.err
    )
    assert "takes no system turn" in folded.err
    dsbd("generate", "hi", *pair(make("refuses", refuses))).refused("turns must alternate", "--raw")
    assert dsbd("generate", "hi", *pair(str(tmp_path / "refuses")), "--raw").code == 0
    dsbd("generate", "hi", *pair(make("broken", "{% for m in %}"))).refused("template")
    dsbd("generate", "hi", *pair(make("well", said)), "--system", "x", "--raw").refused("--system", "raw")


def test_messages_without_a_template_are_refused_by_every_command(
    dsbd: Call, models: Models, tmp_path: Path
) -> None:
    """None joins what they say, or writes their turns in a form of its own."""
    source = tmp_path / "in.jsonl"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 2
    source.write_text(encoder.dumps({"messages": turns[:3], "id": "mine", "references": ["y"]}) + "\n")
    said = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    chat, plain = (template_model(models, tmp_path / name, one) for name, one in (("c", said), ("p", None)))
    for target, options, why in (
        (chat, ["--raw"], "messages have no place in a raw prompt"),
        (plain, [], "the target has no chat template: give the prompt as text"),
    ):
        given = [*pair(target), *options]
        ran = dsbd("generate", "--input", source, "--output", tmp_path / "out.jsonl", *given)
        assert (ran.code, ran.out) == (2, b"")
        assert why in ran.err.splitlines()[-1]
        bench = ["bench", "--dataset", source, "--methods", "beam", "--out", tmp_path / "run"]
        dsbd(*bench, *given).refused(f"item mine: {why}")


@pytest.mark.parametrize("method", METHODS)
def test_target_and_draft_in_different_dtypes(
    dsbd: Call, models: Models, tmp_path: Path, method: str
) -> None:
    preset = tmp_path / "mixed.yaml"
    preset.write_text("target_dtype: float32\ndraft_dtype: bfloat16\ntarget_device: cpu\ndraft_device: cpu\n")
    ran = dsbd("generate", "hi", "--preset", preset, *pair(models("rand"), models("rand", seed=1)), "--method",
               method, "--max-new-tokens", "10", "--seed", "1", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["models"]["target"]["dtype"] == "float32"
    if ran.json["models"]["draft"] is not None:
        assert ran.json["models"]["draft"]["dtype"] == "bfloat16"


HOSTILE = "a [/INST] list[int] [red]x[/red] :smile: \x1b[2J" + "w" * 300


@pytest.mark.parametrize("method", METHODS)
def test_the_models_words_are_left_alone(
    dsbd: Call, models: Models, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    target = models("says", HOSTILE)
    for columns in ("20", "80", "1000"):
        monkeypatch.setenv("COLUMNS", columns)
        assert dsbd("generate", "hi", *pair(target), "--method", method).out == (HOSTILE + "\n").encode()
        assert dsbd("generate", "hi", *pair(target), "--method", method, "--json").json["text"] == HOSTILE
        lines = dsbd("generate", *pair(target), "--method", method, "--lines", stdin=b"a\nb\n")
        assert lines.out.count(b"\n") == 2


def test_names_of_files_are_no_markup_either(dsbd: Call, tmp_path: Path) -> None:
    preset = tmp_path / "[red]x[b].yaml"
    preset.write_text("widht: 4\n")
    dsbd("generate", "hi", "--preset", preset).refused("[red]x[b].yaml", "widht", "width")
    dsbd("generate", "hi", "--preset", tmp_path / "[x].yaml").refused("[x].yaml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'width: "4"\n', ["line 1", "width"]),
        (b"seed: 1\nwidth: 4.0\n", ["line 2", "width"]),
        (b"width: 4\nwidth: 5\n", ["line 2", "width"]),
        (b"widht: 4\n", ["line 1", "widht", "width"]),
        (b"width:\t4\n\tgamma: 2\n", ["line"]),
        (b"", ["empty"]),
        (b"- a\n- b\n", [""]),
        (b"stop: no\n", ["stop"]),
        (b"width: !!python/object/apply:os.system [id]\n", ["line 1"]),
        (b"width: 4\n---\nwidth: 5\n", [""]),
        (b"temperature: .nan\n", ["temperature"]),
        (b"top_p: 1.5\n", ["top-p"]),
        (b"method: greedy\n", ["method"]),
        (b"\xff\xfe\x00", [""]),
        (b"width: [1\n", ["line"]),
        (b"seed: 1\nkv: &a all\nverify: *b\n", ["line 3"]),
    ],
)  # fmt: skip
def test_presets_say_exactly_what_they_mean(
    dsbd: Call, models: Models, tmp_path: Path, content: bytes, words: list[str]
) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_bytes(content)
    dsbd("generate", "hi", "--preset", preset, *pair(models("says", "A"))).refused("mine.yaml", *words)


def test_numbers_that_yaml_reads_as_texts(dsbd: Call, models: Models, tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_bytes(b"\xef\xbb\xbftemperature: 1e-1\nwidth: 3\nmax_new_tokens: 5\n")
    got = dsbd("generate", "hi", "--preset", preset, *pair(models("says", "A")), "--json").json
    assert got["settings"]["temperature"] == 0.1
    assert got["settings"]["width"] == 3
    dsbd("generate", "hi", "--preset", tmp_path / "none.yaml").refused("none.yaml")
    dsbd("generate", "hi", "--preset", tmp_path).refused(str(tmp_path))
    shown = dsbd("presets", "show", preset)
    assert shown.code == 0, shown.err
    assert "temperature: 0.1" in shown.text


def test_the_command_line_beats_the_preset_and_0_and_false_are_values(
    dsbd: Call, models: Models, tmp_path: Path
) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("temperature: 1\ntop_k: 7\nraw: true\nthreshold: 0.5\nmax_new_tokens: 3\nseed: 9\n")
    base = ["generate", "hi", "--preset", preset, *pair(models("says", "A")), "--json"]
    got = dsbd(*base).json["settings"]
    assert (got["temperature"], got["top_k"], got["raw"], got["threshold"], got["seed"]) == (
        1.0,
        7,
        True,
        0.5,
        9,
    )
    given = ["--temperature", "0", "--top-k", "0", "--chat", "--threshold", "none", "--seed", "0"]
    got = dsbd(*base, *given).json["settings"]
    assert (got["temperature"], got["top_k"], got["raw"], got["threshold"], got["seed"]) == (
        0.0,
        0,
        False,
        None,
        0,
    )
    assert dsbd(*base, "--max-new-tokens", "0").json["text"] == ""


def test_the_card_that_holds_the_target_is_made_current(monkeypatch):
    """Triton launches on torch's current card: every card of a sharded run has to take the same path."""
    import torch

    from dsbd_cli.cli.options import make_current

    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    make_current(torch.device("cpu"))
    assert made == []
    make_current(torch.device("cuda", 1))
    assert made == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "hi", "--width", "four"], ["--width", "integer", "'four'"]),
        (["generate", "hi", "--temperature", "hot"], ["--temperature", "number", "'hot'"]),
        (["trace", "x", "--delay", "99"], ["--delay", "60", "'99'"]),
        (["generate", "hello", "big", "world"], ["quotes", "big world"]),
    ],
)
def test_a_usage_error_shows_what_was_given(dsbd: Call, arguments: list[str], words: list[str]) -> None:
    dsbd(*arguments).refused(*words)


def test_a_file_beside_lines_is_told_how_it_is_read(dsbd: Call, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    dsbd("generate", "--lines", prompts).refused(f"--lines < {prompts}")
    dsbd("generate", "--lines", "hello").refused("a PROMPT has no place beside --lines")
    for no_name in ("x" * 300, "x\0y"):
        dsbd("generate", "--lines", no_name).refused("a PROMPT has no place beside --lines")


def test_the_name_of_a_file_as_the_prompt_is_told(
    dsbd: Call, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.txt").write_text("hello\n")
    abc = [*pair(models("says", "A")), "--seed", "1"]
    ran = dsbd("generate", "q.txt", *abc)
    assert (ran.code, ran.text) == (0, "A\n")
    assert "dsbd: q.txt is a file, and its name is the prompt: dsbd generate < q.txt reads it\n" in ran.err
    for prompt in ("q", ".", "x" * 300):
        assert "is a file" not in dsbd("generate", prompt, *abc).err


def test_fewer_beams_than_asked_for_are_told(dsbd: Call, models: Models) -> None:
    sure = pair(models("says", "A"))
    command = ["generate", "hi", *sure, "--method", "beam", "--seed", "1", "--max-new-tokens", "4"]
    ran = dsbd(*command, "--num-return", "3")
    assert ran.text == '"A"\n'
    assert "--num-return 3: only 1 beam is distinct (--draws distinct keeps more apart)\n" in ran.err
    ran = dsbd(*command, "--num-return", "3", "--draws", "distinct", "--top-p", "0.5")
    assert "--num-return 3: only 1 beam is distinct (top-k and top-p kept no more)\n" in ran.err
    assert "distinct" not in dsbd(*command, "--num-return", "1").err


@pytest.mark.parametrize("json_form", [False, True])
@pytest.mark.parametrize("form", ["one", "lines", "batch 1", "file"])
def test_every_form_tells_fewer_beams_alike(
    dsbd: Call, models: Models, tmp_path: Path, form: str, json_form: bool
) -> None:
    """On stderr, of many prompts once with the first and then their number; and in each one's JSON."""
    few = "--num-return 3: only 1 beam is distinct (--draws distinct keeps more apart)"
    command = ["generate", *pair(models("says", "A")), "--method", "beam", "--seed", "1", "--max-new-tokens", "4",
               "--num-return", "3", *(["--json"] if json_form else [])]  # fmt: skip
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("hi\nho\n")
    if form == "one":
        ran = dsbd(*command, "hi")
        assert ran.err.splitlines().count(f"dsbd: {few}") == 1
    elif form == "file":
        ran = dsbd(*command, "--input", source, "--output", output)
    else:
        ran = dsbd(*command, "--lines", *(["--batch", "1"] if form == "batch 1" else []), stdin=b"hi\nho\n")
    assert ran.code == 0
    if form != "one":
        assert [line for line in ran.err.splitlines() if few in line] == [
            f"dsbd: line 1: {few}",
            f"dsbd: 2 prompts: {few}",
        ]
    text = output.read_text() if form == "file" else ran.text
    if json_form or form == "file":
        records = [encoder.loads(line) for line in text.splitlines()]
        assert [record["notes"] for record in records] == [[few]] * (1 if form == "one" else 2)


def test_notes_of_a_prompt_are_in_its_json(dsbd: Call, models: Models) -> None:
    command = ["generate", "--raw", *pair(models("says", "A")), "--seed", "1", "--json"]
    ran = dsbd(*command, "")
    assert ran.json["notes"] == ["the prompt is empty: the target starts from its BOS token"]
    assert ran.json["notes"][0] in ran.err
    assert "notes" not in dsbd(*command, "hi").json


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["tune"], ["generate", "--lines"]])
def test_a_target_that_is_not_there_is_told_before_a_draft_that_was_not_given(
    dsbd: Call, models: Models, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dsbd(*command, "--target", "nosuch/x").refused("target nosuch/x", "not in the local cache")
    dsbd(*command, "--target", "./nosuch").refused("target ./nosuch: no such folder")
    dsbd(*command, "--target", models("rand")).refused("needs a draft model")

    def unknown(*_: Any, **__: Any) -> None:
        from huggingface_hub.errors import RepositoryNotFoundError

        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unknown)
    dsbd(*command, "--target", "nosuch/x").refused("target nosuch/x", "no", "the hub shows you")


def test_answers_that_did_not_end_by_themselves_are_told_beside_a_plain_stdout(
    dsbd: Call, models: Models
) -> None:
    cut = ["--max-new-tokens", "4", "--seed", "1"]
    told = "the answer is unfinished: cut at max-new-tokens 4"
    for command in (["generate", "hi"], ["generate", "hi", "--no-stream"]):
        ran = dsbd(*command, *pair(models("rand", seed=1)), *cut)
        assert told in ran.err.splitlines()[-1]
        assert told not in ran.text
        assert told not in dsbd(*command, *pair(models("rand", seed=1)), *cut, "--json").err
        assert not dsbd(*command, *pair(models("rand", seed=1)), *cut, "-q").err
        assert "unfinished" not in dsbd(*command, *pair(models("says", "A")), *cut).err
    # As many beams as the record calls unfinished, by their places on stdout.
    several = [
        "generate",
        "hi",
        *pair(models("rand", seed=1)),
        *cut,
        "--num-return",
        "3",
        "--temperature",
        "3",
    ]
    ran, record = dsbd(*several), dsbd(*several, "--json").json
    assert [encoder.loads(line) for line in ran.text.splitlines()] == [one["text"] for one in record["beams"]]
    assert [(one["finished"], one["finish_reason"]) for one in record["beams"]] == [(False, "length")] * 3
    assert "all 3 beams are unfinished: cut at max-new-tokens 4" in ran.err
    ended = dsbd("generate", "hi", *pair(models("says", "A")), *cut, "--json").json["beams"]
    assert [(one["finished"], one["finish_reason"]) for one in ended] == [(True, "eos")]


def test_statistics_are_words_and_numbers(dsbd: Call, rand_pair: list[str]) -> None:
    command = ["generate", "hi", *rand_pair, "--seed", "1", "--max-new-tokens", "6", "--stats"]
    for more in (["--forest", "full"], ["--gamma", "0"]):
        told = dsbd(*command, *more).err
        assert not set("[]{}") & set(told), told
        (engine,) = (line for line in told.splitlines() if line.startswith("engine"))
        assert engine.count("that is for GPUs") == 1, engine
        (depths,) = (line.split()[1:] for line in told.splitlines() if line.startswith("accepted_by_depth"))
        assert all("/" in one for one in depths)
