"""Drivers that declare adapters to a replica and read back what is there, and the fetcher's client."""

from .base import (
    AdapterDeclaration,
    AdapterReport,
    AdapterState,
    Capacity,
    EngineDriver,
    EngineError,
    Fence,
    ModelReport,
    Pages,
    Replica,
    ReplicaReport,
)
from .fetcher import (
    AdapterFacts,
    ArtifactReport,
    ArtifactState,
    FetcherClient,
    PushReport,
    PushState,
    Transfer,
)
from .tenantry import TenantryDriver

__all__ = [
    "AdapterDeclaration",
    "AdapterFacts",
    "AdapterReport",
    "AdapterState",
    "ArtifactReport",
    "ArtifactState",
    "Capacity",
    "EngineDriver",
    "EngineError",
    "Fence",
    "FetcherClient",
    "ModelReport",
    "Pages",
    "PushReport",
    "PushState",
    "Replica",
    "ReplicaReport",
    "TenantryDriver",
    "Transfer",
]
