"""The tokenizer of a GGUF file, rebuilt so that it splits text as the original does.

A byte-level vocabulary says nothing of how text is cut before its merges apply; the file's
`tokenizer.ggml.pre` names the rule. Libraries that ignore it give other ids without an error: with
SmolLM2's digits rule lost, "1.\\n\\n2" is cut differently. Rules not listed here are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dsbd_cli.errors import UserError, first_line, let_by
from dsbd_cli.loading.gguf_facts import GgufFacts

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_REST}"

# Only groups whose published tokenizers are known to share rule and normaliser.
_GPT2_KINDS = {"gpt-2", "gpt2", "phi-2"}
_DIGITS_KINDS = {"smollm", "starcoder"}
_LLAMA3_KINDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"}
_QWEN2_KINDS = {"qwen2"}

# Text on which a wrong rebuild shows: it must come back unchanged.
_SAMPLES = ("Hello  world\n\n1. 2,345 x² don't", " a\tb\r\n", "naïve 日本 🙂é", "def f(x):\n    return x")


def build_tokenizer(path: Path, facts: GgufFacts, role: str) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file describes.

    Raises:
        UserError: a rule that cannot be rebuilt exactly.
    """
    kind = str(facts.fields.get("tokenizer.ggml.model"))
    if kind == "gpt2":
        tokenizer = _byte_level(path, facts, role)
    elif kind in ("llama", "gemma", "gemma4"):
        tokenizer = _sentencepiece(path, role)
    else:
        raise UserError(f"{role} {path}: its tokenizer is of kind {kind!r}, which cannot be rebuilt from a GGUF "
                        "file; use the model's Hugging Face folder")  # fmt: skip
    for sample in _SAMPLES:
        ids = tokenizer(sample, add_special_tokens=False)["input_ids"]
        if str(tokenizer.decode(ids)).strip() != sample.strip():
            raise UserError(f"{role} {path}: the tokenizer rebuilt from this file does not give text back "
                            "unchanged; use the model's Hugging Face folder")  # fmt: skip
    return tokenizer


def splitting(kind: str) -> tuple[Any, Any] | None:
    """(pre-tokenizer, normalizer or None) of a `tokenizer.ggml.pre`, or None if it is not known."""
    if kind in _GPT2_KINDS:
        return pre.ByteLevel(add_prefix_space=False, use_regex=True), None
    if kind in _DIGITS_KINDS:
        plain = pre.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre.Sequence([pre.Digits(individual_digits=True), plain]), None
    if kind in _LLAMA3_KINDS:
        return _by_regex(_LLAMA3), None
    if kind in _QWEN2_KINDS:
        return _by_regex(_QWEN2), normalizers.NFC()
    return None


def _by_regex(pattern: str) -> Any:
    split = pre.Split(Regex(pattern), behavior="isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _byte_level(path: Path, facts: GgufFacts, role: str) -> PreTrainedTokenizerFast:
    def get(key: str, default: Any = None) -> Any:
        return facts.fields.get(f"tokenizer.ggml.{key}", default)

    rule = splitting(str(get("pre")))
    if rule is None:
        raise UserError(f"{role} {path}: its text is split by rule {get('pre')!r}, which is not known here and "
                        "would give wrong tokens; use the model's Hugging Face folder")  # fmt: skip
    tokens: list[str] = get("tokens", [])
    types: list[int] = get("token_type") or [1] * len(tokens)
    merges = [tuple(pair.split(" ")) for pair in get("merges", [])]
    if not tokens or not merges:
        raise UserError(f"{role} {path} holds no tokenizer")
    core = Tokenizer(
        models.BPE(
            {token: place for place, token in enumerate(tokens)},
            merges,
            ignore_merges=str(get("pre")) in _LLAMA3_KINDS,
        )
    )
    core.pre_tokenizer, normalizer = rule
    if normalizer is not None:
        core.normalizer = normalizer
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(token, normalized=False, special=True)
         for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    )  # fmt: skip
    core.add_tokens(
        [AddedToken(token, normalized=False)
         for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    )  # fmt: skip
    named = {
        name: tokens[place]
        for name, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"),
                          ("unk_token", "unknown_token_id"), ("pad_token", "padding_token_id"))
        if (place := get(key)) is not None
    }  # fmt: skip
    if get("add_bos_token") and "bos_token" in named:
        bos = named["bos_token"]
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    context = facts.fields.get(f"{facts.architecture}.context_length")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        clean_up_tokenization_spaces=False,
        **named,
        **({"model_max_length": int(context)} if context else {}),
    )
    tokenizer.chat_template = facts.fields.get("tokenizer.chat_template")
    return tokenizer


def _sentencepiece(path: Path, role: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:
        let_by(error)
        raise UserError(f"{role} {path}: transformers cannot rebuild this file's tokenizer "
                        f"({first_line(error)}); use the model's Hugging Face folder") from None  # fmt: skip
