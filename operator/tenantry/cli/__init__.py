"""`tenantry`, also `kubectl tenantry`: what people and pipelines do by hand. Never writes to a cluster."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Entry point. Bad input ends with one clear line and exit code 2."""
    from .app import app
    from .errors import CliError

    name = "kubectl tenantry" if Path(sys.argv[0]).name.startswith("kubectl") else "tenantry"
    try:
        app(prog_name=name)
    except CliError as error:
        sys.stderr.write(f"{name}: {error}\n")
        sys.exit(2)
