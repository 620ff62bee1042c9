"""Driver and fetcher's push against a real engine process: the contract between rooms, not an imitation of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cluster.pki import certify
from cluster.process import dying_with_me, free_port
from tenantry.api import names
from tenantry.api.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest, blob_chunks
from tenantry.api.identity import Signer
from tenantry.engines import (
    AdapterDeclaration,
    AdapterReport,
    AdapterState,
    EngineError,
    Fence,
    Replica,
    ReplicaReport,
    TenantryDriver,
)
from tenantry.engines.http import new_client
from tenantry.fetcher.push import Pusher, PushError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))

from engine_world import TinyModel  # type: ignore[import-not-found, unused-ignore]

AUDIENCE = "pool-uid"


@dataclass
class Room:
    """An engine process and the two who speak to it."""

    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes]
    replica: Replica
    signers: dict[str, Signer]
    model: TinyModel
    counter: int = 0

    def restart(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self.process = self.start()


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    identity = tmp_path_factory.mktemp("identity")
    issuers = (names.OPERATOR_ISSUER, names.FETCHER_ISSUER, names.GATEWAY_ISSUER)
    signers = {issuer: Signer(issuer, certify(identity, issuer)) for issuer in issuers}
    model = TinyModel.make(tmp_path_factory.mktemp("tiny"))
    port, data = free_port(), tmp_path_factory.mktemp("data")
    url = f"http://127.0.0.1:{port}"

    def start() -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "tenantry_engine.main", "--model", model.folder, "--model-name", "tiny",
            "--audience", AUDIENCE, "--identity-dir", identity, "--data-dir", data, "--dtype", "float32", "--port",
            str(free_port()), "--admin-port", str(port), "--max-rank", "8", "--slots", "2", "--threads", "1",
        ]  # fmt: skip
        process = subprocess.Popen(dying_with_me(command))
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, "the engine ended"
            assert time.monotonic() < deadline, "the engine is not ready"
            try:
                if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200:
                    return process
            except httpx.TransportError:
                time.sleep(0.1)

    made = Room(start, start(), Replica("ns/pool-fast-0", url, AUDIENCE), signers, model)
    yield made
    made.process.terminate()
    made.process.wait(30)


@dataclass
class Actors:
    """Operator and fetcher of one test."""

    room: Room
    client: httpx.AsyncClient

    @property
    def driver(self) -> TenantryDriver:
        return TenantryDriver(self.room.signers[names.OPERATOR_ISSUER], self.client)

    async def declare(self, *adapters: AdapterDeclaration) -> ReplicaReport:
        self.room.counter += 1
        return await self.driver.declare(self.room.replica, adapters, Fence(1, self.room.counter), 0)

    async def push(self, folder: Path, digest: str | None = None) -> None:
        blob = folder / "blob"
        blob.write_bytes(b"".join(blob_chunks(folder / CONFIG_FILE, folder / WEIGHTS_FILE)))
        pusher = Pusher(self.room.signers[names.FETCHER_ISSUER], self.client)
        await pusher.push(self.room.replica.url, AUDIENCE, digest or adapter_digest(folder), blob)

    async def settled(self, name: str) -> AdapterReport:
        """The report once the engine has checked the bytes."""
        async with asyncio.timeout(30):
            report = (await self.driver.observe(self.room.replica)).adapter(name)
            while report is None or report.state is AdapterState.MISSING:
                await asyncio.sleep(0.02)
                report = (await self.driver.observe(self.room.replica)).adapter(name)
            return report


@pytest.fixture
async def actors(room: Room) -> AsyncIterator[Actors]:
    async with new_client(httpx.Timeout(30.0)) as client:
        acting = Actors(room, client)
        yield acting
        await acting.declare()


def declared(folder: Path, name: str = "acme.tone--1.0.0") -> AdapterDeclaration:
    digest = adapter_digest(folder)
    return AdapterDeclaration(f"{name}-{digest[7:19]}", digest, "tenant-uid")


async def test_missing_then_pushed_then_served_then_gone(room: Room, actors: Actors) -> None:
    folder = room.model.adapter("one", 1)
    wanted = declared(folder)
    report = await actors.declare(wanted)
    missing = report.adapter(wanted.name)
    assert missing is not None
    assert missing.state is AdapterState.MISSING
    assert not report.serves(wanted.name, wanted.digest)
    assert report.model.name == "tiny"
    assert report.capacity.max_rank == 8

    await actors.push(folder)
    assert (await actors.settled(wanted.name)).rank == 8
    report = await actors.declare(wanted)
    assert report.serves(wanted.name, wanted.digest)
    await actors.driver.smoke(room.replica, wanted.name, wanted.digest, "tenant-uid")
    with pytest.raises(EngineError) as other:
        await actors.driver.smoke(room.replica, wanted.name, wanted.digest, "another-uid")
    assert (other.value.status, other.value.code) == (404, "model_not_found")
    await actors.push(folder)  # there already: nothing happens
    assert (await actors.declare()).adapters == ()


async def test_the_same_name_a_hundred_times(room: Room, actors: Actors) -> None:
    folder = room.model.adapter("one", 1)
    wanted = declared(folder)
    for _ in range(100):
        await actors.declare(wanted)
        await actors.push(folder)
        report = await actors.declare(wanted)
        assert report.serves(wanted.name, wanted.digest)
        assert (await actors.declare()).adapters == ()


async def test_fifty_operations_on_one_name_at_once(room: Room, actors: Actors) -> None:
    folder = room.model.adapter("one", 1)
    wanted = declared(folder)

    async def operate(index: int) -> None:
        await (actors.declare(wanted) if index % 2 else actors.declare())

    done = await asyncio.gather(*(operate(index) for index in range(50)), return_exceptions=True)
    # Some lose to a later declaration that came first; nothing else may go wrong.
    assert {getattr(result, "code", result) for result in done} <= {None, "fenced"}
    await actors.declare(wanted)
    await actors.push(folder)
    assert (await actors.settled(wanted.name)).state.verified


async def test_refusals_are_words_not_prose(room: Room, actors: Actors) -> None:
    one, two = room.model.adapter("one", 1), room.model.adapter("two", 2)
    wanted = declared(one)
    await actors.declare(wanted)
    with pytest.raises(EngineError) as taken:
        await actors.declare(AdapterDeclaration(wanted.name, adapter_digest(two), "tenant-uid"))
    assert (taken.value.status, taken.value.code) == (409, "name_taken")
    with pytest.raises(EngineError) as fenced:
        await actors.driver.declare(room.replica, [wanted], Fence(0, 1), 0)
    assert (fenced.value.status, fenced.value.code) == (409, "fenced")
    with pytest.raises(PushError) as unwanted:
        await actors.push(two)
    assert unwanted.value.reason == "NotWanted"
    with pytest.raises(PushError) as other:
        await actors.push(two, digest=wanted.digest)
    assert other.value.reason == "DigestMismatch"
    stranger = Replica(room.replica.name, room.replica.url, "other-pool")
    with pytest.raises(EngineError) as refused:
        await actors.driver.observe(stranger)
    assert refused.value.status in (401, 403)


async def test_one_bad_adapter_harms_no_other(room: Room, actors: Actors) -> None:
    good, bad = room.model.adapter("one", 1), room.model.adapter("wide", 3, r=16)
    fine, wide = declared(good), declared(bad, "acme.wide--1.0.0")
    await actors.declare(fine, wide)
    await actors.push(good)
    await actors.push(bad)
    failed = await actors.settled(wide.name)
    assert (failed.state, failed.reason) == (AdapterState.FAILED, "RankTooLarge"), failed.message
    assert failed.message
    assert (await actors.settled(fine.name)).state.verified


async def test_a_restarted_engine_says_so_and_gets_its_adapters_again(room: Room, actors: Actors) -> None:
    folder = room.model.adapter("one", 1)
    wanted = declared(folder)
    await actors.declare(wanted)
    await actors.push(folder)
    room.restart()
    assert (await actors.driver.observe(room.replica)).adapter(wanted.name) is None
    report = await actors.declare(wanted)
    if not report.serves(wanted.name, wanted.digest):
        await actors.push(folder)
    assert (await actors.settled(wanted.name)).state.verified


async def test_draining_comes_last(room: Room, actors: Actors) -> None:
    await actors.driver.drain(room.replica)
    assert (await actors.driver.observe(room.replica)).draining
