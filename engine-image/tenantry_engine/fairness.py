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
        self._last = ""  # the tenant that was given prompt tokens last
        self._last_service = 0.0

    def arrive(self, tenant: str, weight: int, contending: Iterable[str] = ()) -> None:
        """A request of the tenant came. One that was idle is lifted, so that idling earns no credit: to the least of
        the tenants that are `contending` for prompt tokens, else to the one that was given some last."""
        account = self._accounts.setdefault(tenant, Account())
        account.weight = weight
        if account.pending == 0:
            floor = min((self._accounts[other].service for other in contending), default=self._last_service)
            account.service = max(account.service, floor)
        account.pending += 1

    def idle(self, tenant: str) -> bool:
        """Whether the tenant has no request here."""
        account = self._accounts.get(tenant)
        return account is None or account.pending == 0

    def leave(self, tenant: str) -> None:
        """A request of the tenant ended, whichever way."""
        account = self._accounts[tenant]
        account.pending -= 1
        if account.pending == 0:
            self._forget_idle()

    def charge(self, tenant: str, inputs: int, outputs: int, *, prompt: bool = False) -> None:
        """Tokens scheduled for the tenant: uncached input and output ones. `prompt` = it contended for them."""
        account = self._accounts[tenant]
        account.service += (INPUT_COST * inputs + OUTPUT_COST * outputs) / account.weight
        if prompt or tenant == self._last:
            self._last, self._last_service = tenant, account.service

    def service(self, tenant: str) -> float:
        """Weighted service so far."""
        return self._accounts[tenant].service

    def least(self, tenants: Iterable[str]) -> str | None:
        """Whose turn it is."""
        return min(tenants, key=lambda tenant: (self._accounts[tenant].service, tenant), default=None)

    def _forget_idle(self) -> None:
        """An idle tenant below all others would be lifted anyway: its counter says nothing any more."""
        active = [account.service for account in self._accounts.values() if account.pending]
        floor = min(active, default=self._last_service)
        for tenant in [t for t, a in self._accounts.items() if a.pending == 0 and a.service <= floor]:
            del self._accounts[tenant]
