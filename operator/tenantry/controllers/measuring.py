"""What gateways count of a version while it takes over: read from each of them, as one window since the last look.

Gateways are asked themselves, on the port of their metrics: no Prometheus has to be there, and none can be behind. A
gateway that does not answer leaves a gap, and a window with a gap is no data.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tenantry.api import names
from tenantry.api.streams import TooLong, read_bounded
from tenantry.cluster import ENDPOINT_SLICE, ApiError, Key
from tenantry.desired.objects import GATEWAY_COMPONENT, OWN_GATEWAY_COMPONENT
from tenantry.promotion.analysis import Counts, Histogram, Reading, Window, between
from tenantry.promotion.memory import Rollout

from .world import World

log = logging.getLogger(__name__)
TIMEOUT = httpx.Timeout(3.0)
MAX_BYTES = 8 << 20
_REQUESTS = "tenantry_gateway_rollout_requests_total"
_FIRST_BYTE = "tenantry_gateway_rollout_first_token_seconds_bucket"
_DURATION = "tenantry_gateway_rollout_duration_seconds_bucket"


@dataclass(frozen=True)
class _Baseline:
    """Since when a step is measured. `last` is the newest reading."""

    attempt: int
    step: int
    first: Reading
    last: Reading


class Measuring:
    """Windows by adapter. In memory: after a restart of the operator a step is measured anew."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._baselines: dict[Key, _Baseline] = {}

    def forget(self, adapter: Key) -> None:
        self._baselines.pop(adapter, None)

    async def window(self, adapter: Key, served: str, rollout: Rollout) -> Window | None:
        """What was counted in the present step and not yet used. None: not everybody told, or it begins now."""
        reading = await self._read(served)
        if reading is None:
            return None
        base = self._baselines.get(adapter)
        if base is None or (base.attempt, base.step) != (rollout.attempt, rollout.step):
            self._baselines[adapter] = _Baseline(rollout.attempt, rollout.step, reading, reading)
            return None
        self._baselines[adapter] = replace(base, last=reading)
        try:
            return between(base.first, reading)
        except ValueError:
            log.warning("gateways count in different buckets", extra={"adapter": str(adapter)})
            return None

    def used(self, adapter: Key) -> None:
        """The last window was measured: the next begins where it ended."""
        base = self._baselines.get(adapter)
        if base is not None:
            self._baselines[adapter] = replace(base, first=base.last)

    async def _read(self, served: str) -> Reading | None:
        try:
            urls = await gateways(self._world)
        except ApiError as error:
            log.warning("gateways are unknown", extra={"why": str(error)})
            return None
        texts = await asyncio.gather(*(self._get(url) for url in urls))
        counted: dict[str, Counts] = {}
        for url, text in zip(urls, texts, strict=True):
            found = None if text is None else _counts(text, served)
            if found is None:
                return None
            counted[url] = found
        return counted or None

    async def _get(self, url: str) -> str | None:
        try:
            async with self._world.http.stream(
                "GET", url + names.ROLLOUT_METRICS_PATH, timeout=TIMEOUT
            ) as answer:
                if answer.status_code != 200:
                    return None
                raw = await read_bounded(answer.aiter_bytes(), MAX_BYTES)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, TooLong):
            return None
        return raw.decode(errors="replace")


async def gateways(world: World) -> list[str]:
    """Where each gateway that takes traffic tells its metrics, those of one tenant too. Raises ApiError."""
    given = world.gateway_urls
    if given is not None:
        return sorted(given)
    urls = set()
    namespace = world.config.release_namespace
    # EndpointSlices bear the labels of their Services.
    selector = f"{names.COMPONENT_LABEL} in ({GATEWAY_COMPONENT},{OWN_GATEWAY_COMPONENT})"
    async for found in world.setup.client.list(ENDPOINT_SLICE, namespace=namespace, labels=selector):
        for endpoint in found.get("endpoints") or []:
            if (endpoint.get("conditions") or {}).get("ready") is False:
                continue
            for address in endpoint.get("addresses") or []:
                host = f"[{address}]" if ":" in address else address
                urls.add(f"http://{host}:{names.METRICS_PORT}")
    return sorted(urls)


def _counts(text: str, served: str) -> Counts | None:
    """What an exposition says of one version; zeros where it does not name it, None where it cannot be read."""
    answered = failed = 0
    buckets: dict[str, dict[float, int]] = {_FIRST_BYTE: {}, _DURATION: {}}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("served") != served:
                    continue
                if sample.name == _REQUESTS:
                    if sample.labels.get("outcome") == "answered":
                        answered += int(sample.value)
                    else:
                        failed += int(sample.value)
                elif sample.name in buckets:
                    buckets[sample.name][float(sample.labels["le"])] = int(sample.value)
    except (ValueError, KeyError):
        return None
    return Counts(answered, failed, _histogram(buckets[_FIRST_BYTE]), _histogram(buckets[_DURATION]))


def _histogram(cumulative: Mapping[float, int]) -> Histogram:
    bounds = tuple(sorted(cumulative))
    if not bounds or not math.isinf(bounds[-1]):
        return Histogram()
    return Histogram(bounds, tuple(_differences(cumulative[bound] for bound in bounds)))


def _differences(values: Iterable[int]) -> list[int]:
    before, result = 0, []
    for value in values:
        result.append(max(0, value - before))
        before = value
    return result
