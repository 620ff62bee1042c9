"""The API server goes away and comes back, and etcd forgets: nobody is needed to put the operator right."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from support.processes import Processes, wait_for
from tenantry.cluster import CONFIG_MAP, Client, Expired, Forbidden, Key, Obj, Unavailable, key_of
from tenantry.runtime.controller import Controller, Watch, label_key
from tenantry.runtime.hub import Hub
from tenantry.runtime.patience import EndlessBackoffs, patiently
from tenantry.runtime.resync import Resync
from tenantry.runtime.store import Store
from tenantry.runtime.watching import watch

if TYPE_CHECKING:
    from support.outage import Outage

pytestmark = pytest.mark.apiserver


async def test_ten_minutes_without_an_answer_are_borne_in_few_tries() -> None:
    """Time is what the pauses add up to: the server is away until 600 s of them have passed."""
    waited: list[float] = []

    def pauses() -> Any:
        for pause in EndlessBackoffs():
            waited.append(pause)
            yield 0.0

    async def attempt() -> str:
        if sum(waited) < 600.0:
            raise Unavailable(0, "Unreachable", "injected")
        return "back"

    assert await patiently("test", attempt, pauses()) == "back"
    assert len(waited) <= 50
    assert max(waited) <= 45.0


async def test_only_an_absent_server_is_waited_for() -> None:
    errors = iter([Unavailable(503, "ServiceUnavailable", ""), Expired(410, "Expired", "")])

    async def attempt() -> None:
        raise next(errors, Forbidden(403, "Forbidden", "no right"))

    with pytest.raises(Forbidden, match="no right"):
        await patiently("test", attempt, itertools.repeat(0.0))


class Watching:
    """Real watches and resyncs on a thread and loop of their own, as the process has them."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    async def _live(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        client = await Client.connect(self._kubeconfig, backoff_seconds=0.01)
        self.hub = Hub(Store(), [Controller("c", cast(Any, None), [Watch(CONFIG_MAP, label_key("root"))])])
        resync = Resync(client, self.hub, 3600.0)

        async def resyncs() -> None:
            await resync.complete()
            self._ready.set()
            await resync.run()

        parts = [asyncio.create_task(part) for part in (resyncs(), watch(self.hub, lambda: None))]
        await self._end.wait()
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await client.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)

    def holds(self, key: Key) -> bool:
        return self.hub.store.get(CONFIG_MAP, key) is not None

    def dirty(self) -> list[str]:
        workset = self.hub.queues["c"]._set
        found = []
        while (taken := workset.take(0.0)) is not None:
            found.append(taken[0].name)
            workset.done(taken[0], 0.0)
        return found


async def make(client: Client, name: str) -> Obj:
    labels = {"app.kubernetes.io/managed-by": "tenantry", "root": name}
    metadata = {"name": name, "namespace": "default", "labels": labels}
    return await client.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})


async def test_what_was_deleted_behind_a_compaction_is_evicted_without_a_resync_that_is_due(
    own_plane: Outage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """etcd really forgets: the watch gets 410, lists anew, and no event tells of the object that is gone."""
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(os.environ, "KUBECONFIG", str(own_plane.kubeconfig))
    client = await Client.connect(own_plane.kubeconfig)
    ghost, kept = [key_of(await make(client, f"{word}-{uuid.uuid4().hex[:6]}")) for word in ("ghost", "kept")]
    watching = Watching(own_plane.kubeconfig)
    try:
        assert watching.holds(ghost)
        own_plane.stop()
        assert own_plane.erase(f"configmaps/{ghost.namespace}/{ghost.name}") == 1
        own_plane.compact()
        watching.dirty()
        own_plane.start()
        await asyncio.to_thread(wait_for, lambda: not watching.holds(ghost), 60)
        assert ghost.name in watching.dirty()
        assert watching.holds(kept)
        assert "a watch began anew: comparing every kind" in caplog.messages
        later = key_of(await make(client, f"later-{uuid.uuid4().hex[:6]}"))
        await asyncio.to_thread(wait_for, lambda: watching.holds(later), 30)
    finally:
        watching.stop()
        await client.close()


def test_an_absence_costs_the_leader_and_nothing_else(own_plane: Outage, tmp_path: Path) -> None:
    """The leader ends with its Lease. A standby and one that starts meanwhile wait, and go on by themselves."""
    crds = Path(__file__).parents[3] / "crds"
    plane = own_plane.plane
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crds))
    plane.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(crds))
    namespace, name = f"outage-{uuid.uuid4().hex[:6]}", f"t-{uuid.uuid4().hex[:6]}"
    plane.kubectl("create", "namespace", namespace)
    with Processes(plane.kubeconfig, namespace, tmp_path, plane.kubectl) as operators:
        leader = operators.start()
        operators.tenant(name, "before")
        wait_for(lambda: operators.made(name) == "before")
        standby = operators.start()
        wait_for(lambda: operators.http(1, "/readyz")[0] == 200)

        own_plane.stop()
        since = time.monotonic()
        late = operators.start()
        assert leader.wait(40) == 1
        wait_for(lambda: operators.failures(2) >= 6)
        for number in (1, 2):
            assert operators.http(number, "/healthz")[0] == 200, "a restart would not help"
        assert operators.http(2, "/readyz")[0] == 503
        away = time.monotonic() - since
        for number in (1, 2):
            assert operators.failures(number) <= 3 * away + 20, "no storm of requests"

        own_plane.start()
        operators.tenant(name, "after")
        wait_for(lambda: operators.made(name) == "after" and "after" in operators.message(name), 90)
        wait_for(lambda: operators.http(2, "/readyz")[0] == 200, 90)
        assert standby.poll() is None
        assert late.poll() is None
        started = [json.dumps(entry) for entry in operators.log(2) if "awaited" in entry["message"]]
        assert started, "it said what it waited for"
