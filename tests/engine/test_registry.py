"""The registry: thousands of names at no cost per step, faults that end where they belong, true residency."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tenantry_engine.adapters import registry as registry_module
from tenantry_engine.adapters.base import Base
from tenantry_engine.adapters.host import HostTier
from tenantry_engine.adapters.loading import PageLoader, host_budget
from tenantry_engine.adapters.registry import Declaration, Registry
from tenantry_engine.adapters.store import BlobStore
from tenantry_engine.config import LoraConfig
from tenantry_engine.errors import EngineError, RequestError
from tenantry_engine.pages import PagePool
from tenantry_kernels import KvShape, LoraShape

KV = KvShape(1, 1, 16)  # pages of 512 elements
SHAPE = LoraShape(1, (32,) * 7, (32,) * 7, 64)


def make_blob(number: int, rank: int = 4) -> bytes:
    """An adapter whose weights all are `number`."""
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = save(
        {
            f"{q}.lora_A.weight": torch.full((rank, 32), float(number)),
            f"{q}.lora_B.weight": torch.ones(32, rank),
        }
    )
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "revision": str(number),
    }
    text = json.dumps(config).encode()
    return struct.pack("<Q", len(text)) + text + struct.pack("<Q", len(weights)) + weights


def digest_of(blob: bytes) -> str:
    import hashlib

    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


@dataclass
class World:
    """A registry whose background jobs run when the test says so."""

    folder: Path
    pages: int = 16
    host_bytes: int = 0
    jobs: list[tuple[str, Callable[[], Any], Callable[[Any], None]]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ran: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.memory = torch.zeros(self.pages, KV.page_elems)
        self.pool = PagePool(self.pages, wipe=self._wipe)
        self.store = BlobStore(self.folder)
        self.loader = PageLoader(self.store, self.memory, self.host_bytes)
        self.registry = Registry(
            base=Base(SHAPE, KV.page_elems, torch.float32, self.pages - 2),
            limits=LoraConfig(), model_name="base", pool=self.pool, loader=self.loader, store=self.store,
            checker=self._background("check"), filler=self._background("fill"),
            prefetcher=self._background("prefetch"), loaded=self.loaded.append, failed=self.failed.append,
        )  # fmt: skip
        self.pool.evicted = self.registry.on_evicted

    def _wipe(self, pages: tuple[int, ...]) -> None:
        self.memory[list(pages)] = 0

    def _background(self, kind: str) -> Any:
        return lambda job, done: self.jobs.append((kind, job, done))

    def work(self, *kinds: str) -> None:
        """Runs the jobs of these kinds (all by default), and those that they make."""
        while mine := [job for job in self.jobs if not kinds or job[0] in kinds]:
            for item in mine:
                self.jobs.remove(item)
                kind, job, done = item
                self.ran[kind] += 1
                try:
                    result = job()
                except Exception as error:
                    result = error
                done(result)

    def put(self, number: int, rank: int = 4) -> str:
        """Stores a blob as the admin port does; its digest."""
        blob = make_blob(number, rank)
        digest = digest_of(blob)
        with self.store.receive(digest, len(blob)) as incoming:
            incoming.write(blob)
            incoming.commit()
        return digest

    def declare(self, *wanted: Declaration, until: float = 0.0) -> None:
        self.registry.declare(self.registry.fence, list(wanted), until)

    def state(self, name: str) -> str:
        [report] = [r for r in self.registry.reports({}) if r.name == name]
        return f"{report.state} {report.reason}".strip()

    def admit(self, digest: str) -> bool:
        """What the scheduler does for a request of one KV page."""
        held = self.pool.holds(digest)
        pages = self.pool.reserve(1, digest, self.registry.pages_needed(digest))
        if pages is None:
            return False
        if not held:
            self.registry.load(digest)
        self.pool.release(pages)
        return True

    def finish(self, digest: str) -> None:
        self.pool.release((), digest)

    def value(self, digest: str) -> float:
        """The number that the adapter's pages say."""
        paged = self.registry.paged(digest)
        return float(self.memory.view(-1)[paged.rows[0]])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., World]:
    return lambda **more: World(tmp_path / "data", **more)


def ready(world: World, *numbers: int) -> list[str]:
    digests = [world.put(number) for number in numbers]
    world.declare(*(Declaration(f"n{n}", d) for n, d in zip(numbers, digests, strict=True)))
    world.work("check")
    return digests


