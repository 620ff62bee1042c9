"""`tenantry keys rotate`: a second key beside the one in use, which gets an end, in a file with the Tenant.

Both keys are valid until then, so clients move without a gap. Every byte that is not part of the change stays.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from .errors import CliError, read_text
from .files import rewrite
from .keys import lifetime, mint_key


@dataclass(frozen=True)
class Rotation:
    """`key` is the new key itself, shown once."""

    key: str
    name: str
    sentence: str


def rotate_file(
    path: Path, tenant: str, name: str, *, overlap: str, expires_in: str | None, now: datetime | None = None
) -> Rotation:
    """Rewrite the file in place. Raises CliError."""
    now = now or datetime.now(UTC)
    end = f"{now + lifetime('--overlap', overlap):%Y-%m-%dT%H:%M:%SZ}"
    text = read_text(path, "file")
    document, node = _tenant(text, tenant)
    known = [entry.get("name") for entry in _keys(document)]
    if name not in known:
        listed = ", ".join(f"`{key}`" for key in known) or "none"
        raise CliError(f"`--name` must be a key of the Tenant in the file ({listed})")
    new_name = _free(name, known, now)
    key, entry = mint_key(tenant, new_name, expires_in)
    changed = _edit(text, node, known.index(name), entry, end)
    wanted = _wanted(document, name, end, yaml.safe_load(entry)[0])
    if _plain(_tenant(changed, tenant)[0]) != _plain(wanted):
        raise CliError(
            "the file's YAML is too unusual to edit: write `apiKeys` as a list with one key a line"
        )
    rewrite(path, changed)
    sentence = f"{tenant}: key `{new_name}` beside `{name}`, which ends {end}, in {path}; commit it"
    return Rotation(key, new_name, sentence)


def _free(name: str, known: list[Any], now: datetime) -> str:
    """The name with today's date, and a number where that is taken."""
    base = re.sub(r"-\d{8}(-\d+)?$", "", name)[:50] + f"-{now:%Y%m%d}"
    found, number = base, 1
    while found in known:
        number += 1
        found = f"{base}-{number}"
    return found


def _tenant(text: str, tenant: str) -> tuple[Any, Any]:
    """The Tenant's document and its node. Raises CliError."""
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise CliError(f"the file must be YAML: {str(error).splitlines()[0]}") from error
    for document, node in zip(documents, nodes, strict=True):
        found = isinstance(document, dict) and document.get("kind") == "Tenant"
        if found and (document.get("metadata") or {}).get("name") == tenant:
            return document, node
    raise CliError(f"the file must hold the Tenant {tenant}")


def _keys(document: Any) -> list[dict[str, Any]]:
    try:
        found = document["spec"]["auth"]["apiKeys"]
    except (KeyError, TypeError):
        found = None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise CliError("the Tenant in the file must have `spec.auth.apiKeys`: add one by `keys mint`")
    return found


def _child(node: Any, key: str) -> Any:
    return next((value for name, value in node.value if name.value == key), None)


def _edit(text: str, node: Any, index: int, entry: str, end: str) -> str:
    """The text with `entry` behind the last key, and the end on the key at `index`. From back to front."""
    listed = _child(_child(_child(node, "spec"), "auth"), "apiKeys")
    last = listed.value[-1]
    insert, at = _behind(text, listed, last, entry)
    text = text[:at] + insert + text[at:]
    old = listed.value[index]
    stored = _child(old, "expiresAt")
    if stored is not None:
        start, stop = stored.start_mark.index, stored.end_mark.index
        return f'{text[:start]}"{end}"{text[stop:]}'
    value = old.value[-1][1]
    after = value.end_mark.index
    if old.flow_style:
        return f'{text[:after]}, expiresAt: "{end}"{text[after:]}'
    column = old.value[0][0].start_mark.column
    return f'{text[:after]}\n{" " * column}expiresAt: "{end}"{text[after:]}'


def _behind(text: str, listed: Any, last: Any, entry: str) -> tuple[str, int]:
    """What to insert behind the last key, and where."""
    if listed.flow_style:
        return f", {entry.removeprefix('- ')}", last.end_mark.index
    line = text.rfind("\n", 0, last.start_mark.index) + 1
    dash = text.index("-", line)
    stop = last.value[-1][1].end_mark.index if not last.flow_style else last.end_mark.index
    newline = text.find("\n", stop)
    lead = "" if newline >= 0 else "\n"
    at = len(text) if newline < 0 else newline + 1
    return f"{lead}{' ' * (dash - line)}{entry}\n", at


def _wanted(before: Any, name: str, end: str, entry: dict[str, Any]) -> Any:
    """The document as it must read after the edit of its text."""
    wanted = copy.deepcopy(before)
    keys = _keys(wanted)
    next(key for key in keys if key.get("name") == name)["expiresAt"] = end
    keys.append(entry)
    return wanted


def _plain(value: Any) -> Any:
    """Times as text: YAML reads an unquoted one as a time."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return f"{value:%Y-%m-%dT%H:%M:%SZ}" if isinstance(value, datetime) else value
