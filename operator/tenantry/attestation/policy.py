"""By what a gate judges a token: a document that the operator writes beside it. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tenantry.api.common import Model
from tenantry.api.config import Allowed, AttestationPolicy, ClaimPointer, VerifierService


class GatePolicy(Model):
    """What a token must be and say."""

    keys: Annotated[list[str], Field(min_length=1, max_length=8)]
    issuer: str
    runtime_data: ClaimPointer
    measurements: dict[ClaimPointer, Allowed]
    max_age_seconds: Annotated[int, Field(ge=1)]
    agent_url: str = ""


def gate_policy(service: VerifierService, policy: AttestationPolicy, max_age_seconds: int) -> GatePolicy:
    """The rules of one tenant: the admin's verifier and policy, and the tenant's own bound on age."""
    return GatePolicy(
        keys=service.keys,
        issuer=service.issuer,
        runtime_data=service.runtime_data,
        measurements=policy.measurements,
        max_age_seconds=max_age_seconds,
        agent_url=policy.agent_url,
    )
