"""The operator's own part of a probe: what to try, whether an ordinary pod reaches it, and two knocks at the probe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence

from tenantry.api import OperatorConfig, names
from tenantry.cluster import POD, SERVICE, Client, Key
from tenantry.desired.objects import GATEWAY_COMPONENT
from tenantry.evidence.network import Kind, Target
from tenantry.evidence.probe import SETTLE_SECONDS
from tenantry.probes import look

from .reading import listed, read

METADATA_ADDRESS = "169.254.169.254"


async def targets(config: OperatorConfig, client: Client) -> list[Target]:
    """What a closed namespace must not reach. Raises ApiError."""
    found = [Target(Kind.METADATA, METADATA_ADDRESS, 80)]
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if host:
        found.append(Target(Kind.API, host, int(port)))
    resolver = look.nameserver()
    if resolver is not None:
        found += [Target(Kind.DNS, resolver, 53), Target(Kind.DNS, resolver, 53, query=True)]
    service = await read(client, SERVICE, Key(config.release_namespace, names.GATEWAY_SERVICE))
    address = ((service or {}).get("spec") or {}).get("clusterIP")
    if address and address != "None":
        found.append(Target(Kind.SERVICE, str(address), names.GATEWAY_PORT))
    label = f"{names.COMPONENT_LABEL}={GATEWAY_COMPONENT}"
    gateways = await listed(client, POD, config.release_namespace, labelSelector=label)
    ips = sorted(str(ip) for pod in gateways if (ip := (pod.get("status") or {}).get("podIP")))
    found += [Target(Kind.POD, ip, names.GATEWAY_PORT) for ip in ips[:1]]
    if config.evidence.outside is not None:
        outside, _, number = config.evidence.outside.rpartition(":")
        found.append(Target(Kind.OUTSIDE, outside, int(number)))
    return found


async def control(wanted: Sequence[Target]) -> dict[str, str]:
    """What this process reaches, by target id."""
    outcomes = await asyncio.gather(*(look.reach(t.host, t.port, query=t.query) for t in wanted))
    return {target.id: outcome for target, outcome in zip(wanted, outcomes, strict=True)}


async def knock(ip: str, ports: tuple[int, int]) -> dict[int, str]:
    """Both ports as they answer once policies have reached the pod; a probe whose open port answers is let go."""
    allowed, closed = ports
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        found = {allowed: await look.reach(ip, allowed), closed: await look.reach(ip, closed)}
        settled = found[allowed] == look.OPEN and found[closed] != look.OPEN
        if settled or time.monotonic() >= until:
            break
        await asyncio.sleep(0.5)
    if found[allowed] == look.OPEN:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(look.TRY_SECONDS):
                _, writer = await asyncio.open_connection(ip, allowed)
                writer.write(b"done\n")
                await writer.drain()
                writer.close()
                await writer.wait_closed()
    return found
