"""What the processes that run steps have in common: the engine's own and each further rank of its model."""

from __future__ import annotations

import sys

FAILED = 70
"""Exit code (EX_SOFTWARE) of a process that cannot go on: its loop ended by a fault, or a rank was lost."""

_SWITCH_SECONDS = 0.0005


def let_steps_go_first() -> None:
    """A background thread keeps Python's lock for half a millisecond at most while a step wants it, not for 5."""
    sys.setswitchinterval(_SWITCH_SECONDS)
