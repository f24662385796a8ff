"""The `dsbd` command, and `python -m dsbd_cli` where no script is installed, such as under torchrun."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `dsbd` script."""
    try:
        # Imported here: it takes some tenths of a second, in which Ctrl-C is to end in a word as well.
        from dsbd_cli.cli.main import main as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None and os.environ.get("RANK", "0") == "0":
            sys.stderr.write("dsbd: stopped\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
