"""Waiting for an API server that is away: growing pauses, without end, so that its return needs no restart of ours.

A process that ended instead would be started again by the kubelet ever more rarely, up to five minutes apart.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from tenantry.cluster import Expired, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")


class EndlessBackoffs:
    """Delays between attempts of a request: growing to 30 s, with jitter, for ever. Iterable anew for each request."""

    def __iter__(self) -> Iterator[float]:
        for attempt in itertools.count():
            yield min(30.0, 0.5 * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.5)  # noqa: S311


async def patiently(
    what: str, attempt: Callable[[], Awaitable[T]], pauses: Iterable[float] | None = None
) -> T:
    """The answer of `attempt`, made again after each pause while the API server does not answer.

    Only its absence is borne (Unavailable, and Expired for a list that took too long): all else is raised at once.
    """
    for pause in EndlessBackoffs() if pauses is None else pauses:
        try:
            return await attempt()
        except (Unavailable, Expired) as error:
            log.warning("%s: the API server is awaited, next try in %.1f s: %s", what, pause, error)
        await asyncio.sleep(pause)
    return await attempt()
