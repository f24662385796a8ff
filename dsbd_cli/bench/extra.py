"""What the bench needs beside the package's own dependencies, asked for before anything is measured."""

from __future__ import annotations

from importlib.util import find_spec

from dsbd_cli.errors import UserError

NEEDED = ("matplotlib", "scipy")


def need_extra() -> None:
    """Raise UserError where a package of the extra `bench` is not installed."""
    for name in NEEDED:
        if find_spec(name) is None:
            raise UserError(f"dsbd bench needs {name}: pip install 'dsbd-cli[bench]'")
