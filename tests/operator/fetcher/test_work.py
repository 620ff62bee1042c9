"""What runs and when again: joined work, back-off, replicas that lost their bytes, damaged and evicted blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from tenantry.api import names
from tenantry.api.identity import Signer
from tenantry.engines import ArtifactState, Pull, PushState, Replica, Transfer
from tenantry.fetcher.cache import Cache
from tenantry.fetcher.errors import FetchError
from tenantry.fetcher.net import OriginPolicy
from tenantry.fetcher.push import Pusher
from tenantry.fetcher.sources import Sources
from tenantry.fetcher.transfers import Transfers

from .conftest import Answer, Engine, Identities, Scripted, adapter, settle, sha256


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Room:
    """A fetcher without its door, on a clock that the test moves."""

    def __init__(
        self, server: Scripted, identities: Identities, folder: Path, cache_bytes: int = 1 << 20
    ) -> None:
        self.clock = Clock()
        self.cache = Cache(folder, cache_bytes)
        self.client = httpx.AsyncClient(trust_env=False)
        signer = Signer.load(names.FETCHER_ISSUER, identities.fetcher_key)
        sources = Sources(OriginPolicy.build([server.origin], [server.origin], True), 1 << 20, 5)
        self.transfers = Transfers(sources, Pusher(signer, self.client), self.cache, clock=self.clock)

    async def settle(self, digest: str, source: str, *replicas: Replica) -> Transfer:
        return await settle(self.transfers, Pull(digest, source), *replicas)


@pytest.fixture
async def server(scripted: Callable[[], Any]) -> Scripted:
    started: Scripted = await scripted()
    return started


@pytest.fixture
def room(server: Scripted, identities: Identities, tmp_path: Path) -> Room:
    return Room(server, identities, tmp_path / "cache")


@pytest.fixture
def replica(engine: Engine) -> Replica:
    return Replica("ns/pool-fast-0", engine.url, "pool-uid")


async def test_fifty_callers_cause_one_pull_and_one_push(
    room: Room, server: Scripted, engine: Engine, replica: Replica
) -> None:
    files = adapter()
    source = server.serve(files)
    await asyncio.gather(*(room.settle(files.digest, source, replica) for _ in range(50)))
    assert len(server.asked) == 3
    assert engine.puts == 1


async def test_a_registry_that_was_down_is_asked_again_after_the_back_off(
    room: Room, server: Scripted
) -> None:
    files = adapter()
    source = server.serve(files)
    good = dict(server.routes)
    server.routes = {path: Answer(503) for path in good}
    failed = await room.settle(files.digest, source)
    assert (failed.artifact.state, failed.artifact.reason) == (ArtifactState.FAILED, "SourceUnavailable")
    assert "HTTP 503" in failed.artifact.message
    server.routes = good
    asked = len(server.asked)
    for _ in range(5):
        assert (await room.settle(files.digest, source)).artifact.state is ArtifactState.FAILED
    assert len(server.asked) == asked
    room.clock.now += 3
    assert (await room.settle(files.digest, source)).artifact.state is ArtifactState.VERIFIED


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("fault", [Answer(500), Answer(429), Answer(body=b"x", length=99), Answer(404)])
async def test_a_fault_at_any_request_heals(
    room: Room, server: Scripted, engine: Engine, replica: Replica, broken: int, fault: Answer
) -> None:
    files = adapter()
    source = server.serve(files)
    path = list(server.routes)[broken]
    good = server.routes[path]
    server.routes[path] = fault
    failed = await room.settle(files.digest, source, replica)
    assert failed.artifact.state is ArtifactState.FAILED
    assert failed.artifact.message
    assert failed.adapter is None
    assert failed.replicas[0].state is PushState.WAITING
    server.routes[path] = good
    room.clock.now += 3
    assert (await room.settle(files.digest, source, replica)).replicas[0].state is PushState.PUSHED
    assert engine.blobs == {files.digest: files.blob}


async def test_many_adapters_at_once_all_arrive(
    room: Room, server: Scripted, engine: Engine, replica: Replica
) -> None:
    asked: list[tuple[str, str]] = []
    for fill in range(20):
        files = adapter(fill=fill)
        server.serve(files)
        path = f"/v2/acme/tone/manifests/{fill}.1.0"
        server.routes[path] = server.routes["/v2/acme/tone/manifests/1.0.0"]
        asked.append((files.digest, f"oci://{server.origin}/acme/tone:{fill}.1.0"))
    await asyncio.gather(*(room.settle(digest, source, replica) for digest, source in asked))
    assert set(engine.blobs) == {digest for digest, _ in asked}


async def test_the_back_off_grows_and_is_forgotten_on_success(room: Room, server: Scripted) -> None:
    files = adapter()
    source = f"oci://{server.origin}/acme/tone:1.0.0"
    waits: list[float] = []
    for _ in range(9):
        await room.settle(files.digest, source)
        [work] = room.transfers._works.values()
        waits.append(work.retry_at - room.clock.now)
        room.clock.now = work.retry_at
    assert all(later > earlier * 1.1 for earlier, later in pairwise(waits[:4]))
    assert max(waits) <= 150
    server.serve(files)
    assert (await room.settle(files.digest, source)).artifact.state is ArtifactState.VERIFIED
    assert work.failures == 0


async def test_a_corrected_source_is_tried_at_once(room: Room, server: Scripted) -> None:
    files = adapter()
    wrong = f"oci://{server.origin}/acme/gone:1.0.0"
    assert (await room.settle(files.digest, wrong)).artifact.reason == "NotFound"
    right = server.serve(files)
    assert (await room.settle(files.digest, right)).artifact.state is ArtifactState.VERIFIED


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((500, "internal"), "Refused"),
        ((409, "not_wanted"), "NotWanted"),
        ((413, "too_large"), "TooLarge"),
        ((503, "draining"), "Refused"),
    ],
)
async def test_a_failed_push_is_told_and_tried_again(
    room: Room, server: Scripted, engine: Engine, replica: Replica, answer: tuple[int, str], reason: str
) -> None:
    files = adapter()
    source = server.serve(files)
    engine.fail.append(answer)
    failed = (await room.settle(files.digest, source, replica)).replicas[0]
    assert (failed.state, failed.reason) == (PushState.FAILED, reason)
    assert str(answer[0]) in failed.message
    room.clock.now += 1
    assert (await room.settle(files.digest, source, replica)).replicas[0].state is PushState.PUSHED
    assert set(engine.blobs) == {files.digest}


async def test_one_dead_replica_delays_no_other(
    room: Room, server: Scripted, engine: Engine, replica: Replica
) -> None:
    files = adapter()
    source = server.serve(files)
    dead = Replica("ns/pool-fast-1", "http://127.0.0.1:1", "pool-uid")
    states = (await room.settle(files.digest, source, dead, replica)).replicas
    assert [(r.state, r.reason) for r in states] == [
        (PushState.FAILED, "Unreachable"),
        (PushState.PUSHED, ""),
    ]


async def test_a_replica_that_lost_its_bytes_gets_them_again(
    room: Room, server: Scripted, engine: Engine, replica: Replica
) -> None:
    files = adapter()
    source = server.serve(files)
    await room.settle(files.digest, source, replica)
    engine.blobs.clear()  # the container restarted at its old address
    room.clock.now += 6
    await room.settle(files.digest, source, replica)
    assert set(engine.blobs) == {files.digest}
    engine.blobs.clear()  # a new pod under the old name
    moved = Replica(replica.name, engine.url.replace("127.0.0.1", "localhost"), "pool-uid")
    await room.settle(files.digest, source, moved)
    assert set(engine.blobs) == {files.digest}
    assert len(server.asked) == 3


async def test_a_token_for_another_pool_is_refused(
    room: Room, server: Scripted, engine: Engine, replica: Replica
) -> None:
    files = adapter()
    stranger = Replica(replica.name, replica.url, "other-pool")
    transfer = await room.settle(files.digest, server.serve(files), stranger)
    assert transfer.replicas[0].state is PushState.FAILED
    assert "HTTP 401" in transfer.replicas[0].message
    assert not engine.blobs


async def test_bytes_damaged_on_disk_are_pulled_again(
    room: Room, server: Scripted, identities: Identities, engine: Engine, replica: Replica, tmp_path: Path
) -> None:
    files = adapter()
    source = server.serve(files)
    await room.settle(files.digest, source)
    blob = room.cache.find(files.digest, source)
    assert blob is not None
    blob.write_bytes(files.blob[:-1] + b"\xff")
    # The receiver finds out ...
    failed = await room.settle(files.digest, source, replica)
    assert failed.replicas[0].reason == "DigestMismatch"
    room.clock.now += 1
    await room.settle(files.digest, source, replica)
    assert engine.blobs == {files.digest: files.blob}
    # ... and so does the next process, before it promises anything.
    blob.write_bytes(files.blob[:-1] + b"\xff")
    again = Room(server, identities, tmp_path / "cache")
    assert (await again.settle(files.digest, source)).artifact.state is ArtifactState.VERIFIED
    assert blob.read_bytes() == files.blob


async def test_a_restarted_fetcher_uses_what_it_has(
    room: Room, server: Scripted, identities: Identities, tmp_path: Path
) -> None:
    files = adapter()
    source = server.serve(files)
    await room.settle(files.digest, source)
    asked = len(server.asked)
    server.routes.clear()
    again = Room(server, identities, tmp_path / "cache")
    assert (await again.settle(files.digest, source)).artifact.state is ArtifactState.VERIFIED
    assert len(server.asked) == asked
    # Who only knows the digest gets nothing.
    other = await again.settle(files.digest, f"oci://{server.origin}/mallory/tone:1.0.0")
    assert (other.artifact.reason, other.adapter) == ("NotFound", None)


async def test_a_full_cache_evicts_the_least_recently_used(
    server: Scripted, identities: Identities, engine: Engine, tmp_path: Path
) -> None:
    size = len(adapter().blob)
    room = Room(server, identities, tmp_path / "cache", cache_bytes=2 * size)
    kept: list[tuple[str, str]] = []
    for fill in range(3):
        files = adapter(fill=fill)
        source = server.serve(files)
        tag = source.replace(":1.0.0", f":{fill}.0.0")
        server.routes[f"/v2/acme/tone/manifests/{fill}.0.0"] = server.routes["/v2/acme/tone/manifests/1.0.0"]
        assert (await room.settle(files.digest, tag)).artifact.state is ArtifactState.VERIFIED
        kept.append((files.digest, tag))
    assert room.cache.size() == 2 * size
    assert room.cache.find(*kept[0]) is None
    # Wanted again, it is pulled again.
    replica = Replica("ns/a", engine.url, "pool-uid")
    assert (await room.settle(*kept[0], replica)).replicas[0].state is PushState.PUSHED
    small = Room(server, identities, tmp_path / "small", cache_bytes=10)
    assert (await small.settle(*kept[2])).artifact.reason == "TooLarge"


async def test_nothing_incomplete_stays(room: Room, server: Scripted, tmp_path: Path) -> None:
    files = adapter()
    source = server.serve(files)
    server.routes[f"/v2/acme/tone/blobs/{sha256(files.weights)}"] = Answer(body=files.weights[:9])
    await room.settle(files.digest, source)
    assert not list((tmp_path / "cache" / "tmp").iterdir())
    assert not list((tmp_path / "cache" / "blobs").iterdir())
    (tmp_path / "cache" / "tmp" / "left-by-a-crash").touch()
    Cache(tmp_path / "cache", 1)
    assert not list((tmp_path / "cache" / "tmp").iterdir())


async def test_a_cache_that_cannot_be_written_is_a_reason(
    room: Room, server: Scripted, tmp_path: Path
) -> None:
    files = adapter()
    source = server.serve(files)
    (tmp_path / "cache" / "tmp").rmdir()
    failed = await room.settle(files.digest, source)
    assert (failed.artifact.state, failed.artifact.reason) == (ArtifactState.FAILED, "SourceUnavailable")
    assert "cache" in failed.artifact.message


def test_blobs_in_use_stay(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10)
    digests = [f"sha256:{letter * 64}" for letter in "ab"]

    def add(digest: str) -> None:
        scratch = cache.scratch()
        scratch.write_bytes(b"12345678")
        cache.add(scratch, digest, "source", digest)

    add(digests[0])
    with cache.hold(digests[0]), pytest.raises(FetchError, match="in use"):
        add(digests[1])
    add(digests[1])
    assert cache.find(digests[0], "source") is None


@pytest.mark.parametrize("digest", ["sha256:../../etc", "md5:" + "0" * 64, "sha256:" + "A" * 64, ""])
def test_only_digests_name_folders(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ValueError, match="`digest`"):
        Cache(tmp_path, 1).find(digest, "source")


async def test_transfers_that_nobody_asks_for_are_forgotten(room: Room, server: Scripted) -> None:
    files = adapter()
    await room.settle(files.digest, server.serve(files))
    room.clock.now += 3601
    await room.settle(adapter(fill=9).digest, f"oci://{server.origin}/x/y:1")
    assert len(room.transfers._works) == 1
