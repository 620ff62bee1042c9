"""How text and numbers that somebody else wrote are shown and refused: short, printable, naming the file at fault."""

from __future__ import annotations

from tenantry_engine.digest import CONFIG_FILE, WEIGHTS_FILE
from tenantry_engine.errors import AdapterError

_SHOWN = 80


def shown(value: object) -> str:
    """A value for a message: ASCII, no control characters, at most 80 characters."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = value if isinstance(value, str) else repr(value)
    text = ascii(text[: _SHOWN + 1])[1:-1]
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def unsupported(message: str) -> AdapterError:
    """The configuration asks for what this engine does not serve."""
    return AdapterError("UnsupportedConfig", f"`{CONFIG_FILE}`: {message}")


def invalid(message: str) -> AdapterError:
    """The weights are not what they should be."""
    return AdapterError("InvalidTensors", f"`{WEIGHTS_FILE}`: {message}")
