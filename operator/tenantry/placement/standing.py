"""Whether a replica counts: only one that has not been ready for long is left, and it must be ready as long to return.

A restart, a rolling upgrade or a short outage moves nobody. After a restart of the operator the wait begins anew.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import Final

PATIENCE_SECONDS: Final = 300.0


class Standing(IntEnum):
    """READY takes tenants and draws them; AWAY keeps whom it has; LOST is left by everybody who can."""

    READY = 0
    AWAY = 1
    LOST = 2


class Standings:
    """Since when each replica is away, or back after it was lost. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._away: dict[Hashable, float] = {}
        self._back: dict[Hashable, float] = {}

    def see(self, replica: Hashable, ready: bool, now: float) -> Standing:
        """Take note of what the replica is now; how it counts."""
        if not ready:
            since = self._away.setdefault(replica, now)
            if self._back.pop(replica, None) is not None:
                since = self._away[replica] = now - PATIENCE_SECONDS  # it did not last
            return Standing.LOST if now - since >= PATIENCE_SECONDS else Standing.AWAY
        since = self._away.pop(replica, now)
        if now - since >= PATIENCE_SECONDS:
            self._back[replica] = now
        back = self._back.get(replica)
        if back is None:
            return Standing.READY
        if now - back < PATIENCE_SECONDS:
            return Standing.AWAY
        del self._back[replica]
        return Standing.READY

    def changes_in(self, replica: Hashable, now: float, *, seated: bool) -> float | None:
        """Seconds until it counts otherwise, staying as it was last seen; None: never.

        That a replica turns lost concerns only who is seated there; that it is back, everybody on the lane.
        """
        since = self._back.get(replica)
        if since is None and seated:
            since = self._away.get(replica)
        if since is None or now - since >= PATIENCE_SECONDS:
            return None
        return PATIENCE_SECONDS - (now - since)

    def is_lost(self, replica: Hashable, now: float) -> bool:
        """Whether tenants had time to leave it."""
        since = self._away.get(replica)
        return since is not None and now - since >= PATIENCE_SECONDS

    def forget(self, replica: Hashable) -> None:
        """The replica is no longer asked for."""
        self._away.pop(replica, None)
        self._back.pop(replica, None)
