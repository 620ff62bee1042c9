"""Text of others (an error of a registry, say) in what the operator applies: no character may make an apply fail."""

from __future__ import annotations

import pytest
from tenantry.cluster import Client
from tenantry.cluster.transport import APPLY_PATCH

pytestmark = pytest.mark.apiserver


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("\U0001f600 \u4e2d \u00e9", "\U0001f600 \u4e2d \u00e9"),
        ("".join(map(chr, range(1, 0x300))), "".join(map(chr, range(1, 0x300)))),
        ("\u2028\u2029\ufeff\uffff", "\u2028\u2029\ufeff\uffff"),
        ("half a pair: \ud800", "half a pair: ?"),
    ],
)
async def test_any_text_is_applied(client: Client, namespace: str, text: str, stored: str) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "text"}, "data": {"a": text}}
    answer = await client.transport.request(
        "PATCH",
        f"/api/v1/namespaces/{namespace}/configmaps/text",
        query={"fieldManager": "tests", "force": "true"},
        body=body,
        content_type=APPLY_PATCH,
    )
    assert answer["data"]["a"] == stored