def test_two_thousand_names_cost_nothing_per_step(make: Callable[..., World]) -> None:
    world = make()
    count = 2000
    digests = [world.put(number, rank=1) for number in range(count)]
    names = [Declaration(f"n{number:04d}", digest) for number, digest in enumerate(digests)]
    for end in range(500, count + 1, 500):  # as an operator declares a growing fleet
        world.declare(*names[:end])
        world.work("check")
    assert len(world.registry.names()[0]) == count
    assert world.ran["check"] == count, "each is checked once, however often it is declared"
    assert world.pool.counts().free == world.pages, "registered is not resident"

    looked = Counter[str]()

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            looked[key] += 1
            return super().get(key, default)

    for _ in range(50):
        world.registry.sweep(1.0, Watched())
    assert not looked, "a step looks at no name that stays"
    world.declare(*names[10:], until=5.0)
    assert world.registry.sweep(1.0, Watched({"n0003": 1})) == []
    assert set(looked) == {f"n{number:04d}" for number in range(10)}, (
        "a step looks at names that leave, at no other"
    )
    assert world.registry.sweep(5.0, {"n0003": 1}) == ["n0003"]
    assert world.registry.sweep(5.0, {}) == []
    with pytest.raises(RequestError, match="at most 2000"):
        world.declare(*names, Declaration("one-more", digests[0]))
    # a working set larger than the pool, in turn: evicted and loaded again, each with its own bytes
    for number in [*range(20, 60), *range(20, 60)]:
        assert world.admit(digests[number])
        world.work("fill")
        assert world.value(digests[number]) == number
        world.finish(digests[number])
    assert world.registry.evictions > 60
    world.pool.check()
    world.declare()
    world.registry.sweep(9.0, {})
    assert not list(world.registry.reports({}))
    assert world.pool.counts().free == world.pages
    assert not any((world.folder / "blobs").iterdir())


def test_damage_found_while_filling_is_fetched_again(make: Callable[..., World]) -> None:
    world = make()
    [digest] = ready(world, 7)
    (world.folder / "blobs" / digest.removeprefix("sha256:")).write_bytes(b"damaged")
    assert world.admit(digest)
    world.pool.release((), digest)  # the scheduler ends the request when it is told
    world.work("fill")
    assert world.failed == [digest]
    assert world.state("n7") == "Missing Corrupt"
    assert world.registry.wants(digest)
    assert world.pool.counts().free == world.pages
    world.put(7)
    told: list[bool] = []
    world.registry.blob_stored(digest, lambda: told.append(True))
    world.work("check")
    assert told == [True]
    assert world.state("n7") == "Registered"
    assert world.admit(digest)
    world.work()
    assert world.value(digest) == 7.0
    world.finish(digest)


def test_damage_found_while_checking_is_fetched_again(make: Callable[..., World]) -> None:
    world = make()
    digest = world.put(3)
    (world.folder / "blobs" / digest.removeprefix("sha256:")).write_bytes(b"")
    world.declare(Declaration("a", digest))
    world.work()
    assert world.state("a") == "Missing Corrupt"
    assert world.registry.wants(digest)


def test_bytes_that_are_right_but_unfit_stay_failed(make: Callable[..., World]) -> None:
    world = make()
    digest = world.put(1, rank=65)
    world.declare(Declaration("a", digest))
    world.work()
    assert world.state("a") == "Failed RankTooLarge"
    assert not world.registry.wants(digest)
    with pytest.raises(RequestError, match="does not exist"):
        world.registry.resolve("a", digest, None)


