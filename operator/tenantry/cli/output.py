"""How commands that read print what they found: for people (`table`, `wide`) or for programs (`json`, `yaml`)."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import yaml


class View(StrEnum):
    """How results are printed."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"

    @property
    def structured(self) -> bool:
        """Whether a program reads it."""
        return self in (View.JSON, View.YAML)


def document(value: Any, view: View) -> str:
    """The value as JSON or YAML, fields in the order given."""
    if view is View.JSON:
        return json.dumps(value, indent=2) + "\n"
    return str(yaml.safe_dump(value, sort_keys=False, width=110, allow_unicode=True))
