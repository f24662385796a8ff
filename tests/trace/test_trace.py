from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.tree import Tree

from dsbd_cli.decoding.tree.events import Event, Finished
from dsbd_cli.errors import UserError
from dsbd_cli.settings import Settings
from dsbd_cli.trace.layout import ROW, STEP, place_nodes
from dsbd_cli.trace.page import page
from dsbd_cli.trace.read import DEAD, MEANING, REJECTED, UNREACHED, Trace, fate, read_trace
from dsbd_cli.trace.record import record
from dsbd_cli.trace.replay import head, tail, trees
from tests.ui.fake import FakeDecoder, stream

SETTINGS: dict[str, dict[str, Any]] = {
    "cover": {"verify": "cover", "draft_width": 6, "forest": "full"},
    "paper": {"verify": "paper", "draft_width": 6, "forest": "full"},
    "continue": {"verify": "continue", "threshold": None, "forest": "full"},
    "specinfer": {"method": "specinfer", "tree": (3, 2, 1)},
    "spectr": {"method": "specinfer", "tree": (3, 2, 1), "tree_rule": "spectr"},
    "rsd": {"method": "specinfer", "tree": (3, 2, 1), "tree_rule": "rsd"},
    "speculative": {"method": "speculative", "forest": "full"},
    "beam": {"method": "beam"},
    "multinomial": {"method": "multinomial"},
    "deterministic": {"deterministic": True, "forest": "full"},
    "lookup": {"verify": "cover", "lookup": 4, "forest": "full"},
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trace]:
    """Real runs of a peaked target and a draft that is sometimes wrong, by name of the settings."""
    import torch

    from dsbd_cli import Decoder
    from tests import builders

    base = tmp_path_factory.mktemp("trace")
    torch.manual_seed(0)
    letters = torch.arange(builders.VOCAB, builders.VOCAB + 8)
    for name, noise in (("t", 0.0), ("d", 0.6)):
        torch.manual_seed(1)
        law = torch.rand(8, 8) ** 4
        law = law + noise * torch.rand(8, 8)
        table = torch.zeros(builders.VOCAB + 8, builders.VOCAB + 8)
        table[:, letters] = law[0] / law[0].sum()
        table[letters[:, None], letters] = law / law.sum(1, keepdim=True)
        builders.markov(base / name, table, [f"<{i}>" for i in range(8)])
    decoder = Decoder.from_pair(base / "t", base / "d")
    made: dict[str, Trace] = {}

    def get(name: str) -> Trace:
        if name not in made:
            settings = Settings(**SETTINGS[name], seed=4, max_new_tokens=40)
            decoder.settings = settings
            path = base / f"{name}.jsonl"
            with record(decoder.stream("hi", settings), path, decoder, "hi") as events:
                for _ in events:
                    pass
            made[name] = read_trace(path)
        return made[name]

    return get


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_written_adds_up_to_the_statistics(traced: Callable[[str], Trace], name: str) -> None:
    trace = traced(name)
    assert trace.result is not None
    stats = trace.result["stats"]
    nodes = [node for iteration in trace.iterations for node in iteration["nodes"]]
    layers = [layer for iteration in trace.iterations for layer in iteration["layers"]]
    assert [layer["width"] for layer in layers] == stats["widths"]
    assert [layer["distinct"] for layer in layers] == stats["distinct_widths"]
    assert sum(node["accepted"] + node["filled"] for node in nodes) == sum(stats["widths"])
    if name not in ("cover", "deterministic", "lookup"):
        assert sum(node["accepted"] for node in nodes) == stats["drafts_accepted"]
        assert sum(node["rejected"] for node in nodes) == stats["drafts_examined"] - stats["drafts_accepted"]
    if name not in ("beam", "multinomial"):
        assert stats["drafts_accepted"] > 0
        assert any(node["rejected"] for node in nodes)
        copied = [node for node in nodes if node["drafted"] and node["q"] is None]
        assert bool(copied) == (name == "lookup")
        assert all(0 < node["q"] <= 1 for node in nodes if node["drafted"] and node not in copied)
    assert all(node["drafted"] or node["filled"] for node in nodes)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_answer_can_be_followed_through_the_nodes(traced: Callable[[str], Trace], name: str) -> None:
    trace = traced(name)
    assert trace.result is not None
    committed = {
        (node["parent"], node["token"]): node
        for iteration in trace.iterations
        for node in iteration["nodes"]
        if node["accepted"] or node["filled"]
    }
    at, logprob = trace.iterations[0]["beams"][0]["id"], 0.0
    ids = trace.result["token_ids"]
    # Hugging Face's beam search keeps finished sequences apart from its layers of running ones.
    for token in ids:
        node = committed[at, token]
        at, logprob = node["id"], logprob + node["logp"]
    if node["depth"] < len(ids):
        return
    assert logprob == pytest.approx(trace.result["beams"][0]["logprob"], abs=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_iteration_is_a_forest_on_its_beams(traced: Callable[[str], Trace], name: str) -> None:
    for iteration in traced(name).iterations:
        known = {beam["id"] for beam in iteration["beams"]}
        for node in iteration["nodes"]:
            assert node["parent"] in known
            known.add(node["id"])
            assert fate(node, iteration) in MEANING
        places, width, height = place_nodes(iteration)
        assert len(places) == len(known)
        spots = [(place.x, place.y) for place in places.values()]
        assert len(set(spots)) == len(spots)
        assert max(x for x, _ in spots) < width
        assert max(y for _, y in spots) < height
        assert all((place.y - 18) % ROW == 0 and (place.x - 1) % STEP == 0 for place in places.values())


@pytest.mark.parametrize("name", SETTINGS)
def test_replay_and_page_show_runs_of_every_kind(traced: Callable[[str], Trace], name: str) -> None:
    """What was proposed without the draft has no chance under it, and says so."""
    trace = traced(name)
    labels = [str(branch.label) for tree in trees(trace) for branch in _branches(tree)]
    nodes = [node for iteration in trace.iterations for node in iteration["nodes"]]
    beams = [beam for iteration in trace.iterations for beam in iteration["beams"]]
    assert len(labels) == len(nodes) + len(beams)
    copied = sum(node["drafted"] > 0 and node["q"] is None for node in nodes)
    assert sum("  copied" in label for label in labels) == copied
    assert "copied: " in head(trace).plain
    document = page(trace)
    assert document.count("copied") == 1 + 2 * copied  # the legend; below the box, and in its title
    assert "; </title>" not in document


def _branches(tree: Tree) -> Iterator[Tree]:
    for child in tree.children:
        yield child
        yield from _branches(child)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cover", "dsbd cover W 4 W_S 6 gamma 4"),
        ("specinfer", "specinfer 3,2,1 multi-step sampling"),
        ("spectr", "specinfer 3,2,1 k-sequential (SpecTr)"),
        ("rsd", "specinfer 3,2,1 without replacement (RSD)"),
    ],
)
def test_replay_and_page_say_by_which_rule(traced: Callable[[str], Trace], name: str, words: str) -> None:
    trace = traced(name)
    assert words in head(trace).plain
    assert f"by {words}</span>" in page(trace)
    # A record of before there was a choice.
    settings = {key: value for key, value in trace.start["settings"].items() if key != "tree_rule"}
    older = head(Trace(trace.start | {"settings": settings})).plain
    assert ("multi-step" in older) == (settings["method"] == "specinfer")


