"""A whole operator with a test's own controller, as a program; see its end for the arguments.

The controller makes one ConfigMap for each Tenant and reports in its status, with the fence that it was given. A Tenant
whose prompt says `poison` crashes it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tenantry.cluster import CONFIG_MAP, TENANT, Key, condition, is_deleting
from tenantry.runtime import logs
from tenantry.runtime.controller import DONE, Context, Controller, Result, Setup, Watch, own_key, owner_key
from tenantry.runtime.main import Options, operate


class TenantReconciler:
    async def reconcile(self, key: Key, ctx: Context) -> Result:
        tenant = ctx.store.get(TENANT, key)
        if tenant is None or is_deleting(tenant):
            return DONE
        system = tenant["spec"].get("prompt", {}).get("system", "")
        if system == "poison":
            raise RuntimeError("poisoned")
        owned = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"made-{key.name}", "namespace": ctx.config.release_namespace},
            "data": {"system": system},
        }
        await ctx.ensure(tenant, [owned])
        await ctx.prune(tenant, [CONFIG_MAP], [owned])
        epoch, _ = ctx.fence()
        message = f"{system} by epoch {epoch}"
        await ctx.set_status(
            tenant, {"tier": "Free", "conditions": [condition("Ready", True, "Serving", message)]}
        )
        return DONE


def build(setup: Setup) -> list[Controller]:
    watches = [Watch(TENANT, own_key), Watch(CONFIG_MAP, owner_key("Tenant"))]
    return [Controller("tenant", TenantReconciler(), watches)]


if __name__ == "__main__":
    logs.configure()
    kubeconfig, config, namespace, port, resync_seconds = sys.argv[1:]
    os.environ["KUBECONFIG"] = kubeconfig
    options = Options(Path(config), None, None, namespace, Path(kubeconfig), int(port), float(resync_seconds))
    asyncio.run(operate(options, build))
