"""How many modules a reader must open to follow one default iteration on a CPU."""

from __future__ import annotations

from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.methods.setup import decode, draft_processor, start, top_n_needed
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.sequences import Trie
from dsbd_cli.prices import Prices
from dsbd_cli.settings import Settings
from tests.builders import VOCAB, rand
from tests.decoding.crossing import Crossing

MOST = 11  # that of forests without a draft among them: they stand in wherever the draft does not pay


def test_a_steady_iteration_crosses_few_modules(tmp_path):
    target = HfTreeModel(rand(tmp_path, initializer_range=0.3), vocab_size=VOCAB)
    draft = HfTreeModel(rand(tmp_path, initializer_range=0.3), vocab_size=VOCAB, role="draft")
    settings, prompt = Settings(max_new_tokens=40), [5, 6, 7]
    trie = Trie(lambda node: "length" if node.depth >= 40 else None, [], 40)
    target.prefill(prompt, trie.root, top_n=top_n_needed(settings, 0))
    draft.prefill(prompt, trie.root, top_n=draft_processor(settings).top_n)
    prices = Prices.assumed(0.01, 0.001)
    run = start(settings, target, draft, trie, SeededSampler(0, 0), SeededSampler(0, 1), prices=prices)
    counts = Crossing().modules(decode(run, settings))
    assert len(counts) > 4
    for modules in counts[2:-1]:
        assert len(modules) <= MOST, modules
