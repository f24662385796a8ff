"""A draft that proposes the first ids alone: the same law and, where draws do not decide, the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import HfTreeModel, Node
from dsbd_cli.decoding.forward.whole import WholeForward
from dsbd_cli.decoding.law.distribution import LogitsProcessor
from dsbd_cli.loading import PairSpec, load_pair
from dsbd_cli.loading.ready import pair as ready
from dsbd_cli.loading.vocabulary import choose, narrowed
from dsbd_cli.settings import Settings
from tests import builders

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
IDS = [5, 9, 17, 40]
SOME = np.array([*range(0, 120, 2), 130, 201, 250, 258])


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairSpec:
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DSBD_PRICES", "off")
    builders.rand(tmp_path / "target", **SIZES)
    builders.rand(tmp_path / "draft", seed=1, **SIZES)
    return PairSpec(str(tmp_path / "target"), str(tmp_path / "draft"), target_dtype="float32")


@pytest.mark.parametrize(
    ("wanted", "count"), [(0, None), (1, 64), (64, 64), (65, 128), (256, 256), (257, None), (10**9, None)]
)
def test_whole_blocks_inside_the_head_are_proposed(tmp_path: Path, wanted: int, count: int | None) -> None:
    assert builders.VOCAB == 259
    ids, notes = choose(builders.rand(tmp_path), wanted)
    assert (None if ids is None else len(ids)) == count
    if ids is not None:
        assert ids.tolist() == list(range(len(ids)))
    assert bool(notes) == (wanted > 256)


def test_what_ends_a_text_is_always_among_them(tmp_path: Path) -> None:
    ids, notes = choose(builders.rand(tmp_path), 64, most=250, eos_ids=[240, 255, 3])
    assert ids is not None
    assert ids.tolist() == [*range(63), 240]  # 255 is no token
    assert not notes


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    model = builders.rand(tmp_path)
    assert choose(model, 500) == (None, ["draft-vocab 500 changes nothing: its head has 259 ids"])
    assert choose(None, 64) == (None, ["draft-vocab 64 changes nothing: there is no draft"])
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert choose(model, 64) == (None, ["draft-vocab 64 changes nothing: its head is no plain layer"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("gpt_neox", {}), ("phi", {})],
)
def test_the_twin_has_their_logits_and_leaves_the_model_alone(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    model = builders.rand(tmp_path, kind, **options)
    ids = torch.tensor([IDS])
    before = model(ids).logits
    twin = narrowed(model, SOME)
    assert torch.allclose(twin(ids).logits, before[..., SOME], atol=1e-6)
    assert torch.equal(model(ids).logits, before)
    assert twin.get_input_embeddings() is model.get_input_embeddings()


@pytest.mark.parametrize("top_n", [0, 10])
@pytest.mark.parametrize("options", [{}, {"int8": True}, {"fast": False}])
def test_every_forward_gives_the_same_probabilities_of_these_ids(
    tmp_path: Path, options: dict[str, Any], top_n: int
) -> None:
    model = builders.rand(tmp_path, **SIZES)
    processor = LogitsProcessor(temperature=1.0, top_k=top_n, top_p=1.0)
    tree = HfTreeModel(narrowed(model, SOME), vocab_size=builders.VOCAB, ids=SOME, role="draft", **options)
    root = Node(-1, None)
    tree.prefill(IDS, root, top_n=top_n)
    law = model(torch.tensor([IDS])).logits[0, -1].detach().double()[SOME].softmax(-1)
    support = tree.joint([root], [0.0], processor)
    best = sorted(range(len(SOME)), key=lambda i: -law[i])[: top_n or None]
    expected = {int(SOME[i]): float(law[i] / law[best].sum()) for i in best}
    found = dict(zip(support.token.tolist(), support.prob.tolist(), strict=True))
    assert found == pytest.approx(expected, abs=1e-5)
    tokens, logps = tree.best(root, 5)
    assert tokens.tolist() == [int(SOME[i]) for i in best[:5]]
    assert logps.tolist() == pytest.approx([float(law[i].log()) for i in best[:5]], abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(max_new_tokens=16, seed=3),
        Settings(max_new_tokens=16, seed=3, forest="full", gamma=3),
        Settings(max_new_tokens=16, seed=3, draws="distinct", width=3),
        Settings(max_new_tokens=16, seed=3, deterministic=True, width=3),
    ],
)
def test_where_draws_of_the_draft_do_not_decide_the_text_is_the_same(
    spec: PairSpec, settings: Settings
) -> None:
    texts = set()
    for first in (0, 64, 200):
        decoder = Decoder(load_pair(spec.replace(draft_vocab=first)))
        ids = decoder.pair.draft_ids
        assert (None if ids is None else len(ids)) == {0: None, 64: 64, 200: 256}[first]
        texts.add(tuple(decoder.generate("hello", settings, energy=False).token_ids))
    assert len(texts) == 1


@pytest.mark.parametrize("top_k", [0, 10])
@pytest.mark.parametrize("method", ["dsbd", "speculative", "specinfer"])
def test_every_method_decodes_and_drafts_no_other_id(spec: PairSpec, method: str, top_k: int) -> None:
    settings = Settings(
        method=method, max_new_tokens=24, seed=3, top_k=top_k, top_p=1.0, verify="paper", forest="full"
    )
    decoder = Decoder(load_pair(spec.replace(draft_vocab=64)))
    drafted: list[int] = []
    for event in decoder.stream("hello", settings):
        for layer in getattr(getattr(event, "forest", None), "layers", ()):
            drafted += [node.token for node in layer.draws]
    result = decoder.generate("hello", settings, energy=False)
    assert len(result.token_ids) == 24
    assert decoder.draft is not None
    assert decoder.draft.vocab_size == 64
    assert drafted
    assert set(drafted) <= set(range(64))
    assert max(result.token_ids) >= 64  # the target's tokens are all there


@pytest.mark.parametrize("top_k", [0, 10])
def test_a_request_of_a_batch_is_the_request_alone(spec: PairSpec, top_k: int) -> None:
    decoder = Decoder(load_pair(spec.replace(draft_vocab=64)))
    methods = [
        Settings(
            method=method, verify=verify, top_k=top_k, top_p=1.0, max_new_tokens=12, seed=5, forest="full"
        )
        for method, verify in (("dsbd", "cover"), ("dsbd", "paper"), ("speculative", "cover"))
    ]
    prompts = ["hello", "a longer prompt", "x"]
    together = decoder.generate_many(prompts, methods, batch=3)
    for prompt, settings, result in zip(prompts, methods, together, strict=True):
        alone = decoder.generate(prompt, settings, energy=False)
        assert result.token_ids == alone.token_ids
        assert result.stats.drafts_accepted == alone.stats.drafts_accepted
        assert result.stats.draft_calls > 0


def test_results_and_a_batch_that_goes_on_name_it(spec: PairSpec) -> None:
    from dsbd_cli.batch.run import decoded_by

    whole, first = (Decoder(load_pair(spec.replace(draft_vocab=n))) for n in (0, 64))
    assert "vocab" not in whole.models()["draft"]
    assert first.models()["draft"]["vocab"] == 64
    assert decoded_by(first)["draft"] == decoded_by(whole)["draft"].replace("draft ", "draft (64 ids) ")
    assert decoded_by(first)["target"] == decoded_by(whole)["target"]


def test_a_remembered_pair_keeps_its_border_and_packs_once(
    spec: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec.replace(draft_vocab=64)
    pair = load_pair(spec)
    decoder = Decoder(pair)
    if not isinstance(decoder.target.tree_forward, WholeForward):
        pytest.skip("no C compiler here")
    assert ready.remember(spec, pair, decoder.verdicts())
    decoder.keep_packed(ready.places(spec, pair))
    settings = Settings(max_new_tokens=12, seed=3)
    text = decoder.generate("hello", settings, energy=False).token_ids
    packed: list[Any] = []
    laid_out = WholeForward._laid_out
    monkeypatch.setattr(
        WholeForward, "_laid_out", lambda self, *args: packed.append(0) or laid_out(self, *args)
    )
    again = ready.load(spec)
    assert again is not None
    assert again.draft_ids is not None
    assert again.draft_ids.tolist() == list(range(64))
    assert Decoder(again).generate("hello", settings, energy=False).token_ids == text
    assert not packed
    # The same draft with its whole head is another file's worth: it is not taken for this one.
    other = load_pair(spec.replace(draft_vocab=0))
    assert ready.remember(spec.replace(draft_vocab=0), other, Decoder(other).verdicts())
    whole = ready.load(spec.replace(draft_vocab=0))
    assert whole is not None
    assert Decoder(whole).generate("hello", settings, energy=False).token_ids == text
    assert packed
