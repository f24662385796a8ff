"""`model.generate(ids, custom_generate=dsbd_cli.generate, ...)` of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dsbd_cli
from dsbd_cli.errors import UserError
from dsbd_cli.hf import forget
from dsbd_cli.hf.kept import decoder_for, kept
from tests import builders
from tests.hf.states import tiny


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    base = tmp_path_factory.mktemp("hf")
    # EOS gets a fair sampler, so that answers end in different places.
    models = [builders.rand(base / str(seed), seed=seed, vocab=24, eos_token_id=[1, 5]) for seed in (0, 1)]
    for model in models:
        model.generation_config.eos_token_id = [1, 5]
        model.generation_config.pad_token_id = 0
    return models[0], models[1]


IDS = torch.tensor([[7, 8, 9, 10]])


def test_deterministic_is_transformers_own_beam_search(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    for method in ("dsbd", "beam"):
        for length_penalty, early in ((1.0, False), (0.0, True), (2.0, "never")):
            config = {"max_new_tokens": 20, "length_penalty": length_penalty, "early_stopping": early}
            ours = target.generate(
                IDS, custom_generate=dsbd_cli.generate, draft_model=draft, width=4, method=method, **config
            )
            theirs = target.generate(IDS, num_beams=4, **config)
            assert ours.tolist() == theirs.tolist()


def test_greedy_methods(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    theirs = target.generate(IDS, max_new_tokens=15)
    for options in (
        {"method": "speculative"},
        {"method": "specinfer"},
        {"method": "specinfer", "tree_rule": "spectr"},
        {"method": "specinfer", "tree_rule": "rsd"},
        {"method": "multinomial"},
    ):
        ours = target.generate(
            IDS, custom_generate=dsbd_cli.generate, draft_model=draft, max_new_tokens=15, **options
        )
        assert ours.tolist() == theirs.tolist()


def test_sampling_follows_the_config_and_the_seed(pair: tuple[Any, Any]) -> None:
    target, draft = pair

    def run(**options: Any) -> list[list[int]]:
        defaults: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "width": 3}
        return target.generate(  # type: ignore[no-any-return]
            IDS, custom_generate=dsbd_cli.generate, draft_model=draft, **defaults | options
        ).tolist()

    assert run(seed=1) == run(seed=1)
    assert len({str(run(seed=seed)) for seed in range(6)}) > 1
    torch.manual_seed(5)
    one = run()
    torch.manual_seed(5)
    assert run() == one
    greedy = run(seed=1, top_k=1)
    assert run(seed=2, top_k=1) == greedy
    assert run(seed=3, top_p=1e-9, temperature=5.0) == greedy
    # The same numbers as the library's own entry gives.
    settings = dsbd_cli.Settings(width=3, max_new_tokens=12, seed=1, top_k=50, top_p=1.0)
    result = decoder_for(target, draft, (1, 5), settings).generate(IDS[0].tolist(), settings)
    assert run(seed=1, top_k=50) == [IDS[0].tolist() + result.token_ids]


def test_batches_with_padding_and_several_answers(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    options: dict[str, Any] = {"custom_generate": dsbd_cli.generate, "draft_model": draft, "do_sample": True,
                               "max_new_tokens": 9, "seed": 3}  # fmt: skip
    ids = torch.tensor([[0, 0, 7, 8], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    both = target.generate(ids, attention_mask=mask, **options)
    short = target.generate(ids[:1, 2:], **options)
    assert both[0, 2:].tolist()[: short.shape[1]] == short[0].tolist()
    assert both.shape[0] == 2
    many = target.generate(IDS, num_return_sequences=3, return_dict_in_generate=True, width=4, **options)
    assert many.sequences.shape[0] == 3
    assert many.sequences_scores.tolist() == sorted(many.sequences_scores.tolist(), reverse=True)
    assert many.sequences[0].tolist()[: IDS.shape[1]] == IDS[0].tolist()


def test_what_stands_behind_an_answer_that_ended(pair: tuple[Any, Any]) -> None:
    """Filler token by token as transformers', whose beam search takes an EOS for a pad id of 0."""
    target, draft = pair
    ids = torch.tensor([[0, 0, 7, 8], [7, 8, 9, 10], [11, 12, 13, 14]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    filled = 0
    for pad, ends in ((0, [9, 4, 2, 17]), (None, [17, 2, 9, 4, 20])):
        config = {"attention_mask": mask, "pad_token_id": pad, "eos_token_id": ends, "max_new_tokens": 12}
        for method, beams in (("beam", 3), ("dsbd", 3), ("multinomial", 1), ("beam", 1), ("dsbd", 1)):
            ours = target.generate(
                ids,
                custom_generate=dsbd_cli.generate,
                draft_model=draft,
                method=method,
                width=beams,
                **config,
            )
            assert ours.tolist() == target.generate(ids, num_beams=beams, **config).tolist()
            rows = ours[:, ids.shape[1] :].tolist()
            filled += len({next((i for i, one in enumerate(row) if one in ends), 12) for row in rows}) > 1
    assert filled >= 4


def test_gaps_in_a_mask_are_refused_where_order_in_the_cache_counts() -> None:
    """A window counts hidden tokens; transformers hides those equal to `pad_token_id` in a prompt without a mask."""
    ids = torch.tensor([[7, 12, 36, 3, 16, 23, 17, 13, 35, 9, 27]])
    run: dict[str, Any] = {
        "method": "multinomial",
        "max_new_tokens": 6,
        "pad_token_id": 3,
        "do_sample": False,
    }
    with pytest.raises(UserError, match="pad_token_id"):
        tiny("mistral", 0, sliding_window=8).generate(ids, custom_generate=dsbd_cli.generate, **run)
    model = tiny("mistral", 0)
    ours = model.generate(ids, custom_generate=dsbd_cli.generate, **run)
    del run["method"]
    assert ours.tolist() == model.generate(ids, **run).tolist()


def test_changed_weights_are_noticed(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    options: dict[str, Any] = {
        "custom_generate": dsbd_cli.generate,
        "draft_model": draft,
        "max_new_tokens": 8,
    }
    before = target.generate(IDS, **options).tolist()
    decoder = kept(target).decoder
    assert target.generate(IDS, **options).tolist() == before
    assert kept(target).decoder is decoder
    with torch.no_grad():
        target.lm_head.weight.mul_(-1)
    after = target.generate(IDS, **options).tolist()
    assert after != before
    assert after == target.generate(IDS, num_beams=4, max_new_tokens=8).tolist()
    with torch.no_grad():
        target.lm_head.weight.mul_(-1)
    forget(target)
    assert kept(target).decoder is None
    assert target.generate(IDS, **options).tolist() == before


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_beams": 4, "width": 3}, "width"),
        ({"repetition_penalty": 1.5}, "RepetitionPenalty"),
        ({"min_new_tokens": 3}, "MinLength.* min_new_tokens=0 leaves it out"),
        ({"do_sample": True, "min_p": 0.1}, "MinP"),
        ({"do_sample": True, "typical_p": 0.5}, "Typical"),
        ({"do_sample": True, "epsilon_cutoff": 0.1}, "Epsilon"),
        ({"do_sample": True, "eta_cutoff": 0.1}, "Eta"),
        ({"max_time": 1.0}, "MaxTime"),
        ({"draft_model": None}, "draft_model"),
        ({"width": 0}, "width"),
        ({"draws": "distinct"}, "draws has no meaning beside do_sample=False"),
        ({"threshold": 0.9}, "threshold has no meaning"),
        ({"width_rule": "paper"}, "width_rule has no meaning"),
        ({"kv": "one"}, "kv has no meaning"),
        ({"min_length": 5}, "MinLength"),
        ({"do_sample": True, "top_k": 3, "num_beams": 2, "renormalize_logits": True}, "LogitNormalization"),
        ({"width": "3"}, "width must be a whole number"),
        ({"draft_model": "gpt2"}, "draft_model must be a loaded model"),
        ({"method": "magic"}, "magic"),
        (
            {"method": "specinfer", "tree_rule": "rds"},
            "tree-rule must be one of specinfer, spectr, rsd, not 'rds'",
        ),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    pair: tuple[Any, Any], options: dict[str, Any], word: str
) -> None:
    target, draft = pair
    given: dict[str, Any] = {"custom_generate": dsbd_cli.generate, "draft_model": draft, "max_new_tokens": 4}
    with pytest.raises(UserError, match=word):
        target.generate(IDS, **given | options)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(
    "idle", [{"renormalize_logits": True}, {"remove_invalid_values": True}, {"min_length": 4}]
)
def test_what_changes_nothing_is_taken(pair: tuple[Any, Any], idle: dict[str, Any], sample: bool) -> None:
    target, draft = pair
    given = {"custom_generate": dsbd_cli.generate, "draft_model": draft, "max_new_tokens": 6, "width": 4}
    given |= {"do_sample": True, "seed": 2, "top_k": 0} if sample else {}
    assert target.generate(IDS, **given | idle).tolist() == target.generate(IDS, **given).tolist()
    if not sample:
        assert (
            target.generate(IDS, **given | idle).tolist()
            == target.generate(IDS, num_beams=4, max_new_tokens=6, **idle).tolist()
        )


def test_not_called_directly(pair: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="custom_generate"):
        dsbd_cli.generate(pair[0], IDS)


def test_one_beam_asked_for_is_one_beam(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    run: dict[str, Any] = {"custom_generate": dsbd_cli.generate, "draft_model": draft, "max_new_tokens": 10}
    greedy = target.generate(IDS, max_new_tokens=10).tolist()
    four = target.generate(IDS, num_beams=4, max_new_tokens=10).tolist()
    assert greedy != four
    for method in ("beam", "dsbd"):
        assert target.generate(IDS, method=method, num_beams=1, **run).tolist() == greedy
        assert target.generate(IDS, method=method, **run).tolist() == four  # not said: the default


def test_autocast_is_served(pair: tuple[Any, Any]) -> None:
    """Keys come in float32 there and values in bfloat16; the text is that of the model's own generate."""
    target, draft = pair
    own: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 3}
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="autocast is on"):  # noqa: PT031
        theirs = target.generate(IDS, **own).tolist()
        for method in ("beam", "dsbd"):
            ours = target.generate(
                IDS, custom_generate=dsbd_cli.generate, method=method, draft_model=draft, **own
            )
            assert ours.tolist() == theirs, method
    plain = target.generate(IDS, custom_generate=dsbd_cli.generate, method="beam", **own).tolist()
    assert plain == target.generate(IDS, **own).tolist()


def test_a_mask_of_another_length_is_named(pair: tuple[Any, Any]) -> None:
    for shape in ((1, 6), (1, 2), (2, 4)):
        said = (
            rf"attention_mask .*has the shape {re.escape(str(list(shape)))} and input_ids \[1, 4\]: give one"
        )
        with pytest.raises(UserError, match=said):
            pair[0].generate(IDS, custom_generate=dsbd_cli.generate, method="beam", max_new_tokens=4,
                             attention_mask=torch.ones(shape, dtype=torch.long))  # fmt: skip


class _Halved(torch.nn.Module):
    """A linear layer with weights of 8 bits, as quantizers put in a Linear's place."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.packed.float() * self.scale).T  # type: ignore[operator]


def _replaced(model: Any) -> None:
    for module in model.modules():
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, _Halved(child))


def _dynamic(model: Any) -> None:
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", [_replaced, _dynamic])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_quantized_layers_are_served_by_the_models_own_forward(kind: str, when: str, change: Any) -> None:
    model, draft = tiny(kind, 0), tiny("llama", 1)
    run: dict[str, Any] = {"custom_generate": dsbd_cli.generate, "draft_model": draft, "max_new_tokens": 8}
    if when == "after":
        model.generate(IDS, method="beam", num_beams=3, **run)
    change(model)
    theirs = model.generate(IDS, num_beams=3, max_new_tokens=8).tolist()
    for method in ("beam", "dsbd"):
        # (A dynamic quantizer scales by all rows of a forward, so rows of a tree change each other.)
        try:
            assert model.generate(IDS, method=method, num_beams=3, **run).tolist() == theirs
        except UserError as error:
            assert change is _dynamic
            assert "does not compute like single sequences" in str(error)  # noqa: PT017
    assert (
        model.generate(IDS, method="multinomial", **run).tolist()
        == model.generate(IDS, max_new_tokens=8).tolist()
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "how", ["whole", *(pytest.param(how, marks=pytest.mark.slow) for how in ("forward", "a layer"))]
)
def test_compiled_models_are_served(how: str) -> None:
    model, draft = tiny("llama", 0), tiny("llama", 1)
    own: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 4}
    theirs = model.generate(IDS, **own).tolist()
    called = model
    compiled: dict[str, Any] = {"backend": "eager"}
    if how == "whole":
        called = torch.compile(model, **compiled)
    elif how == "forward":
        model.forward = torch.compile(model.forward, **compiled)
    else:
        model.model.layers[0] = torch.compile(model.model.layers[0], **compiled)
    ours = called.generate(IDS, custom_generate=dsbd_cli.generate, method="dsbd", draft_model=draft, **own)
    assert ours.tolist() == theirs