def test_fates_of_a_small_forest() -> None:
    def node(
        number: int, parent: int, depth: int, accepted: int = 0, rejected: int = 0, filled: int = 0
    ) -> dict:  # type: ignore[type-arg]
        return {"id": number, "parent": parent, "depth": depth, "accepted": accepted, "rejected": rejected,
                "filled": filled}  # fmt: skip

    nodes = [node(1, 0, 1, accepted=1), node(2, 0, 1, rejected=1), node(3, 0, 1), node(4, 0, 1, filled=2),
             node(5, 2, 2), node(6, 1, 2)]  # fmt: skip
    iteration = {"beams": [{"id": 0, "depth": 0}], "nodes": nodes, "layers": [{}]}
    assert [fate(entry, iteration) for entry in nodes] == [
        "accepted", REJECTED, UNREACHED, "filled", DEAD, UNREACHED,
    ]  # fmt: skip


class Outline(HTMLParser):
    """Tags that do not close, text, and everything that points somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags, self.links = "", [], []  # type: ignore[var-annotated]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose prompt and words are markup, colours and control codes."""
    decoder = FakeDecoder(Settings(verify="paper"))
    original = decoder.detokenize
    decoder.detokenize = lambda ids: original(ids).replace("town", "</script><b onclick=x>&amp;")  # type: ignore[method-assign]
    path = tmp_path / "trace.jsonl"
    with record(stream(decoder, 40), path, decoder, "<img src=http://x> [red]") as events:  # type: ignore[arg-type]
        assert isinstance(list(events)[-1], Finished)
    return path


