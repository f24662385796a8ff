"""The whole command over one folder, in any order and with anything going wrong in between.

Presets, settings, prompts and stop strings are drawn, models replaced, files cut and inputs changed; runs are
killed, stopped, out of disk, or write to a pipe that nobody reads. What must hold after each: nothing that was
done is lost or changed, nothing wrong is written, every refusal is one line, and what goes through is what
an unbroken run gives.

DSBD_FUZZ=N runs N other examples, of 36 steps each.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import dsbd_cli.loading
from dsbd_cli.batch.run import MEASURED
from dsbd_cli.loading.stamp import stamps
from tests import builders
from tests.cli.faults import Commands, Ended, Fault, faults, stdout_faults

EXAMPLES = int(os.environ.get("DSBD_FUZZ", "0"))
WORDS = ("stop", "🙂", " a", "\x1b[1m")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
LONG = "q" * 150  # more than the target's context

_pairs: dict[str, Any] = {}
_models: dict[str, Path] = {}


def made() -> dict[str, Path]:
    """Two targets and two drafts, made once a process."""
    if not _models:
        base = Path(tempfile.mkdtemp(prefix="dsbd-state-"))
        size = builders.VOCAB + len(WORDS)
        for place, name in enumerate(("t1", "t2", "d1", "d2")):
            generator = builders.torch.Generator().manual_seed(place)
            table = builders.torch.rand(size, size, generator=generator) ** 8
            table[:, [1, *range(builders.VOCAB, size)]] += 3.0
            builders.markov(base / name, table / table.sum(1, keepdim=True), WORDS,
                            max_position_embeddings=120 if name[0] == "t" else 100)  # fmt: skip
            builders.tok(base / name, WORDS, chat_template=TEMPLATE)
            _models[name] = base / name
    return _models


@pytest.fixture(scope="module", autouse=True)
def models_go() -> Iterator[None]:
    yield
    for folder in {path.parent for path in _models.values()}:
        shutil.rmtree(folder, ignore_errors=True)
    _models.clear()
    _pairs.clear()


def load_pair(spec: Any, *, need_draft: bool = True, **_: Any) -> Any:
    """As the real one; the same files are loaded once."""
    key = json.dumps(stamps(spec, need_draft=need_draft and spec.draft is not None), sort_keys=True)
    if key not in _pairs:
        if len(_pairs) > 40:
            _pairs.clear()
        _pairs[key] = _load(spec, need_draft=need_draft)
    return _pairs[key]


_load = dsbd_cli.loading.load_pair


def unmeasured(line: bytes) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(line)
    # Forests made of earlier tokens follow who shares a batch, and of those a run that goes on has fewer.
    for name in (*MEASURED, "notes", "energy_source", "paths", "drafts_examined", "accepted_by_depth"):
        record.get("stats", {}).pop(name, None)
    return record


@dataclass
class Output:
    """What is known of one output file: of which run its records are, and how many there must be at least."""

    run: dict[str, Any] | None = None
    least: int = 0
    options: list[str] = field(default_factory=list)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=8)
prompts = st.one_of(texts, st.sampled_from(["", "hi", "</s>", "🙂", "stop", LONG]))
stops = st.lists(st.sampled_from(["stop", "op", "🙂", " a a", "a", "\x1b"]), max_size=2, unique=True)
good = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(["dsbd", "beam", "speculative", "specinfer", "multinomial"]),
        "width": st.integers(1, 4),
        "gamma": st.integers(0, 3),
        "verify": st.sampled_from(["cover", "paper", "continue"]),
        "threshold": st.sampled_from(["none", 0.5, 1]),
        "temperature": st.sampled_from([0, 0.5, 1]),
        "top_k": st.sampled_from([0, 1, 10]),
        "stop": stops,
        "raw": st.booleans(),
        "max_new_tokens": st.integers(0, 6),
        "early_stopping": st.sampled_from(["first", "heuristic", "never"]),
    },
)
bad = st.sampled_from(
    [{"width": 0}, {"widht": 3}, {"threshold": 0}, {"temperature": "nan"}, {"method": "greedy"}, {"top_p": 2},
     {"logit_bias": 1}, {"target": "./gone"}, {"draft": "./gone"}, {"dtype": "f8"}, {"seed": -1}]
)  # fmt: skip
chosen = st.one_of(*[good] * 8, bad)
OUTPUTS, INPUTS, PRESETS = ("o.jsonl", "p.jsonl"), ("a.txt", "b.jsonl"), ("x.yaml", "y.yaml")


class Folder(Commands, RuleBasedStateMachine):
    """One user's folder."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="dsbd-folder-"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("DSBD_CACHE", str(self.folder / "cache"))
        self.patch.setenv("HF_HUB_OFFLINE", "1")
        self.patch.setattr("dsbd_cli.loading.load_pair", load_pair)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
            self.patch.delenv(name, raising=False)
        self.outputs = {name: Output() for name in OUTPUTS}
        self.presets: dict[str, dict[str, Any]] = {}
        self.weights = {"t": "t1", "d": "d1"}

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.folder, ignore_errors=True)

    def arguments(self, options: dict[str, Any], seed: int | None, preset: str | None) -> list[str]:
        """Options as a command line; models by --target and --draft unless a preset names them."""
        found = ["--preset", str(self.folder / preset)] if preset else []
        found += [] if preset else ["--target", str(self.folder / "t"), "--draft", str(self.folder / "d")]
        for name, value in options.items():
            option = f"--{name.replace('_', '-')}"
            if name == "stop":
                found += [part for entry in value for part in (option, entry)]
            elif isinstance(value, bool):
                found += [option if value else "--chat"]
            else:
                found += [option, str(value)]
        found += ["--max-new-tokens", "5"] if "max_new_tokens" not in options and preset is None else []
        return found + (["--seed", str(seed)] if seed is not None else [])

    # What a user does to the folder.

    @initialize()
    def begin(self) -> None:
        for role, name in self.weights.items():
            shutil.copytree(made()[name], self.folder / role)
        for name in PRESETS:
            self.new_preset(name, {"width": 2}, "plain")
        (self.folder / "a.txt").write_text("hi\nstop\n\n")
        (self.folder / "b.jsonl").write_text('{"prompt": "one", "id": 7}\n{"messages": [{"role": "user", '
                                             '"content": "</s>"}]}\n')  # fmt: skip

    @rule(name=st.sampled_from(INPUTS), lines=st.lists(prompts, min_size=1, max_size=3))
    def new_input(self, name: str, lines: list[str]) -> None:
        if name.endswith(".txt"):
            text = "".join(f"{line}\n" for line in lines)
        else:
            text = "".join(
                json.dumps({"prompt": line, "id": place}) + "\n" for place, line in enumerate(lines)
            )
        (self.folder / name).write_text(text, encoding="utf-8", newline="")

    @rule(name=st.sampled_from(PRESETS), values=chosen, how=st.sampled_from(["plain", "plain", "cut", "tag"]))
    def new_preset(self, name: str, values: dict[str, Any], how: str) -> None:
        lines = [f"target: {self.folder / 't'}", f"draft: {self.folder / 'd'}", "max_new_tokens: 5"]
        values = {
            key: value for key, value in values.items() if key not in ("target", "draft", "max_new_tokens")
        }
        lines += [f"{key}: {json.dumps(value)}" for key, value in values.items()]
        if how == "tag":
            lines.append("seed: !!int 4")
        text = "\n".join(lines) + "\n"
        (self.folder / name).write_text(text[: len(text) // 2] if how == "cut" else text, encoding="utf-8")
        self.presets[name] = values if how == "plain" else {"?": 0}

    @rule(role=st.sampled_from(["t", "d"]), name=st.sampled_from(["1", "2"]), touch=st.booleans())
    def new_weights(self, role: str, name: str, touch: bool) -> None:
        if touch:
            os.utime(self.folder / role / "model.safetensors")
            return
        self.weights[role] = role + name
        shutil.copyfile(made()[role + name] / "model.safetensors", self.folder / role / "model.safetensors")

    @rule(name=st.sampled_from(OUTPUTS), count=st.integers(1, 200))
    def cut(self, name: str, count: int) -> None:
        """What a crash of the machine does: the end of the file is not there."""
        path = self.folder / name
        if path.is_file() and path.stat().st_size > count:
            os.truncate(path, path.stat().st_size - count)
            self.outputs[name].least = len(kept(path))

    @rule(name=st.sampled_from(OUTPUTS))
    def clear(self, name: str) -> None:
        for path in (self.folder / f"{name}{end}" for end in ("", ".run.json", ".early")):
            path.unlink(missing_ok=True)
        self.outputs[name] = Output()

    # What a user asks for.

    @rule(
        source=st.sampled_from(INPUTS),
        name=st.sampled_from(OUTPUTS),
        options=chosen,
        seed=st.sampled_from([1, 2, None]),
        preset=st.sampled_from([None, None, None, None, *PRESETS]),
        fault=faults,
    )
    def batch(self, source: str, name: str, options: dict[str, Any], seed: int | None, preset: str | None,
              fault: Fault) -> None:  # fmt: skip
        files = ["--input", str(self.folder / source), "--output", str(self.folder / name)]
        self.run_batch(name, ["generate", *files, *self.arguments(options, seed, preset)], fault)

    @rule(name=st.sampled_from(OUTPUTS), first=faults, then=st.lists(faults, min_size=1, max_size=3))
    def go_on(self, name: str, first: Fault, then: list[Fault]) -> None:
        """The command that an output was begun with, again and again; or a plain one."""
        files = ["--input", str(self.folder / "a.txt"), "--output", str(self.folder / name)]
        command = self.outputs[name].options or ["generate", *files, *self.arguments({}, None, None)]
        for fault in (first, *then):
            self.run_batch(name, command, fault)

    def run_batch(self, name: str, command: list[str], fault: Fault) -> None:
        known = self.outputs[name]
        before = whole_lines(self.folder / name)
        raw = (self.folder / name).read_bytes() if (self.folder / name).is_file() else b""
        had = kept(self.folder / name)
        ended = self.call(command, fault)
        after = whole_lines(self.folder / name)
        event(f"batch with {fault.kind} ended by {ended.code}")
        has = kept(self.folder / name)
        assert after[: len(before)] == before, "records were lost or changed"
        assert had.items() <= has.items(), "records before their turn were lost or changed"
        some = "prompts were refused", "prompt was refused"
        refused = ended.code == 2 and not any(one in ended.err for one in some)
        if refused:
            # At most the torn end of the last line goes.
            left = (self.folder / name).read_bytes() if (self.folder / name).is_file() else b""
            assert raw.startswith(left)
            assert len(ended.lines) == 1 + ended.err.count("dropped a torn") + ended.err.count(
                "special token"
            ), ended
            return
        if not had and (has or ended.code == 0):
            known.run, known.options = self.sidecar(name), command
        known.least = len(has)
        if after:
            self.matches(name, after, command, ended)
        if fault.kind == "none" and ended.code is not None:
            assert ended.code in (0, 2), ended
            assert len(after) == self.sidecar(name)["input"]["prompts"]
            assert not (self.folder / f"{name}.early").exists()
        if fault.kind.startswith("full") and ended.code == 1:
            assert sum("no space left for" in line and name in line for line in ended.lines) == 1, ended
        if ended.code == 130:
            assert ended.lines[-1].startswith("dsbd: stopped"), ended

    def sidecar(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"{name}.run.json").read_text())
        return found

    def matches(self, name: str, lines: list[bytes], command: list[str], ended: Ended) -> None:
        """All records are those of an unbroken run of this command, by the seed that the file has."""
        if ended.code not in (0, 2):
            return  # of one run they are all the same, which a run that goes through will show
        seed = self.sidecar(name)["seed"]
        place = command.index("--output")
        other = [*command[: place + 1], str(self.folder / "reference.jsonl"), *command[place + 2 :]]
        other += [] if "--seed" in other else ["--seed", str(seed)]
        whole = self.call(other)
        assert whole.code in (0, 2), whole
        wanted = whole_lines(self.folder / "reference.jsonl")
        for path in (self.folder / "reference.jsonl", self.folder / "reference.jsonl.run.json"):
            path.unlink()
        assert list(map(unmeasured, lines)) == list(map(unmeasured, wanted))[: len(lines)]

    @rule(
        prompt=prompts,
        options=chosen,
        preset=st.sampled_from([None, None, None, None, *PRESETS]),
        how=st.sampled_from([[], ["--no-stream"], ["--json"], ["-q"], ["--num-return", "2"], ["--stats"]]),
        trace=st.sampled_from([None, "trace", "full", "gone/trace"]),
        fault=stdout_faults,
    )
    def generate(self, prompt: str, options: dict[str, Any], preset: str | None, how: list[str], trace: str | None,
                 fault: Fault) -> None:  # fmt: skip
        command = ["generate", *self.arguments(options, 3, preset), *how]
        where = "/dev/full" if trace == "full" else str(self.folder / trace) if trace else None
        ended = self.call_stats([*command, *(["--trace", where] if where else [])], fault, prompt.encode())
        if fault.kind == "none" and ended.code == 1:
            assert trace == "full"
            assert "the answer is not touched" in ended.lines[-1]
        if ended.code in (0, 1) and fault.kind == "none":
            plain = self.call_stats(
                [*command, "--json"] if "--num-return" not in how else command, Fault(), prompt.encode()
            )
            assert plain.code == 0
            if "--json" in how:
                assert unmeasured_result(ended.out) == unmeasured_result(plain.out)
            elif "--num-return" not in how:
                text = json.loads(plain.out)["text"]
                assert ended.out.decode() == text + "\n"
                assert not any(entry in text for entry in options.get("stop", ()))
            else:
                assert ended.out == plain.out
        if fault.kind == "pipe":
            assert ended.code in (0, 1, 2)
        if fault.kind == "stdout_full" and ended.code == 1 and trace != "full":
            assert ended.lines[-1] == "dsbd: no space left for stdout: free some"
        if trace == "trace" and ended.code == 0:
            shown = self.call(["trace", str(self.folder / "trace")])
            assert (shown.code, shown.err) == (0, "")

    @rule(
        lines=st.lists(
            st.one_of(
                prompts,
                st.sampled_from(["/help", "/method beam", "/method x", "/settings width=2", "/settings width=0",
                                 "/compare", "/compare beam dsbd", "/reset", "/quit", "/x", "//"]),
            ),
            max_size=4,
        ),
        options=chosen,
        form=st.sampled_from(["chat", "lines"]),
        fault=stdout_faults,
    )  # fmt: skip
    def many(self, lines: list[str], options: dict[str, Any], form: str, fault: Fault) -> None:
        stdin = "".join(f"{line}\n" for line in lines).encode()
        command = ["chat", "-q"] if form == "chat" else ["generate", "--lines"]
        ended = self.call([*command, *self.arguments(options, 3, None)], fault, stdin)
        if form == "lines" and fault.kind == "none" and ended.out:
            answers = [json.loads(line) for line in ended.out.decode().split("\n")[:-1]]
            assert len(answers) == len(lines)
            # A line is what the batch gives for that prompt: see `batch`.
            assert (None in answers) == (ended.code == 2)

    @rule(what=st.sampled_from([*PRESETS, "trace", "a.txt", "t"]))
    def show(self, what: str) -> None:
        shown = self.call(["presets", "show", str(self.folder / what)])
        if what in self.presets and "?" not in self.presets[what] and shown.code == 0:
            again = self.folder / "again.yaml"
            again.write_bytes(shown.out)
            once_more = self.call(["presets", "show", str(again)])
            again.unlink()
            assert (once_more.code, once_more.out) == (0, shown.out)
        drawn = self.call(["trace", str(self.folder / what), "--html", str(self.folder / "page.html")])
        assert drawn.code in (0, 2)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        known = {"t", "d", "cache", "trace", "gone", "page.html", *INPUTS, *PRESETS, *OUTPUTS}
        known |= {f"{name}{end}" for name in OUTPUTS for end in (".run.json", ".early")}
        left = {path.name for path in self.folder.iterdir()} - known
        # A process that was killed cannot take its draft with it; the name says whose it was.
        assert not {name for name in left if not (name.startswith(".") and name.endswith(".tmp"))}, left

    @invariant()
    def no_record_is_lost(self) -> None:
        for name, known in self.outputs.items():
            assert len(kept(self.folder / name)) >= known.least


def whole_lines(path: Path) -> list[bytes]:
    """Complete records of an output."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n"):
            break
        found.append(line)
    return found


def kept(path: Path) -> dict[int, bytes]:
    """Complete records of an output by their index, those before their turn too."""
    early = path.with_name(f"{path.name}.early")
    return {json.loads(line)["index"]: line for line in (*whole_lines(early), *whole_lines(path))}


def unmeasured_result(out: bytes) -> dict[str, Any]:
    record = unmeasured(out)
    record["stats"].pop("kv_bytes_allocated", None)
    return record


Folder.TestCase.settings = settings(
    max_examples=EXAMPLES or 25,
    stateful_step_count=36 if EXAMPLES else 14,
    deadline=None,
    derandomize=not EXAMPLES,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestFolder = pytest.mark.slow(
    pytest.mark.skipif(not hasattr(os, "fork"), reason="kills need fork")(Folder.TestCase)
)
