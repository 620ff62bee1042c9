"""`tenantry promote`: the one-line diff that promotes a version; every other byte of the file stays as it is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tenantry.api.adapter import AdapterSpec

from .errors import CliError, first_problem, read_text


def promote_file(path: Path, adapter: str, version: str) -> str:
    """Rewrite the file in place, atomically; a sentence that says what changed. Raises CliError."""
    namespace, slash, name = adapter.partition("/")
    if not slash or not namespace or not name:
        raise CliError("ADAPTER must be NAMESPACE/NAME, e.g. acme-ml/tone")
    text = read_text(path, "file")
    changed, before = promote_text(text, namespace, name, version)
    if changed == text:
        return f"{adapter}: stable is {version} already"
    _write(path, changed)
    return f"{adapter}: stable {before} -> {version} in {path}; commit it to promote"


def promote_text(text: str, namespace: str, name: str, version: str) -> tuple[str, str]:
    """The text with the stable channel at the version, and the version it had. Raises CliError."""
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise CliError(f"the file must be YAML: {str(error).splitlines()[0]}") from error
    index = _find(documents, namespace, name)
    try:
        spec = AdapterSpec.model_validate(documents[index].get("spec"))
    except ValidationError as error:
        raise CliError(f"the Adapter in the file is not valid: {first_problem(error)}") from error
    listed = [entry.version for entry in spec.versions]
    if version not in listed:
        raise CliError(f"VERSION must be one of `spec.versions`: {', '.join(listed)}")
    channels = _child(_child(nodes[index], "spec"), "channels")
    for channel in channels.value:
        if _child(channel, "name").value == "stable":
            old = _child(channel, "version")
            start, end = old.start_mark.index, old.end_mark.index
            # A SemVer has two dots, so that plain YAML reads a text, too: the style stays as it was.
            style = old.style if old.style in ("'", '"') else ""
            if old.value == version:
                return text, version
            return f"{text[:start]}{style}{version}{style}{text[end:]}", str(old.value)
    raise CliError("`spec.channels` must hold the channel stable")


def _find(documents: list[Any], namespace: str, name: str) -> int:
    for index, document in enumerate(documents):
        if not isinstance(document, dict) or document.get("kind") != "Adapter":
            continue
        metadata = document.get("metadata") or {}
        if metadata.get("name") == name and metadata.get("namespace", namespace) == namespace:
            return index
    raise CliError(f"the file must hold the Adapter {namespace}/{name}")


def _child(node: Any, key: str) -> Any:
    """The value node of a key in a mapping node."""
    for name, value in node.value:
        if name.value == key:
            return value
    raise CliError(f"the Adapter in the file must have `{key}`")


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).chmod(path.stat().st_mode & 0o7777)
    os.replace(file.name, path)
