"""The one way in which a command says that it cannot do what was asked."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError


class CliError(Exception):
    """A single line for the person at the keyboard: what is wrong and what to do."""


def read_text(path: Path, what: str) -> str:
    """The text of a file (`-` is stdin). Raises CliError."""
    import sys

    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it must be UTF-8 text"
        raise CliError(f"{what} `{path}` cannot be read: {reason}") from error


def first_problem(error: ValidationError) -> str:
    """The first finding of pydantic, with its field in backquotes."""
    finding = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in finding["loc"]) or "the document"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"`{where}`: {finding['msg']}{more}"
