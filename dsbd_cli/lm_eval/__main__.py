"""The harness's own command line, with `--model dsbd`."""

from __future__ import annotations

import sys

from dsbd_cli.errors import DsbdError
from dsbd_cli.lm_eval import register


def main() -> None:
    """Run `lm_eval` with this process's arguments; errors meant for a person are one line on stderr."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except DsbdError as error:
        print(f"dsbd: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
