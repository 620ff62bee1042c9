"""AdapterPool: an engine fleet for one base model. Owned by the platform team, cluster-scoped."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from .common import (
    Conditions,
    Digest,
    DnsLabel,
    DnsSubdomain,
    LabelKey,
    LabelValue,
    Model,
    Quantity,
    Status,
    Tier,
)


class ImageSource(Model):
    """The model lies in the engine image, in a folder of safetensors."""

    path: Annotated[str, Field(min_length=2, max_length=512, pattern=r"^/[A-Za-z0-9._/-]+$")]


class ClaimSource(Model):
    """The model lies on a PersistentVolumeClaim in the namespace of the pool's pods; mounted read-only."""

    claim_name: DnsSubdomain
    path: Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z0-9._/-]*$")] = ""


class ModelSource(Model):
    """Where the base model's folder comes from: exactly one of the fields."""

    image: ImageSource | None = None
    pvc: ClaimSource | None = None


class BaseModelRef(Model):
    """The base model of a pool. `name` is what `Tenant.spec.models[].baseModel` refers to."""

    name: DnsLabel
    source: ModelSource
    digest: Digest | None = None


class Resources(Model):
    """Requests and limits of one engine pod. `accelerator` names an extended resource, e.g. nvidia.com/gpu."""

    cpu: Quantity = "1"
    memory: Quantity = "2Gi"
    accelerator: Annotated[str, Field(max_length=253)] | None = None
    accelerator_count: Annotated[int, Field(ge=0, le=16)] = 0


class EngineType(StrEnum):
    TENANTRY = "Tenantry"


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Engine(Model):
    """How one engine pod runs. `image` absent = the release's engine image."""

    type: EngineType = EngineType.TENANTRY
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    resources: Resources = Resources()
    dtype: Dtype = Dtype.BFLOAT16
    max_model_len: Annotated[int, Field(ge=64, le=1_048_576)] = 2048
    pool_bytes: Annotated[int, Field(ge=1 << 20)] | None = None


class Lora(Model):
    """Adapter limits of a pool. An absent `lora` means a shared pool that serves the base model only."""

    max_rank: Annotated[int, Field(ge=1, le=512)] = 64
    max_registered: Annotated[int, Field(ge=1, le=10_000)] = 2000
    target_modules: Annotated[
        list[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]],
        Field(min_length=1, max_length=7),
    ] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LaneName(StrEnum):
    FAST = "fast"
    BULK = "bulk"


class Replicas(Model):
    """`min` replicas run; scaling beyond it belongs to whoever scales the lane's StatefulSet."""

    min: Annotated[int, Field(ge=0, le=1000)] = 1


class Lane(Model):
    """Replicas for one shape of request. `slots` bounds the sequences that one replica decodes at once."""

    name: LaneName
    replicas: Replicas = Replicas()
    max_input_tokens: Annotated[int, Field(ge=1)] | None = None
    slots: Annotated[int, Field(ge=1, le=1024)] = 16


class Toleration(Model):
    key: LabelKey
    operator: Literal["Equal", "Exists"] = "Equal"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Scheduling(Model):
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=16)] = {}
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    priority_class_name: DnsSubdomain | None = None


class Placement(Model):
    """How tenants spread over the replicas of a lane."""

    replicas_per_tenant: Annotated[int, Field(ge=1, le=64)] = 2
    max_tenants_per_replica: Annotated[int, Field(ge=1, le=10_000)] = 1000


class Upgrade(Model):
    max_unavailable: Annotated[int, Field(ge=1, le=100)] = 1


class AdapterPoolSpec(Model):
    base_model: BaseModelRef
    tiers: Annotated[list[Tier], Field(min_length=1, max_length=5)]
    engine: Engine = Engine()
    lora: Lora | None = None
    lanes: Annotated[list[Lane], Field(min_length=1, max_length=2)]
    scheduling: Scheduling = Scheduling()
    placement: Placement = Placement()
    upgrade: Upgrade = Upgrade()


class LaneStatus(Status):
    name: LaneName
    stateful_set: DnsSubdomain
    replicas: Annotated[int, Field(ge=0)] = 0
    ready_replicas: Annotated[int, Field(ge=0)] = 0


class AdapterCounts(Status):
    """Over the whole pool. `registered`: declared and verified on every replica that needs it."""

    declared: Annotated[int, Field(ge=0)] = 0
    registered: Annotated[int, Field(ge=0)] = 0


class AdapterPoolStatus(Status):
    observed_generation: int = -1
    conditions: Conditions = []
    namespace: DnsLabel | None = None
    lanes: Annotated[list[LaneStatus], Field(max_length=2)] = []
    tenants: Annotated[int, Field(ge=0)] = 0
    adapters: AdapterCounts = AdapterCounts()
