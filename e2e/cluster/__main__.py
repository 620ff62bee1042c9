"""The command line: `python -m cluster --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import commands
from .errors import ClusterError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status (1 with a message on stderr for what a person can act on)."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster", description="A real Kubernetes on this machine."
    )
    commands.declare(parser)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen) or 0)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
