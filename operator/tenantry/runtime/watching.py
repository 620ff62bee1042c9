"""kopf as the watch and process layer: it keeps the streams alive, we take the bare events from it.

No create, update or delete handlers, timers, daemons or indices: those keep progress in annotations, add finalizers
and are edge-triggered. Peering, scanning and event posting are off; a stream that ends ends the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import kopf

from tenantry.cluster import Resource, key_of, uid_of

from .hub import Hub
from .leadership import identity
from .patience import EndlessBackoffs
from .watched import selector_of
from .workset import Priority

log = logging.getLogger(__name__)


def settings_for(resources: list[Resource]) -> kopf.OperatorSettings:
    """kopf with all that it would do on its own switched off."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.queueing.idle_timeout = 0.05
    # Every object that is listed has a worker until it was idle; others wait as they were read, which takes far more
    # memory than what is kept of them.
    settings.queueing.worker_limit = 1000
    settings.watching.initial_streaming = True
    settings.watching.connect_timeout = 10
    # bookmarks come about once a minute, sometimes later: only two missed ones make a stream count as dead
    settings.watching.inactivity_timeout = 150
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = EndlessBackoffs()
    settings.process.ultimate_exiting_timeout = 20
    for resource in resources:
        if selector := selector_of(resource):
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = selector
    return settings


def registry_for(hub: Hub, on_end: Callable[[], None]) -> kopf.OperatorRegistry:
    """One bare event handler for each watched kind."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_login)

    async def end(**_: Any) -> None:
        on_end()

    kopf.on.cleanup(registry=registry)(end)
    for resource in hub.resources():
        kopf.on.event(
            resource.group, resource.version, resource.plural, registry=registry, id=f"feed-{resource.plural}"
        )(_feeder(hub, resource))
    return registry


def _login(**arguments: Any) -> Any:
    """The pod's service account, else the kubeconfig that KUBECONFIG names."""
    return kopf.login_with_service_account(**arguments) or kopf.login_with_kubeconfig(**arguments)


def _feeder(hub: Hub, resource: Resource) -> Any:
    async def feed(event: Any, **_: Any) -> None:
        obj = dict(event["object"])
        if event["type"] == "DELETED":
            hub.left(resource, key_of(obj), uid_of(obj))
        elif event["type"] is None:
            hub.listed(resource, obj)
        else:
            hub.arrived(resource, obj, Priority.HIGH)

    return feed


async def watch(hub: Hub, on_end: Callable[[], None]) -> None:
    """Feed the hub until a signal, cancellation, or a stream that cannot be kept. Raises what ended it.

    `on_end` is called when the end begins: kopf waits for all tasks that began after it.
    """
    await kopf.operator(
        identity=cast(Any, identity()),  # else kopf asks for the name of a user that an image need not have
        registry=registry_for(hub, on_end),
        settings=settings_for(hub.resources()),
        clusterwide=True,
        standalone=True,
    )
