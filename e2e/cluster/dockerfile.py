"""Reading a Dockerfile, as far as is needed to know what goes into its image."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path


def context_files(dockerfile: str, context: Path, arguments: Mapping[str, str]) -> list[Path]:
    """Files of the context that the Dockerfile's COPY and ADD lines take, sorted; compiled Python is left out."""
    found: set[Path] = set()
    for source in copied(dockerfile, arguments):
        matches = (
            list(context.glob(source.strip("/") or "*")) if source.strip("/") not in {"", "."} else [context]
        )
        for match in matches:
            found.update(files_below(match))
    return sorted(found)


def copied(dockerfile: str, arguments: Mapping[str, str]) -> list[str]:
    """Sources of COPY and ADD lines that come from the context (not from another stage or a URL)."""
    sources: list[str] = []
    values = {**_defaults(dockerfile), **arguments}
    for words in _instructions(dockerfile):
        if words[0].upper() not in {"COPY", "ADD"} or any(word.startswith("--from=") for word in words):
            continue
        paths = [word for word in words[1:] if not word.startswith("--")]
        if paths and paths[0].startswith("["):
            paths = json.loads(" ".join(paths))
        sources += [_substitute(path, values) for path in paths[:-1] if "://" not in path]
    return sources


def bases(dockerfile: str, arguments: Mapping[str, str]) -> list[str]:
    """Images (and stages) that FROM lines name."""
    values = {**_defaults(dockerfile), **arguments}
    return [
        _substitute(next(word for word in words[1:] if not word.startswith("--")), values)
        for words in _instructions(dockerfile)
        if words[0].upper() == "FROM"
    ]


def _defaults(dockerfile: str) -> dict[str, str]:
    return {
        name: value
        for words in _instructions(dockerfile)
        if words[0].upper() == "ARG"
        for name, _, value in (word.partition("=") for word in words[1:])
    }


def _instructions(dockerfile: str) -> list[list[str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE))
    lines = (line.strip() for line in joined.splitlines())
    return [line.split() if "[" in line else _split(line) for line in lines if line]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a RUN line may hold any quoting; nothing here reads it
        return line.split()


def _substitute(text: str, values: Mapping[str, str]) -> str:
    """Fills in `$NAME`, `${NAME}` and `${NAME:-default}`."""
    return re.sub(
        r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})",
        lambda found: values.get(found.group(1) or found.group(2)) or found.group(3) or "",
        text,
    )


def files_below(path: Path) -> list[Path]:
    if path.is_file() or path.is_symlink():
        return [path]
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in {"__pycache__", ".git", ".venv"}]
        found += [Path(folder, name) for name in names if not name.endswith(".pyc")]
    return sorted(found)
