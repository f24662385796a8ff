"""`dsbd doctor`: what this machine offers. Reports what is missing; never fails because of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json as encoder
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dsbd_cli.cli import measured
from dsbd_cli.cli.output import Out
from dsbd_cli.counted import counted
from dsbd_cli.energy_probes import Unknown, is_sliced, probes_of
from dsbd_cli.errors import DsbdError, UserError
from dsbd_cli.ui.look import hanging
from dsbd_cli.ui.safe import escaped
from dsbd_cli.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate", "nvidia-ml-py",
             "bitsandbytes", "matplotlib")  # fmt: skip

# What an empty list means.
_NOTHING = {
    "formats": "none timed yet (the first run of a model on this CPU does)",
    "prices": "none measured yet (the first run of a pair does)",
    "host": "not measured (the host's share of a batch beside a GPU)",
}
# What people are told below the figures; JSON has the figures alone.
_MEANS = {
    "formats": "(ms of a slice by nodes: milliseconds of a few of its layers over so many tokens at once)",
    "prices": "(ms by nodes: milliseconds of one forward over so many tokens at once)",
}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    measure: Annotated[
        str | None,
        typer.Option(
            "--measure",
            metavar="PRESET",
            help="Measure anew which number formats are quickest and what forwards cost with the pair of this preset, "
            "and keep it; what a calm moment gave stays where the machine is busy now.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --measure: keep what is measured on a busy machine too.")
    ] = False,
) -> None:
    """Say what dsbd sees: python, libraries, devices, energy counters, cache, presets, and what was measured."""
    if measure is not None:
        from dsbd_cli.cli.measure import measure_anew

        measure_anew(measure, force=force)
    elif force:
        raise UserError("--force has no effect without --measure PRESET")
    report = examine(measure)
    if json:
        Out().write_json(encoder.dumps(report, ensure_ascii=False) + "\n")
        return
    for name, value in report.items():
        if isinstance(value, dict):
            value = [f"{key}: {inner}" for key, inner in value.items()]
        lines = value if isinstance(value, list) else [value]
        if name in _MEANS and any("by nodes:" in line for line in lines):
            lines = [*lines, _MEANS[name]]
        for place, line in enumerate(lines or [_NOTHING[name]]):
            # Names come out of files that anyone may have written.
            shown = escaped(line).replace("\n", "\\n")
            Out().write(hanging(f"{name if place == 0 else '':<10} ", shown, sys.stdout) + "\n")


def examine(preset: str | None = None) -> dict[str, Any]:
    """The report; a part that cannot be looked at says why instead.

    Args:
        preset: a name or a file: the one to tell, of those whose pair was measured.
    """
    parts: dict[str, Callable[[], Any]] = {
        "dsbd": lambda: __version__,
        "python": lambda: f"{platform.python_version()} ({sys.executable}), {platform.platform()}",
        "packages": _packages,
        "devices": lambda: _devices(preset),
        "energy": _energy,
        "hub": _hub,
        "cache": _cache,
        "presets": _presets,
        "formats": lambda: measured.formats(preset),
        "prices": lambda: measured.prices(preset),
        "host": lambda: measured.host(preset),
    }
    report = {}
    for name, look in parts.items():
        try:
            report[name] = look()
        except Exception as error:  # a doctor that falls ill helps nobody
            report[name] = f"cannot be examined ({type(error).__name__}: {' '.join(str(error).split())})"
    return report


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _devices(preset: str | None) -> list[str]:
    import torch

    from dsbd_cli.again import naming
    from dsbd_cli.decoding import level_here
    from dsbd_cli.loading import hung, processor
    from dsbd_cli.loading.hardware import choice, pick_dtype
    from dsbd_cli.presets import DEFAULT_PRESET
    from dsbd_cli.prices import formats

    whole, coarse = (_dtype(pick_dtype("auto", torch.device("cpu"), few)) for few in (False, True))
    auto = (
        whole if whole == coarse else f"{coarse} for weights stored in bfloat16 or fewer bits, else {whole}"
    )
    stored = {"stored in bfloat16": False, "of a GGUF file": True}
    open_ = {kind: choice(torch.device("cpu"), True, blocks) for kind, blocks in stored.items()}
    if formats.allowed() and any(len(one) > 1 for one in open_.values()):
        told = [
            f"{' or '.join(one.name for one in formats_)} for weights {kind}"
            for kind, formats_ in open_.items()
        ]
        auto = f"{'; '.join(told)} (whichever is timed to be quicker); else {whole}"
    code = f"C code for {level_here()}" if processor.can_compile() else "no C compiler, or DSBD_NATIVE=0"
    if processor.can_compile() and (said := hung.remembered()) is not None:
        code = f"no C code beyond what is compiled already: {naming(said, preset or DEFAULT_PRESET)}"
    lines = [f"cpu: {counted(torch.get_num_threads(), 'thread')}, {code}, dtype auto is {auto}"]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        size, dtype = about.total_memory / 2**30, _dtype(pick_dtype("auto", torch.device("cuda", index)))
        lines.append(f"cuda:{index}: {about.name}, {size:.0f} GiB, dtype auto is {dtype}")
    if torch.backends.mps.is_available():
        lines.append("mps: Apple GPU")
    return lines


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _energy() -> list[str]:
    """The processor's counter, NVML's cards and whether they count: a device that does not is said, not guessed."""
    probe = probes_of("cpu", 0)[0]
    cpu = (
        f"{probe.reason}: joules are n/a on the CPU" if isinstance(probe, Unknown) else f"cpu: {probe.source}"
    )
    return [cpu, *_cards()]


def _cards() -> list[str]:
    try:
        import pynvml
    except ImportError:
        return ["no NVML (nvidia-ml-py is not installed): joules are n/a on GPUs"]
    try:
        pynvml.nvmlInit()
    except Exception as error:  # no driver, no library, no permission
        return [f"no NVML ({' '.join(str(error).split()) or type(error).__name__}): joules are n/a on GPUs"]
    lines = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            name = name.decode() if isinstance(name, bytes) else str(name)
            lines.append(f"nvml {index}: {name}, {_counter(pynvml, handle)}")
    finally:
        pynvml.nvmlShutdown()
    return lines


def _counter(pynvml: Any, handle: Any) -> str:
    if is_sliced(pynvml, handle):
        return "cut into MIG slices: joules are n/a, for only the whole card's are counted"
    for ask, answer in (
        (pynvml.nvmlDeviceGetTotalEnergyConsumption, "energy counter"),
        (pynvml.nvmlDeviceGetPowerUsage, "no energy counter, power reading only (estimates)"),
    ):
        try:
            ask(handle)
        except Exception:  # each card lacks something else, each driver says so in its own way
            continue
        return answer
    return "neither energy counter nor power reading"


def _hub() -> str:
    from huggingface_hub import constants, get_token

    from dsbd_cli.loading.hub import offline_variable

    offline = offline_variable()
    state = f"offline ({offline} is set)" if offline else "online if there is a network"
    return f"{state}, {'a token is set' if get_token() else 'no token'}, cache {constants.HF_HUB_CACHE}"


def _cache() -> str:
    from dsbd_cli.loading.cache import cache_root

    root = cache_root()
    if not root.is_dir():
        return f"{root} (empty)"
    size = 0
    for path in root.rglob("*"):
        with contextlib.suppress(OSError):  # what another process has removed meanwhile
            size += path.stat().st_size if path.is_file() else 0
    return f"{root} ({size / 1e6:,.0f} MB)"


def _presets() -> dict[str, str]:
    from dsbd_cli.loading.cache import cache_root
    from dsbd_cli.presets import list_presets

    root = cache_root()
    return {
        preset.name: ", ".join(
            f"{role} {_presence(source, role, root)}"
            for role, source in (("target", preset.pair.target), ("draft", preset.pair.draft))
            if source is not None
        )
        for preset in list_presets()
    }


def _presence(text: str, role: str, root: Path) -> str:
    from dsbd_cli.loading.source import on_disk, parse_source

    try:
        return "on disk" if on_disk(parse_source(text, role), root) else "to be downloaded"
    except DsbdError as error:
        return f"unusable ({error})"
