"""What `kubectl get` and `kubectl explain` tell."""

from __future__ import annotations

from typing import Any

import pytest
from support.rest import Rest

from . import samples

pytestmark = pytest.mark.apiserver


def test_tenants_tell_their_story(rest: Rest, apiserver: Any) -> None:
    written = samples.tenant(
        "story", "MidMarket", auth={"apiKeys": [{"name": "first", "sha256": samples.HEX}]}
    )
    assert rest.apply(written).complaint == ""
    limits = dict.fromkeys(
        (
            "requestsPerMinute",
            "tokensPerMinute",
            "maxInFlight",
            "maxQueued",
            "maxInputTokens",
            "maxOutputTokens",
        ),
        7,
    )
    condition = {"type": "Ready", "status": "True", "reason": "Serving", "lastTransitionTime": samples.TIME}
    status = {
        "observedGeneration": 1,
        "conditions": [condition],
        "placement": [{"pool": "base", "namespace": "tenantry-system"}],
        "endpoint": {"url": "http://gateway.example/v1"},
        "route": {"weight": 1, "lane": "Auto", "limits": limits},
    }
    bare = {key: value for key, value in written.items() if key != "spec"}
    assert rest.apply({**bare, "status": status}, part="/status").complaint == ""
    head, row = apiserver.kubectl("get", "ten", "story").stdout.splitlines()
    assert head.split() == ["NAME", "TIER", "READY", "REASON", "POOL", "ENDPOINT", "AGE"]
    assert row.split()[:-1] == ["story", "MidMarket", "True", "Serving", "base", "http://gateway.example/v1"]
    head, row = apiserver.kubectl("get", "tenants", "story", "-o", "wide").stdout.splitlines()
    assert head.split()[7:9] == ["IN-FLIGHT", "KEY"]
    assert row.split()[7:9] == ["7", "first"]
    rest.delete(written)


def test_category_short_names_and_selectors(rest: Rest, apiserver: Any) -> None:
    documents = [
        samples.tenant("every-t"),
        samples.pool("every-p"),
        samples.adapter("every-a", tenantRef="every-t"),
    ]
    for document in documents:
        assert rest.apply(document).complaint == ""
    names = apiserver.kubectl("get", "tenantry", "-n", "crd-tests", "-o", "name").stdout
    for name in (
        "tenant.tenantry.dev/every-t",
        "adapterpool.tenantry.dev/every-p",
        "adapter.tenantry.dev/every-a",
    ):
        assert name in names.split()
    assert "every-p" in apiserver.kubectl("get", "apool").stdout
    chosen = apiserver.kubectl(
        "get", "adp", "-A", "--field-selector=spec.tenantRef=every-t", "-o", "name"
    ).stdout
    assert chosen.split() == ["adapter.tenantry.dev/every-a"]
    assert "`fast` for short requests" in apiserver.kubectl("explain", "adapterpool.spec.lanes.name").stdout
    for document in documents:
        rest.delete(document)