def test_the_page_is_self_contained_and_words_stay_words(hostile: Path) -> None:
    outline = Outline()
    text = page(read_trace(hostile))
    outline.feed(text)
    assert not {"script", "img", "b", "link", "iframe"} & set(outline.tags)
    assert all(link.startswith("#iteration-") for link in outline.links)
    assert not re.search(r"(https?:)?//(?!x>)", text.replace("&lt;img src=http://x&gt;", ""))
    for word in ("<img src=http://x> [red]", "</script>", "layer 1", "Iteration 1"):
        assert word in outline.words
    assert "\x1b" not in text
    assert outline.tags.count("svg") == outline.tags.count("section") == len(read_trace(hostile).iterations)


def test_replay_shows_every_node_once(hostile: Path) -> None:
    import io

    from rich.console import Console

    trace = read_trace(hostile)
    console = Console(file=io.StringIO(), width=200, highlight=False, markup=False, emoji=False)
    console.print(head(trace), *trees(trace), tail(trace))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "<img src=http://x> [red]" in shown
    assert "\x1b" not in shown
    assert len(re.findall(r"^[│ ]*[├└]── [+*x.-] ", shown, re.MULTILINE)) == sum(
        len(iteration["nodes"]) for iteration in trace.iterations
    )
    ascii_only = Console(file=io.StringIO(), width=200)
    ascii_only.print(head(trace, unicode=False))
    assert ascii_only.file.getvalue().isascii()  # type: ignore[attr-defined]


def test_a_run_that_did_not_end(hostile: Path) -> None:
    lines = hostile.read_text().splitlines(keepends=True)
    hostile.write_text("".join(lines[:-1]) + lines[-1][:50])
    trace = read_trace(hostile)
    assert trace.torn
    assert trace.result is None
    assert "did not end" in tail(trace).plain
    assert "did not end" in page(trace)


@pytest.mark.parametrize("content", ["", "{}\n", "[1]\n", "hello\n", '{"type": "finished"}\n', '{"type": "notice"}\n',
                                     '{"type": "start", "format": 99}\n'])  # fmt: skip
def test_files_that_are_no_trace(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(UserError):
        read_trace(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none"):
        read_trace(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        read_trace(tmp_path / "binary")
    events: list[Event] = []
    with (
        pytest.raises(UserError, match="--trace"),
        record(events, tmp_path / "binary" / "file", FakeDecoder(), "x"),  # type: ignore[arg-type]
    ):
        pass


def test_every_line_is_on_disk_as_it_happens(tmp_path: Path) -> None:
    decoder = FakeDecoder()
    path = tmp_path / "t.jsonl"
    with record(stream(decoder, 40), path, decoder, "x") as events:  # type: ignore[arg-type]
        seen = 0
        for event in events:
            seen += type(event).__name__ in ("Prefilled", "Iteration", "Notice", "Finished")
            lines = path.read_text().splitlines()
            assert len(lines) == seen
            assert all(json.loads(line) for line in lines)


def test_one_layer_is_not_layers(traced: Callable[[str], Trace]) -> None:
    heads = [str(tree.label) for tree in trees(traced("beam"))]
    assert heads
    assert all(": 1 layer, width" in head for head in heads)
