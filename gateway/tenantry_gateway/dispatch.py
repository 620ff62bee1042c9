"""Admission: limits, queue and slots decided together, at one moment, when a request's turn comes.

All of it runs on the event loop without an await between the question and the act, so nothing can race. Whatever frees
something (an end, a poll, a changed Tenant) calls `pump`, which runs everything that now fits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tenantry.api.tenant import EffectiveLimits

from .errors import ApiError
from .fairqueue import FairQueue, Verdict
from .limits import Fit, Lease, Limiter, month_of, until_next_month
from .replicas import Replica, Replicas
from .routing import choose_replica
from .state import Lane, Pool, State, Target, Tenant

# For so long after a tenant had to wait for a slot, every other keeps to its share of each replica.
CONTENDED_SECONDS = 5.0
SHARE = 4


@dataclass(frozen=True, slots=True)
class Destination:
    """For whom and to what a request goes: all that an identity says."""

    tenant: Tenant
    pool: Pool
    lane: Lane
    target: Target


@dataclass(eq=False)
class Ticket:
    """A valid request that wants to run. `reserve` in tokens, the most it can use."""

    id: str
    tenant: Tenant
    pool: Pool
    lane: Lane
    target: Target
    sequences: int
    reserve: int
    arrived: float = 0.0
    future: asyncio.Future[Grant] | None = None
    blocked_by: Fit | None = None

    @property
    def destination(self) -> Destination:
        return Destination(self.tenant, self.pool, self.lane, self.target)


@dataclass(eq=False)
class Grant:
    """The right to run on a replica, until it is settled, once."""

    ticket: Ticket
    replica: Replica
    queued_seconds: float
    settled: bool = False


@dataclass
class _LaneQueue:
    queue: FairQueue[Ticket] = field(default_factory=FairQueue)
    active: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)


class Dispatcher:
    """The queues of all lanes."""

    def __init__(
        self,
        state: State,
        limiter: Limiter,
        replicas: Replicas,
        *,
        queue_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self.limiter = limiter
        self._replicas = replicas
        self._queue_seconds = queue_seconds
        self._clock = clock
        self._wall = wall
        self._lanes: dict[tuple[str, str], _LaneQueue] = {}
        replicas.on_change = self.pump_all

    def servable(self, pool: Pool, lane: Lane, target: Target) -> bool:
        """Whether any replica could serve the target, now or when a slot is free."""
        return any(replica.serves(target) for replica in self._replicas.of(pool, lane))

    def queued(self) -> int:
        return sum(len(lane.queue) for lane in self._lanes.values())

    async def admit(self, ticket: Ticket) -> Grant:
        """Wait for the ticket's turn. Raises ApiError with the reason when it is shed.

        When the waiting task is cancelled, nothing is left behind.
        """
        tenant, limits = ticket.tenant, ticket.tenant.limits
        assert limits is not None
        key = (ticket.pool.uid, ticket.lane.name)
        lane = self._lanes.setdefault(key, _LaneQueue())
        ticket.arrived = self._clock()
        ticket.future = asyncio.get_running_loop().create_future()
        lane.active[tenant.uid] = ticket.arrived
        lane.weights[tenant.uid] = tenant.weight
        length = lane.queue.length(tenant.uid)
        if length > 0 and length >= limits.max_queued:
            raise self._shed(ticket, "queue_full", "your queue is full")
        lane.queue.push(tenant.uid, tenant.weight, ticket.reserve, ticket)
        self._pump(lane)
        if not ticket.future.done() and limits.max_queued == 0:
            lane.queue.remove(tenant.uid, ticket)
            raise self._refuse_unqueued(ticket)
        timer = asyncio.get_running_loop().call_later(self._queue_seconds, self._time_out, lane, ticket)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            lane.queue.remove(tenant.uid, ticket)
            if ticket.future.done() and not ticket.future.cancelled() and ticket.future.exception() is None:
                self.settle(ticket.future.result(), 0)
            raise
        finally:
            timer.cancel()

    def move(self, grant: Grant, tried: set[str]) -> bool:
        """Give the grant a replica that was not tried yet. False when no other serves the target."""
        ticket = grant.ticket
        candidates = [
            r
            for r in self._replicas.of(ticket.pool, ticket.lane)
            if r.serves(ticket.target) and r.name not in tried
        ]
        free = [r for r in candidates if r.fits(ticket.sequences, ticket.lane)]
        replica = choose_replica(free or candidates, ticket.target)
        if replica is None:
            return False
        grant.replica.give(ticket.tenant.uid, ticket.sequences, ticket.reserve)
        replica.take(ticket.tenant.uid, ticket.sequences, ticket.reserve)
        grant.replica = replica
        return True

    def alive(self, grant: Grant) -> None:
        """Keep the lease of a running request."""
        lease = self.limiter.lease(grant.ticket.tenant.uid, grant.ticket.id)
        if lease is not None:
            self.limiter.renew(lease, self._clock())

    def settle(self, grant: Grant, used: int) -> None:
        """End the grant, once: charge what was used, free the slot, let others run. Never waits."""
        if grant.settled:
            return
        grant.settled = True
        ticket = grant.ticket
        uid, limits = ticket.tenant.uid, self._limits(ticket)
        self.limiter.settle(uid, ticket.id, limits, used, self._clock())
        grant.replica.give(uid, ticket.sequences, ticket.reserve)
        lane = self._lanes[(ticket.pool.uid, ticket.lane.name)]
        lane.queue.refund(uid, ticket.reserve - used)
        self._pump(lane)

    def pump_all(self) -> None:
        """Run whatever fits now, in every lane."""
        for lane in self._lanes.values():
            self._pump(lane)

    def _pump(self, lane: _LaneQueue) -> None:
        chosen: dict[int, Replica] = {}
        refusals: dict[int, ApiError] = {}

        def judge(ticket: Ticket) -> Verdict:
            outcome = self._judge(lane, ticket)
            if isinstance(outcome, ApiError):
                refusals[id(ticket)] = outcome
                return Verdict.DROP
            if outcome is None:
                return Verdict.WAIT
            chosen[id(ticket)] = outcome
            return Verdict.RUN

        while (found := lane.queue.pop(judge)) is not None:
            verdict, ticket = found
            future = ticket.future
            if future is None or future.done():
                continue
            if verdict is Verdict.DROP:
                future.set_exception(refusals[id(ticket)])
                continue
            replica = chosen[id(ticket)]
            now, uid = self._clock(), ticket.tenant.uid
            self.limiter.acquire(
                Lease(ticket.id, ticket.sequences, ticket.reserve, month_of(self._wall())),
                uid,
                self._limits(ticket),
                now,
            )
            replica.take(uid, ticket.sequences, ticket.reserve)
            future.set_result(Grant(ticket, replica, now - ticket.arrived))

    def _judge(self, lane: _LaneQueue, ticket: Ticket) -> Replica | ApiError | None:
        """The replica to run on, the reason to refuse, or None: wait."""
        tenant = self._state.tenants.get(ticket.tenant.name)
        if tenant is None or tenant.uid != ticket.tenant.uid or tenant.suspended:
            return ApiError(403, "tenant_suspended", "the tenant was suspended while the request waited")
        now, wall = self._clock(), self._wall()
        fit, wait = self.limiter.fit(
            tenant.uid, self._limits(ticket), ticket.reserve, ticket.sequences, now=now, month=month_of(wall)
        )
        ticket.blocked_by = None if fit is Fit.YES else fit
        if fit is Fit.BUDGET:
            return ApiError(
                429, "budget", "the tokens of this month are used up", retry_after=until_next_month(wall)
            )
        if fit is Fit.TOKENS:
            return ApiError(
                429, "rate_tokens", "the request does not fit your tokens per minute", retry_after=wait
            )
        if fit is not Fit.YES:
            return None
        able = [
            r
            for r in self._replicas.of(ticket.pool, ticket.lane)
            if r.serves(ticket.target) and r.fits(ticket.sequences, ticket.lane)
        ]
        if not able:
            lane.waited[tenant.uid] = now
            return None
        if _recent(lane.waited, now) - {tenant.uid}:
            active = _recent(lane.active, now) | lane.queue.tenants()
            lane.weights = {uid: weight for uid, weight in lane.weights.items() if uid in active}
            share = tenant.weight / sum(lane.weights.values())
            able = [r for r in able if _within_share(r, ticket, share)]
        return choose_replica(able, ticket.target)

    def _time_out(self, lane: _LaneQueue, ticket: Ticket) -> None:
        if not lane.queue.remove(ticket.tenant.uid, ticket) or ticket.future is None or ticket.future.done():
            return
        if ticket.blocked_by is not None:
            ticket.future.set_exception(
                self._shed(ticket, "queue_timeout", "the request waited for too long")
            )
        else:
            ticket.future.set_exception(self._no_capacity(ticket))

    def _refuse_unqueued(self, ticket: Ticket) -> ApiError:
        if ticket.blocked_by is not None:
            return self._shed(ticket, "concurrency", "all that you may have in flight is in flight")
        return self._no_capacity(ticket)

    def _no_capacity(self, ticket: Ticket) -> ApiError:
        if not self.servable(ticket.pool, ticket.lane, ticket.target):
            return no_endpoint(ticket.target)
        return ApiError(
            503, "no_capacity", "all replicas of the model are busy", retry_after=self._drain(ticket)
        )

    def _shed(self, ticket: Ticket, code: str, message: str) -> ApiError:
        return ApiError(429, code, message, retry_after=self._drain(ticket))

    def _drain(self, ticket: Ticket) -> float:
        """Seconds after which a place is likely: a guess, since nobody knows how long answers become."""
        lane = self._lanes[(ticket.pool.uid, ticket.lane.name)]
        limits = self._limits(ticket)
        return 1.0 + min(29.0, lane.queue.length(ticket.tenant.uid) / limits.max_in_flight)

    def _limits(self, ticket: Ticket) -> EffectiveLimits:
        """The limits in force now, else those at arrival."""
        tenant = self._state.tenants.get(ticket.tenant.name)
        limits = tenant.limits if tenant is not None and tenant.uid == ticket.tenant.uid else None
        found = limits or ticket.tenant.limits
        assert found is not None
        return found


def _recent(moments: dict[str, float], now: float) -> set[str]:
    """Tenants whose moment is not long ago; forgets the others."""
    for uid in [uid for uid, moment in moments.items() if now - moment > CONTENDED_SECONDS]:
        del moments[uid]
    return set(moments)


def _within_share(replica: Replica, ticket: Ticket, share: float) -> bool:
    """Whether the tenant stays within a quarter of the replica, or within its share by weight where that is more.

    Rounded up, so that tenants that all wait leave no slot idle.
    """
    slots = replica.slots(ticket.lane)
    mine = replica.by_tenant.get(ticket.tenant.uid, 0)
    return mine == 0 or mine + ticket.sequences <= max(slots // SHARE, math.ceil(slots * share))


def no_endpoint(target: Target) -> ApiError:
    """Nothing serves the target; never answered by something else instead."""
    if target.digest:
        return ApiError(503, "adapter_unavailable", "no replica has the model's adapter yet", retry_after=2)
    return ApiError(503, "no_endpoint", "no replica of the model is ready", retry_after=2)
