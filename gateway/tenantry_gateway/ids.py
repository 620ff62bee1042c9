"""Ids of requests: UUID version 7 (RFC 9562), so that the ledger grows in the order of its key."""

from __future__ import annotations

import os
import time
import uuid


def uuid7() -> str:
    """48 bits of Unix milliseconds, then 74 random bits."""
    value = int(time.time() * 1000) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))
