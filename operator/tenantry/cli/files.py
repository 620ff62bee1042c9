"""Rewriting a file that people keep in Git."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import CliError


def rewrite(path: Path, text: str) -> None:
    """Replace the file's text atomically; its mode stays. Raises CliError."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).chmod(path.stat().st_mode & 0o7777)
        os.replace(file.name, path)
    except OSError as error:
        raise CliError(f"file `{path}` cannot be written: {error.strerror}") from error
