"""The prefix cache on a simulated engine: what it finds, what it shares, and what it saves."""

from __future__ import annotations

from schedule_world import PAGE, World
from tenantry_engine.sequence import Phase


def test_a_conversation_finds_all_that_was_said_before() -> None:
    w = World()
    first = w.add(prompt=list(range(20)), output=30)
    w.run()
    said = first.tokens[:-1]  # the last token was never an input
    second = w.add(prompt=[*first.tokens, 5, 6], output=1)
    w.run()
    assert second.cached == len(said) // PAGE * PAGE == 48


def test_cached_tokens_are_neither_computed_nor_charged() -> None:
    w = World(pages=100)
    text = list(range(100))
    w.add(prompt=text, output=1)
    w.run()
    computed = w.served["t"]
    w.add(prompt=[1] * 8, output=30)  # keeps the tenant's account alive
    w.step()
    service = w.scheduler.service("t")
    again = w.add(prompt=text, output=1)
    before = w.served["t"]
    w.step()
    assert again.phase is Phase.DONE
    assert again.cached == 96
    assert w.served["t"] - before == 4 + 1  # and one token of the other request
    assert w.scheduler.service("t") - service == 4 + 2 + 2
    assert computed == 100


def test_live_requests_share_pages() -> None:
    w = World(pages=30, slots=8, step_tokens=64)
    text = list(range(64))
    w.add(prompt=text, output=20)
    w.step()
    for _ in range(5):
        w.add(prompt=text, output=20)
    w.step()
    assert w.scheduler.running == 6
    assert w.pool.counts().kv == 4 + 6, "four shared pages, and one of each request's own"


def test_equal_prompts_that_start_together_end_up_on_the_same_pages() -> None:
    w = World(pages=30, slots=8, step_tokens=300)
    for _ in range(4):
        w.add(prompt=list(range(64)), output=20)
    w.step()
    assert w.scheduler.running == 4
    w.step()
    assert w.pool.counts().kv == 4 + 4


def test_a_preempted_request_finds_its_own_work_again() -> None:
    w = World(pages=12, slots=3)
    for _ in range(3):
        w.add(prompt=40, output=60)
    w.run()
    assert w.scheduler.preemptions > 0
    assert sum(w.served.values()) < 3 * 100 + w.scheduler.preemptions * 50
    assert all(s.cached == 0 for s in w.sequences), "what a request computed itself is no hit"
    w.check_empty()


def test_blocks_give_way_to_requests_oldest_use_and_last_block_first() -> None:
    w = World(pages=12)
    old, new = list(range(100, 164)), list(range(200, 264))
    for text in (old, new):
        w.add(prompt=text, output=1)
        w.run()
    w.add(prompt=[1] * 70, output=1)  # takes all free pages and a few cached ones
    w.run()
    again = [w.add(prompt=[*text, 1], output=1) for text in (new, old)]
    w.run()
    assert again[0].cached == 64
    assert 0 < again[1].cached < 64


def test_requests_without_a_salt_leave_nothing_and_find_nothing() -> None:
    w = World()
    for _ in range(2):
        assert w.add(prompt=list(range(64)), salt=None).cached == 0
        w.run()
    assert w.pool.counts().cached == 0


def test_a_block_used_for_another_tenant_is_witnessed_whatever_its_key_says() -> None:
    w = World()
    same = list(range(64))
    w.add("a", prompt=same, output=1)
    w.run()
    w.add("a", prompt=same, output=1)
    w.add("b", prompt=same, output=1)
    w.run()
    assert w.scheduler.cached_tokens > 0, "the positive control: a tenant finds its own blocks"
    assert w.scheduler.crossed_tokens == 0
    assert w.scheduler.tenants == ["a", "b"]

    broken = World()
    broken.add("a", prompt=same, output=1, salt="of nobody")
    broken.run()
    broken.add("b", prompt=same, output=1, salt="of nobody")
    broken.run()
    assert broken.scheduler.crossed_tokens == 64, "keys without a tenant's salt"
    late = World(pages=30, slots=8, step_tokens=300)
    for tenant in ("a", "b"):
        late.add(tenant, prompt=same, output=20, salt="of nobody")
    late.step()
    late.step()
    assert late.scheduler.crossed_tokens == 64, "equal blocks that were computed at the same time are merged"
