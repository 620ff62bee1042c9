"""What keeps others off a dedicated node and a dedicated tenant off the network, tried and not believed."""

from __future__ import annotations

from stack import promises
from stack.install import Stack


def test_foreign_pods_are_kept_off_the_dedicated_node(stack: Stack) -> None:
    findings = promises.foreign_pods(stack)
    assert [(what, words) for what, refused, words in findings if not refused] == []


def test_a_probe_inside_the_tenant_s_namespace_reaches_nothing(stack: Stack) -> None:
    findings = promises.network_probe(stack)
    assert [(what, words) for what, refused, words in findings if not refused] == []
