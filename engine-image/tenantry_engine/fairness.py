"""Fair sharing of a replica between tenants: the virtual token counter (Sheng et al., OSDI 2024, arXiv 2401.00588).

Each tenant has a counter of service received, divided by its weight; whoever may be served and has received least is
served next. Pure: no clock, no sequences, only tenants and costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

INPUT_COST = 1.0
OUTPUT_COST = 2.0


@dataclass
class Account:
    """One tenant's standing. `pending` counts its requests in the engine, waiting or running."""

    weight: int = 1
    service: float = 0.0
    pending: int = 0


class FairShare:
    """The counters of all tenants."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._left_at = 0.0  # service of the last tenant that became idle

    def arrive(self, tenant: str, weight: int) -> None:
        """A request of the tenant came. One that was idle is lifted to the others, so that idling earns no credit."""
        account = self._accounts.setdefault(tenant, Account())
        account.weight = weight
        if account.pending == 0:
            account.service = max(account.service, self._floor())
        account.pending += 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant ended, whichever way."""
        account = self._accounts[tenant]
        account.pending -= 1
        if account.pending == 0:
            self._left_at = account.service
            self._forget_idle()

    def charge(self, tenant: str, inputs: int, outputs: int) -> None:
        """Tokens scheduled for the tenant: uncached input and output ones."""
        account = self._accounts[tenant]
        account.service += (INPUT_COST * inputs + OUTPUT_COST * outputs) / account.weight

    def service(self, tenant: str) -> float:
        """Weighted service so far."""
        return self._accounts[tenant].service

    def least(self, tenants: Iterable[str]) -> str | None:
        """Whose turn it is."""
        return min(tenants, key=lambda tenant: (self._accounts[tenant].service, tenant), default=None)

    def _floor(self) -> float:
        active = [account.service for account in self._accounts.values() if account.pending]
        return min(active, default=self._left_at)

    def _forget_idle(self) -> None:
        """An idle tenant below the floor would be lifted to it anyway: its counter says nothing any more."""
        floor = self._floor()
        for tenant in [t for t, a in self._accounts.items() if a.pending == 0 and a.service <= floor]:
            del self._accounts[tenant]
