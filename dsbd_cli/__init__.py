"""Dynamic-width speculative beam decoding.

`from dsbd_cli import Decoder, Settings`, and `generate` for `model.generate(custom_generate=...)` of
transformers; all are loaded on first use, so that `import dsbd_cli` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsbd_cli.version import __version__

if TYPE_CHECKING:
    from dsbd_cli.decoder import Decoder
    from dsbd_cli.hf import generate
    from dsbd_cli.result import Result
    from dsbd_cli.settings import Settings

__all__ = ["Decoder", "Result", "Settings", "__version__", "generate"]


def __getattr__(name: str) -> Any:
    if name == "Decoder":
        from dsbd_cli.decoder import Decoder

        return Decoder
    if name == "Result":
        from dsbd_cli.result import Result

        return Result
    if name == "Settings":
        from dsbd_cli.settings import Settings

        return Settings
    if name == "generate":
        from dsbd_cli.hf import generate

        return generate
    raise AttributeError(f"module 'dsbd_cli' has no attribute {name!r}")
