"""Timing number formats before a model is loaded: on a slice of it, so that it need not be loaded twice.

A slice is a few of its layers and as large a part of its head, in the shapes and, where they lie here, with the
weights of the real one (a GGUF file's stay in their blocks). Between two forwards as much other memory is read as
the rest of the model would take: in decoding its layers push each other out of the processor's cache.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoding import HfTreeModel
from dsbd_cli.errors import let_by, suppressed
from dsbd_cli.loading.checkpoint import weight_files
from dsbd_cli.loading.hardware import NumberFormat
from dsbd_cli.loading.place import Place
from dsbd_cli.loading.shapes import skeleton
from dsbd_cli.others import Window
from dsbd_cli.prices.formats import Verdict, quickest
from dsbd_cli.prices.probe import Probe, measured_now, one_thread, quick, torn

COUNTS = (1, 16)  # nodes of a forward: a beam, and a small forest
BUDGET = 0.4  # seconds, less what two rounds take
_ROUNDS = 9
_WEIGHTS = 16_000_000  # of a slice, about; at least one layer
_MOST = 500_000_000  # of a layer: beyond that the wait and the memory are not worth it
_UNIT = 16
# No processor's cache is larger by much, and reading takes its time.
_SWEEP = 256 << 20


def judge(place: Place, config: Any, formats: Sequence[NumberFormat], *, int8: bool, trust: bool) -> Verdict:
    """Time `formats` for a model; a model that cannot be sliced takes the first of them.

    Args:
        place, config: the model's.
        formats: what rounds least first.
        int8: as for `HfTreeModel`: a draft's.
        trust: run modelling code that comes with a checkpoint.
    """
    names = [one.name for one in formats]
    try:
        slice_ = Slice(place, config, trust)
        models = {one.name: slice_.model(one, int8) for one in formats}
    except Exception as error:  # whatever modelling code makes of a part of itself
        let_by(error)
        return Verdict(names[0], {}, f"not timed ({type(error).__name__} in a slice of it)")
    first: dict[Any, str] = {}
    for name, one in models.items():
        first.setdefault(one.arithmetic, name)
    models = {name: models[name] for name in first.values()}  # of what computes alike noise would choose
    if len(models) == 1:
        # One forward for all of them: the format that it computes in is what is held.
        computes = next(iter(models.values())).dtype
        same = computes if computes in names else names[0]
        return Verdict(same, {}, "not timed: the same forward serves each format")
    watched = Window()
    ms = measure(models)
    others = watched.share()
    if torn(others):
        with one_thread():
            ms = measure(models)
    return Verdict(quickest(ms), ms, *measured_now(others))


def measure(
    models: dict[str, Sliced],
    *,
    counts: Sequence[int] = COUNTS,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[int, float]]:
    """Milliseconds by format and number of nodes: rounds over all of them in turns, the first to warm up.

    Other programs only ever make a forward slower: the median of the quicker half of the times.
    """
    probes = {name: Probe(one.tree, clock) for name, one in models.items()}
    counts = [count for count in counts if all(probe.holds(count) for probe in probes.values())] or [1]
    times: dict[str, dict[int, list[float]]] = {name: {count: [] for count in counts} for name in models}
    begin = clock()
    for number in range(_ROUNDS + 1):
        if number > 2 and clock() - begin > budget:
            break
        for count in counts:
            for name, probe in probes.items():
                models[name].sweep()
                took = probe.run(count)
                if number:
                    times[name][count].append(took)
    return {
        name: {count: quick(sorted(all_)) for count, all_ in curve.items()} for name, curve in times.items()
    }


class Sliced:
    """A slice in one number format.

    Attributes:
        tree: decodes with it.
        arithmetic: what two formats that compute alike have in common.
        dtype: the name of what its forward computes in.
    """

    def __init__(self, tree: HfTreeModel, share: float) -> None:
        forward = tree.tree_forward
        self.tree = tree
        self.dtype = str(forward.dtype).removeprefix("torch.")
        self.arithmetic = type(forward).__name__, self.dtype, forward.int8, forward.int8_activations
        each = 1 if forward.int8 else forward.dtype.itemsize
        read = getattr(forward, "bytes_read", None) or each * sum(
            one.numel() for one in tree.model.parameters()
        )
        rest = read * (1 / share - 1)
        self._rest = torch.ones(int(min(rest, _SWEEP)) // 8 + 1, dtype=torch.int64)

    def sweep(self) -> None:
        """Read as much as the rest of the model takes."""
        self._rest.sum()


class Slice:
    """The first layers of a model, and a part of its head.

    Args:
        place, config: the model's.
        trust: run modelling code that comes with a checkpoint.

    Raises:
        Exception: of any kind, where the modelling code cannot build it.
    """

    def __init__(self, place: Place, config: Any, trust: bool) -> None:
        layers = int(config.get_text_config().num_hidden_layers)
        rows = int(config.get_text_config().vocab_size)
        one = _cut(config, 1, _UNIT)
        size = sum(weight.numel() for weight in skeleton(one, trust).parameters())
        if size > _MOST:
            raise MemoryError("its layers are too large")
        kept = max(1, min(layers, round(_WEIGHTS / size)))
        # What a forward asks of the number of rows is a multiple of something: the remainder stays.
        part = max(rows * kept // layers // _UNIT, 1) * _UNIT + rows % _UNIT
        self.vocab_size, self.share = min(part, rows), kept / layers
        self._config = _cut(config, kept, self.vocab_size)
        self._trust = trust
        self._weights = dict(_stored(place))

    def model(self, format_: NumberFormat, int8: bool) -> Sliced:
        """The slice in a number format.

        Raises:
            Exception: of any kind, as above.
        """
        model = skeleton(self._config, self._trust)
        model = model.to_empty(device="cpu").eval()
        model.tie_weights()
        made = torch.Generator().manual_seed(0)
        for name, weight in model.named_parameters():
            weight.requires_grad_(False)
            weight.data = self._values(name, weight, made).to(format_.dtype)
        for buffer in model.buffers():  # what they hold decides nothing that is timed
            buffer.fill_(0.5) if buffer.is_floating_point() else buffer.zero_()
        tree = HfTreeModel(
            model,
            vocab_size=self.vocab_size,
            int8=int8,
            int8_activations=format_.int8_activations,
            test=False,
        )
        return Sliced(tree, self.share)

    def _values(self, name: str, weight: Tensor, made: torch.Generator) -> Tensor:
        """The weight of this name as it is stored, or numbers of its shape that bfloat16 holds."""
        read = self._weights.get(name)
        if read is not None:
            values = read()
            if values.shape[1:] == weight.shape[1:] and len(values) >= len(weight):
                return values[: len(weight)].clone()
        if weight.dim() < 2:
            return torch.ones(weight.shape)
        return (torch.randn(weight.shape, generator=made) * 0.02).bfloat16()


def _cut(config: Any, layers: int, rows: int) -> Any:
    """A config of fewer layers and tokens."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers, text.vocab_size = layers, rows
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return small


def _stored(place: Place) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """What reads each weight of a model that lies here, by name; nothing where its files are others."""
    from safetensors import safe_open

    files: list[Path] = []
    if place.is_local:
        with suppressed(Exception):  # loading says what is wrong with them
            files = [path for path in weight_files(place.folder, place.role) if path.suffix == ".safetensors"]
    for path in files:
        stored = safe_open(str(path), framework="pt", device="cpu").__enter__()
        for name in stored.keys():  # noqa: SIM118 (it is no mapping)
            yield name, functools.partial(stored.get_tensor, name)
