"""`tenantry adapters`: the digest of a PEFT folder, and its way into a registry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tenantry.api.adapter import SEMVER
from tenantry.api.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from tenantry.fetcher.artifact import MAX_CONFIG_BYTES, Facts, facts, read_header
from tenantry.fetcher.errors import FetchError
from tenantry.fetcher.reference import Reference

from .errors import CliError


@dataclass(frozen=True)
class LocalAdapter:
    """A folder that holds what every engine would accept."""

    folder: Path
    digest: str
    facts: Facts


def inspect_folder(folder: Path) -> LocalAdapter:
    """Check a PEFT folder as the fetcher would. Raises CliError."""
    config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    try:
        if config.stat().st_size > MAX_CONFIG_BYTES:
            raise CliError(f"`{config}` must have at most {MAX_CONFIG_BYTES} bytes")
        with weights.open("rb") as file:
            header = read_header(file, weights.stat().st_size)
        return LocalAdapter(folder, adapter_digest(folder), facts(config.read_bytes(), header))
    except OSError as error:
        raise CliError(
            f"`{folder}` must be a PEFT folder with {CONFIG_FILE} and {WEIGHTS_FILE}: {error.strerror}"
        ) from error
    except FetchError as error:
        raise CliError(f"`{folder}`: {error.message}") from error


def push_folder(folder: Path, target: str, *, plain_http: bool, force: bool) -> tuple[LocalAdapter, str]:
    """Push the folder; the adapter and its source, pinned to the manifest's digest. Raises CliError."""
    from .registry import push_adapter

    adapter = inspect_folder(folder)
    reference = parse_target(target)
    digest = push_adapter(folder, reference, plain_http=plain_http, force=force)
    return adapter, f"{target}@{digest}"


def parse_target(target: str) -> Reference:
    """Raises CliError."""
    try:
        reference = Reference.parse(target)
    except ValueError as error:
        raise CliError(str(error).replace("`source`", "TARGET")) from error
    if reference.tag is None or reference.digest is not None:
        raise CliError(
            "TARGET must name a tag and no digest, e.g. oci://registry.example.com/acme/tone:1.0.0"
        )
    return reference


def version_of(target: str, version: str | None) -> str:
    """The version that an entry for this target has. Raises CliError."""
    chosen = version or parse_target(target).tag or ""
    if not re.fullmatch(SEMVER, chosen) or "--" in chosen or len(chosen) > 63:
        raise CliError(
            "the tag is no version: `--version` must be a SemVer without `+` and `--`, e.g. --version 1.0.0"
        )
    return chosen


def version_entry(adapter: LocalAdapter, source: str, version: str) -> str:
    """YAML of one item of `spec.versions`."""
    return f"- version: {version}\n  digest: {adapter.digest}\n  source: {source}\n  rank: {adapter.facts.rank}\n"
