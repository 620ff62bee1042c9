"""Who gives way when pages or slots run short. Pure.

Bulk first, then the tenant that is furthest over its share of pages, and of it the youngest request. A request that
gave way `LIMIT` times is spared as long as there is another one, so that nobody computes the same tokens for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable

from tenantry_engine.lines import Line
from tenantry_engine.pages import PagePool
from tenantry_engine.sequence import Phase, Sequence

LIMIT = 3


def victim(
    lines: Iterable[Line], pool: PagePool, may_go: Callable[[Sequence], bool] = lambda sequence: True
) -> Sequence | None:
    """The admitted sequence that gives way, of those that `may_go`."""
    best: tuple[tuple[bool, bool, float, int], Sequence] | None = None
    for line in lines:
        weighed = line.footprint(pool) / line.weight
        for sequence in filter(may_go, line.admitted):
            rank = (sequence.preempted < LIMIT, sequence.bulk, weighed, sequence.arrival)
            if best is None or rank > best[0]:
                best = rank, sequence
    return best[1] if best else None


def share(line: Line, lines: Iterable[Line], total: int) -> float:
    """Pages that a tenant may hold while others wait: by weight, among the tenants that have requests here."""
    return total * line.weight / sum(other.weight for other in lines)


def within_share(line: Line, lines: Iterable[Line], pool: PagePool, more: int) -> bool:
    """Whether a tenant that takes `more` pages stays within its share. Whoever holds nothing may always start one."""
    return not line.admitted or line.footprint(pool) + more <= share(line, lines, pool.total)


def gives_way(
    waiting: Sequence,
    lines: Collection[Line],
    pool: PagePool,
    *,
    needed: int | None,
    busy: Container[Sequence],
) -> Sequence | None:
    """The admitted sequence that should give way to a waiting one; None when there is none or it would not help.

    Bulk gives way to fast. A tenant above its share of pages gives way to one that stays within its own with the
    `needed` pages (None = it is a slot that lacks, which has no shares). Nobody gives way `LIMIT` times for this, nor
    while `busy` with its prompt in this very step.
    """
    above: set[str] = set()
    home = next(line for line in lines if line.tenant == waiting.tenant)
    if needed is not None and within_share(home, lines, pool, needed):
        above = {
            line.tenant
            for line in lines
            if line is not home and len(line.admitted) > 1 and not within_share(line, lines, pool, 0)
        }

    def may_go(sequence: Sequence) -> bool:
        if sequence.preempted >= LIMIT or (sequence.phase is Phase.PREFILL and sequence in busy):
            return False
        return (sequence.bulk and not waiting.bulk) or sequence.tenant in above

    if needed is not None:
        freed = sum(len(s.pages) for line in lines for s in line.admitted if may_go(s))
        if pool.available + freed < needed:
            return None
    return victim(lines, pool, may_go)
