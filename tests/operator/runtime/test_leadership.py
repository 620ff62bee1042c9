"""Leadership: one at a time, a higher epoch for each, and an end to whoever loses it."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tenantry.cluster import LEASE, Client, Key, key_of, leases, uid_of
from tenantry.cluster import status as timestamps
from tenantry.cluster.leases import LeaseLock, LeaseTimes
from tenantry.runtime import leadership as leadership_module
from tenantry.runtime.leadership import LEASE_NAME, Leadership

pytestmark = pytest.mark.apiserver

QUICK = LeaseTimes(duration=2, renew_within=1.0, retry=0.1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_holder_that_renews_keeps_the_lease_and_a_silent_one_loses_it(
    client: Client, namespace: str
) -> None:
    clock, key = Clock(), Key(namespace, "lock")
    one = LeaseLock(client, key, "one", QUICK, clock)
    two = LeaseLock(client, key, "two", QUICK, clock)
    assert await one.acquire_or_renew()
    first = one.transitions
    assert not await two.acquire_or_renew()
    for _ in range(3):
        clock.now += 1.5
        assert await one.acquire_or_renew()
        assert not await two.acquire_or_renew()
    clock.now += 2.5
    assert await two.acquire_or_renew()
    assert two.transitions == first + 1
    assert not await one.acquire_or_renew()


@pytest.mark.parametrize("hours", [-1, 1])
async def test_what_the_clocks_of_others_say_counts_for_nothing(
    client: Client, namespace: str, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder's clock is an hour off: it keeps the Lease while it renews, and loses it when it falls silent."""

    def theirs() -> str:
        return timestamps.micro_timestamp(datetime.now(UTC) + timedelta(hours=hours))

    clock, key = Clock(), Key(namespace, f"skewed{hours}")
    one = LeaseLock(client, key, "one", QUICK, clock)
    two = LeaseLock(client, key, "two", QUICK, clock)
    with monkeypatch.context() as skewed:
        skewed.setattr(leases, "micro_timestamp", theirs)
        assert await one.acquire_or_renew()
        for _ in range(3):
            clock.now += 1.5
            assert await one.acquire_or_renew()
            assert not await two.acquire_or_renew()
    live = await client.get(LEASE, key)
    assert live is not None
    renewed = datetime.fromisoformat(live["spec"]["renewTime"])
    assert abs((renewed - datetime.now(UTC)) / timedelta(hours=hours) - 1) < 0.1
    clock.now += QUICK.duration / 2
    assert not await two.acquire_or_renew()
    clock.now += QUICK.duration
    assert await two.acquire_or_renew()


async def test_a_released_lease_is_taken_at_once(client: Client, namespace: str) -> None:
    clock, key = Clock(), Key(namespace, "lock")
    one, two = (LeaseLock(client, key, name, QUICK, clock) for name in ("one", "two"))
    assert await one.acquire_or_renew()
    await one.release()
    assert await two.acquire_or_renew()
    assert two.transitions == one.transitions + 1


async def test_two_that_reach_for_it_at_the_same_time_do_not_both_get_it(
    client: Client, namespace: str
) -> None:
    locks = [LeaseLock(client, Key(namespace, "lock"), f"n{n}", QUICK, Clock()) for n in range(8)]
    held = await asyncio.gather(*(lock.acquire_or_renew() for lock in locks))
    assert held.count(True) == 1


async def test_the_epoch_never_goes_back_even_when_the_lease_was_deleted(
    client: Client, namespace: str
) -> None:
    key = Key(namespace, "lock")
    epochs = []
    for number in range(4):
        lock = LeaseLock(client, key, f"holder-{number}", QUICK, Clock())
        assert await lock.acquire_or_renew()
        epochs.append(lock.transitions)
        if number == 2:
            await asyncio.sleep(3)  # changes of leadership are seconds apart
            live = await client.get(LEASE, key)
            assert live is not None
            await client.delete(LEASE, key_of(live), uid=uid_of(live))
        else:
            await lock.release()
    assert epochs == sorted(set(epochs))
    assert epochs[-1] < 2**31


async def test_a_follower_takes_over_with_a_higher_fence_and_the_loser_is_told_to_end(
    apiserver_kubeconfig: Path, client: Client, namespace: str
) -> None:
    lost = threading.Event()
    one = Leadership(apiserver_kubeconfig, namespace, name="one", times=QUICK, on_lost=lost.set)
    with pytest.raises(RuntimeError, match="only the leader"):
        one.fence()
    one.start()
    async with asyncio.timeout(20):
        await one.elected.wait()
    fences = [one.fence(), one.fence()]
    two = Leadership(apiserver_kubeconfig, namespace, name="two", times=QUICK, on_lost=lambda: None)
    two.start()
    assert not two.elected.is_set()

    # somebody takes the Lease away by hand: the holder must notice and end
    async with asyncio.timeout(20):
        while not lost.is_set():
            await client.merge_patch(LEASE, Key(namespace, LEASE_NAME), {"spec": {"holderIdentity": "thief"}})
            await asyncio.sleep(0.05)
        await two.elected.wait()
    fences += [two.fence(), two.fence()]
    assert fences == sorted(set(fences))
    assert fences[2].epoch > fences[1].epoch
    await asyncio.to_thread(two.stop)
    await asyncio.to_thread(one.stop)
    live = await client.get(LEASE, Key(namespace, LEASE_NAME))
    assert live is not None
    assert live["spec"]["holderIdentity"] == ""


async def test_a_leader_that_cannot_reach_the_api_server_gives_up_in_time(
    apiserver_kubeconfig: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = threading.Event()
    leadership = Leadership(apiserver_kubeconfig, namespace, name="cut", times=QUICK, on_lost=lost.set)
    leadership.start()
    async with asyncio.timeout(20):
        await leadership.elected.wait()

    async def unreachable(self: Leadership, lock: LeaseLock) -> bool | None:
        return None

    monkeypatch.setattr(Leadership, "_attempt", unreachable)
    assert await asyncio.to_thread(lost.wait, QUICK.duration + 5)
    await asyncio.to_thread(leadership.stop)


async def test_a_leadership_thread_that_crashes_ends_the_process(
    apiserver_kubeconfig: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = threading.Event()
    leadership = Leadership(apiserver_kubeconfig, namespace, name="crash", times=QUICK, on_lost=lost.set)
    leadership.start()
    async with asyncio.timeout(20):
        await leadership.elected.wait()
    monkeypatch.setattr(Leadership, "_attempt", None)
    assert await asyncio.to_thread(lost.wait, 10)


async def test_a_leader_that_was_stopped_for_long_does_not_trust_its_lease(
    apiserver_kubeconfig: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the Lease itself can tell: others may have taken it meanwhile."""
    leadership = Leadership(apiserver_kubeconfig, namespace, name="sleeper", on_lost=lambda: None)
    assert not leadership.leads()
    leadership.start()
    async with asyncio.timeout(20):
        await leadership.elected.wait()
    assert leadership.leads()
    leadership.fence()
    await asyncio.to_thread(leadership.stop)  # nobody renews any more
    awake = time.monotonic() + LeaseTimes().duration + 1
    with monkeypatch.context() as later:
        later.setattr(leadership_module.time, "monotonic", lambda: awake)
        assert not leadership.leads()
        with pytest.raises(RuntimeError, match="only the leader"):
            leadership.fence()
