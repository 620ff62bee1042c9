"""What a network probe must show: refused from inside, open from outside, at the same time, by the same tool.

A refusal alone proves nothing: the target may be down, the probe broken, its network dead. So a target counts only if
an ordinary pod (the operator's own) reaches it, and a probe only if it accepted the one connection that the policies
allow into the tenant's namespace. Beside that allowed port it listens on one that no policy opens.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from tenantry.desired.problems import join

from .findings import Finding, blind


class Kind(StrEnum):
    """What a target stands for."""

    API = "API server"
    DNS = "DNS"
    POD = "foreign pod"
    SERVICE = "foreign Service"
    METADATA = "metadata address"
    OUTSIDE = "outside address"


REQUIRED: Final = (Kind.API, Kind.DNS, Kind.POD, Kind.SERVICE)
"""There in every cluster; the others are told of where they answer anybody."""


@dataclass(frozen=True)
class Target:
    """Something to connect to. `query`: a DNS question over UDP instead of a TCP connection."""

    kind: Kind
    host: str
    port: int
    query: bool = False

    @property
    def id(self) -> str:
        return f"{self.kind.value} {self.host}:{self.port}{'/udp' if self.query else ''}"

    def wire(self) -> dict[str, Any]:
        return {"id": self.id, "host": self.host, "port": self.port, "query": self.query}


@dataclass(frozen=True)
class Inside:
    """What a probe told from inside. `reached` by target id; `accepted` counts connections that came in, by port;
    `knocked` is what the operator found at its two ports."""

    node: str
    kernel: str = ""
    reached: Mapping[str, str] = field(default_factory=dict)
    accepted: Mapping[int, int] = field(default_factory=dict)
    knocked: Mapping[int, str] = field(default_factory=dict)
    fault: str = ""


OPEN: Final = "open"


def parse(node: str, text: str, knocked: Mapping[int, str]) -> Inside:
    """The probe's last words, which come from a tenant's node: checked first. A fault says what is wrong with them."""
    try:
        document = json.loads(text)
        reached = {str(key)[:200]: str(value)[:40] for key, value in dict(document["reached"]).items()}
        accepted = {int(key): int(value) for key, value in dict(document["accepted"]).items()}
        return Inside(node, str(document["kernel"])[:128], reached, accepted, dict(knocked))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        return Inside(node, fault=f"its last words cannot be read ({type(error).__name__})")


def judge(
    targets: Sequence[Target],
    probes: Sequence[Inside],
    *,
    control: Mapping[str, str],
    ports: tuple[int, int],
    egress: Sequence[str],
    at: float,
) -> Finding:
    """Whether the tenant's namespace is closed. `control`: what the operator itself reached; `ports`: the one that
    the policies open to it, and one that they do not; `egress`: what the tenant may reach."""
    allowed, closed = ports
    barred = [target for target in targets if not _inside(target.host, egress)]
    facts, open_, dead = [], [], []
    for probe in probes:
        for target in targets:
            outcome = probe.reached.get(target.id, "not tried")
            facts.append(
                f"{probe.node}: {target.id}: {outcome}; from an ordinary pod: {control.get(target.id, '?')}"
            )
        doors = [f"port {port} {probe.knocked.get(port, 'not tried')}" for port in ports]
        facts.append(f"{probe.node}: from the operator, which may reach the first: {', '.join(doors)}")
        open_ += [target.kind.value for target in barred if probe.reached.get(target.id) == OPEN]
        if probe.knocked.get(closed) == OPEN:
            open_.append("a port that no policy opens, from another namespace")
        if probe.fault or probe.knocked.get(allowed) != OPEN or not probe.accepted.get(allowed, 0):
            dead.append(probe.node)
    found = tuple(facts)
    if open_:
        return Finding(False, f"reached in spite of the policies: {', '.join(sorted(set(open_)))}", at, found)
    if not probes:
        return blind("no probe has run", at, found)
    if dead:
        why = next(
            (probe.fault for probe in probes if probe.fault), "it never saw the connection that is allowed"
        )
        return blind(f"the probe on node {join(sorted(set(dead)))} proves nothing: {why}", at, found)
    untried = [kind.value for kind in REQUIRED if not _proven(kind, barred, probes, control)]
    if untried:
        missing = ", ".join(untried)
        return blind(f"a refusal proves nothing where an ordinary pod is refused too: {missing}", at, found)
    proven = [kind.value for kind in Kind if _proven(kind, barred, probes, control)]
    return Finding(True, f"refused from inside, open from outside: {', '.join(proven)}", at, found)


def _proven(
    kind: Kind, targets: Sequence[Target], probes: Sequence[Inside], control: Mapping[str, str]
) -> bool:
    """Whether some target of the kind was tried by every probe while an ordinary pod reached it."""
    tried = [target for target in targets if target.kind is kind and control.get(target.id) == OPEN]
    return any(all(target.id in probe.reached for probe in probes) for target in tried)


def _inside(host: str, egress: Sequence[str]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in ipaddress.ip_network(cidr, strict=False) for cidr in egress)
