"""`tenantry rollback`: the one-line change back to an earlier version, shown as a diff or made in a file."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from .errors import CliError, read_text
from .promote import promote_file, promote_text


def rollback(path: Path, adapter: str, version: str | None, *, write: bool) -> str:
    """The diff for `git apply`, or with `write` a sentence on what was changed. Raises CliError."""
    namespace, slash, name = adapter.partition("/")
    if not slash or not namespace or not name:
        raise CliError("ADAPTER must be NAMESPACE/NAME, e.g. acme-ml/tone")
    text = read_text(path, "file")
    chosen = version or before(text, namespace, name)
    if write:
        return (
            promote_file(path, adapter, chosen).replace("commit it to promote", "commit it to roll back")
            + "\n"
        )
    changed, _ = promote_text(text, namespace, name, chosen)
    if changed == text:
        raise CliError(f"VERSION must be another than the stable one: {adapter} is at {chosen} in `{path}`")
    return "".join(
        difflib.unified_diff(
            text.splitlines(keepends=True), changed.splitlines(keepends=True), f"a/{path}", f"b/{path}", n=1
        )
    )


def before(text: str, namespace: str, name: str) -> str:
    """The highest listed version below the stable one. Raises CliError."""
    spec = _spec(text, namespace, name)
    try:
        stable = next(c["version"] for c in spec["channels"] if c["name"] == "stable")
        listed = [str(entry["version"]) for entry in spec["versions"]]
    except (KeyError, TypeError, StopIteration) as error:
        raise CliError("the Adapter in the file must have `spec.versions` and the channel stable") from error
    lower = [version for version in listed if _order(version) < _order(str(stable))]
    if not lower:
        raise CliError(f"no version below {stable} is listed in `spec.versions`: name one")
    return max(lower, key=_order)


def _spec(text: str, namespace: str, name: str) -> Any:
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise CliError(f"the file must be YAML: {str(error).splitlines()[0]}") from error
    for document in documents:
        if not isinstance(document, dict) or document.get("kind") != "Adapter":
            continue
        metadata = document.get("metadata") or {}
        if metadata.get("name") == name and metadata.get("namespace", namespace) == namespace:
            return document.get("spec")
    raise CliError(f"the file must hold the Adapter {namespace}/{name}")


def _order(version: str) -> tuple[list[int], int, list[tuple[int, int, str]]]:
    """SemVer 2.0.0, section 11: a release is above its pre-releases; numbers are below words."""
    core, _, pre = version.partition("-")
    if not re.fullmatch(r"\d+(\.\d+)*", core):
        raise CliError(f"version `{version}` must be a SemVer")
    parts = [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in (pre.split(".") if pre else [])
    ]
    return [int(part) for part in core.split(".")], 0 if pre else 1, parts