def test_a_bug_while_checking_hangs_nobody(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    monkeypatch.setattr(registry_module, "check", lambda *rest: 1 / 0)
    digest = world.put(1)
    told: list[str] = []
    world.declare(Declaration("a", digest))
    world.registry.blob_stored(digest, lambda: told.append("while it is checked"))
    world.work()
    assert told == ["while it is checked"]
    assert world.state("a") == "Failed Corrupt"


def test_whoever_waits_is_told_even_when_a_result_cannot_be_taken_in(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    digest = digest_of(make_blob(1))
    world.declare(Declaration("a", digest))
    world.put(1)
    monkeypatch.setattr(world.registry, "_pin", lambda digest: 1 / 0)
    told: list[bool] = []
    world.registry.blob_stored(digest, lambda: told.append(True))
    with pytest.raises(ZeroDivisionError):
        world.work()
    assert told == [True]
    monkeypatch.undo()
    # the same for pages: they are given back whatever the listener does
    world.registry.loaded = lambda digest: 1 / 0
    assert world.admit(digest)
    with pytest.raises(ZeroDivisionError):
        world.work()
    world.finish(digest)
    world.pool.check()
    assert world.pool.references(digest) == 0


def test_a_fault_of_ours_while_filling_costs_the_waiting_requests_alone(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    [digest] = ready(world, 5)
    with monkeypatch.context() as patched:
        patched.setattr(world.loader, "_write", lambda *rest: 1 / 0)
        assert world.admit(digest)
        world.finish(digest)
        world.work()
    assert world.failed == [digest]
    assert world.state("n5") == "Registered", "the bytes are good: the next request tries again"
    assert world.admit(digest)
    world.work()
    assert world.value(digest) == 5.0
    world.finish(digest)


def test_residency_is_what_the_page_table_says(make: Callable[..., World]) -> None:
    world = make(pages=6)
    one, _ = ready(world, 1, 2)
    assert world.admit(one)
    assert world.registry.names() == (["n1", "n2"], []), "being filled is not resident"
    world.work()
    assert world.registry.names() == (["n1", "n2"], ["n1"])
    world.finish(one)
    assert world.pool.reserve(6) is not None  # sequences take every page
    assert world.registry.names() == (["n1", "n2"], [])
    assert world.state("n1") == "Registered"
    assert world.registry.reports({})[0].pages == 0


def test_pins_follow_their_names_and_keep_room_for_a_sequence(make: Callable[..., World]) -> None:
    world = make(pages=4)  # one page each: two may be pinned
    digests = [world.put(number) for number in range(3)]
    wanted = [Declaration(f"n{number}", digest, pinned=True) for number, digest in enumerate(digests)]
    world.declare(*wanted)
    world.work()
    assert world.registry.names()[1] == ["n0", "n1"]
    assert world.pool.pinned_pages() == 2
    assert world.pool.counts().cached == 0
    world.declare(Declaration("n0", digests[0]), *wanted[1:])  # n0 is not pinned any more: n2 has room
    world.work()
    assert world.pool.pinned_pages() == 2
    assert "n2" in world.registry.names()[1]
    world.declare()
    world.registry.sweep(1.0, {})
    assert world.pool.counts().free == 4
    world.pool.check()


def test_a_request_that_waits_brings_its_adapter_closer_once(make: Callable[..., World]) -> None:
    world = make(host_bytes=1 << 20)
    [digest] = ready(world, 9)
    for _ in range(5):
        world.registry.prefetch(digest)
    world.work()
    assert world.ran["prefetch"] == 1
    assert digest in world.loader.host
    world.store.remove([digest])  # the host tier serves without the disk
    assert world.admit(digest)
    world.work()
    assert world.value(digest) == 9.0
    world.registry.prefetch(digest)
    world.work()
    assert world.ran["prefetch"] == 1, "a resident adapter is close already"
    world.finish(digest)
    world.declare()
    world.registry.sweep(1.0, {})
    assert digest not in world.loader.host, "memory returns with the name"
    assert world.loader.host.used == 0


def test_read_ahead_of_a_file_that_is_gone_harms_nothing(make: Callable[..., World]) -> None:
    world = make()
    [digest] = ready(world, 9)
    world.store.remove([digest])
    world.registry.prefetch(digest)
    world.work()
    assert world.state("n9") == "Registered"


def test_the_host_tier_keeps_its_budget_and_the_most_recent() -> None:
    tier = HostTier(300)
    images = {name: torch.zeros(100, dtype=torch.uint8) for name in "abcd"}
    for name in "abc":
        tier.put(name, images[name])
    assert tier.get("a") is images["a"]
    tier.put("d", images["d"])
    assert [name in tier for name in "abcd"] == [True, False, True, True]
    tier.put("big", torch.zeros(301, dtype=torch.uint8))
    assert "big" not in tier
    tier.put("a", torch.zeros(50, dtype=torch.uint8))
    assert tier.used == 250
    tier.put("whole", torch.zeros(300, dtype=torch.uint8))
    assert tier.used == 300
    tier.forget("whole")
    tier.forget("whole")
    assert tier.used == 0
    with pytest.raises(ValueError, match="`budget`"):
        HostTier(-1)


def test_the_host_budget_is_for_accelerators() -> None:
    assert host_budget(False, None, 1 << 30) == 0
    assert host_budget(True, None, 1 << 30) == 1 << 27
    assert host_budget(True, 5, 1 << 30) == 5
    for accelerator, asked in ((False, 1 << 20), (True, 0)):
        with pytest.raises(EngineError, match="`--adapter-host-bytes` must"):
            host_budget(accelerator, asked, 1 << 30)


def test_names_that_share_bytes_share_pages_until_the_last_goes(make: Callable[..., World]) -> None:
    world = make()
    digest = world.put(4)
    names = [Declaration("a", digest, "one"), Declaration("b", digest, "two")]
    world.declare(*names)
    world.work()
    assert world.ran["check"] == 1
    assert world.registry.resolve("a", digest, "one") == digest
    with pytest.raises(RequestError, match="does not exist"):
        world.registry.resolve("a", digest, "two")
    world.declare(names[0])
    with pytest.raises(RequestError, match="does not exist"):
        world.registry.resolve("b", digest, "two")  # it is leaving
    world.registry.sweep(1.0, {})
    assert world.store.has(digest)
    assert world.state("a") == "Registered"
    world.declare()
    world.registry.sweep(1.0, {})
    assert not world.store.has(digest)


def test_a_leaving_name_serves_nobody_until_it_is_declared_again(make: Callable[..., World]) -> None:
    world = make()
    [digest] = ready(world, 6)
    assert world.admit(digest)
    world.work()
    world.declare(until=9.0)
    assert world.registry.sweep(1.0, {"n6": 1}) == []
    assert world.state("n6") == "Draining"
    assert world.registry.names() == ([], [])
    with pytest.raises(RequestError, match="does not exist"):
        world.registry.resolve("n6", digest, None)
    world.declare(Declaration("n6", digest))
    assert world.state("n6") == "Resident"
    assert world.registry.names() == (["n6"], ["n6"])
    assert world.registry.resolve("n6", digest, None) == digest
    assert world.registry.sweep(10.0, {"n6": 1}) == [], "it does not leave any more"
    world.finish(digest)


def test_a_leaving_name_keeps_its_bytes_and_the_time_that_it_was_given(make: Callable[..., World]) -> None:
    world = make()
    [digest] = ready(world, 6)
    world.declare(until=5.0)
    world.declare(until=9.0)
    with pytest.raises(RequestError, match="must keep its digest") as caught:
        world.declare(Declaration("n6", world.put(7)))
    assert (caught.value.status, caught.value.code) == (409, "name_taken")
    assert world.registry.sweep(5.0, {"n6": 1}) == ["n6"]
    world.registry.sweep(5.0, {})
    assert not world.registry.reports({})
    assert not world.store.has(digest)


def test_a_name_that_leaves_while_it_is_checked_goes_when_that_has_ended(make: Callable[..., World]) -> None:
    world = make()
    digest = world.put(6)
    world.declare(Declaration("a", digest))
    assert not world.registry.wants(digest), "it is being checked"
    world.declare()
    world.registry.sweep(1.0, {})
    assert world.state("a") == "Draining"
    assert world.store.has(digest), "the check reads it"
    world.work()
    world.registry.sweep(1.0, {})
    assert not world.registry.reports({})
    assert not world.store.has(digest)


def test_bytes_that_came_for_a_name_that_has_gone_are_thrown_away(make: Callable[..., World]) -> None:
    world = make()
    digest = world.put(6)
    told: list[bool] = []
    world.registry.blob_stored(digest, lambda: told.append(True))
    assert told == [True]
    assert not world.store.has(digest)


@pytest.mark.parametrize(
    ("names", "text"),
    [(["base"], "not the base model's name"), (["a", "a"], "used once"), (["-a"], "a word of letters")],
)
def test_a_set_that_is_refused_changes_nothing(
    make: Callable[..., World], names: list[str], text: str
) -> None:
    world = make()
    [digest] = ready(world, 6)
    with pytest.raises(RequestError, match=text):
        world.registry.declare((2, 0), [Declaration(name, digest) for name in names], 0.0)
    assert world.registry.fence == (0, 0)
    assert world.registry.names() == (["n6"], [])


def test_no_set_older_than_the_last_is_taken(make: Callable[..., World]) -> None:
    world = make()
    world.registry.declare((1, 5), [], 0.0)
    for fence in ((1, 4), (0, 9)):
        with pytest.raises(RequestError, match="must not be lower") as caught:
            world.registry.declare(fence, [], 0.0)
        assert (caught.value.status, caught.value.code) == (409, "fenced")
    world.registry.declare((1, 5), [], 0.0)
    world.registry.declare((2, 0), [], 0.0)
    assert world.registry.fence == (2, 0)


def test_a_name_resolves_for_its_tenant_with_its_digest_alone(make: Callable[..., World]) -> None:
    world = make()
    digest, other = world.put(6), world.put(7)
    world.declare(Declaration("a", digest, "one"), Declaration("b", digest))
    world.work()
    for name, bound, uid in (("a", digest, "one"), ("a", None, None), ("b", digest, "two")):
        assert world.registry.resolve(name, bound, uid) == digest
    for name, bound, uid in (("a", other, "one"), ("a", digest, "two"), ("a", digest, ""), ("c", None, None)):
        with pytest.raises(RequestError, match="does not exist"):
            world.registry.resolve(name, bound, uid)
