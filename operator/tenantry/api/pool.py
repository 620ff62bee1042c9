"""AdapterPool: an engine fleet for one base model. Owned by the platform team, cluster-scoped."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .common import (
    PATTERN_MESSAGES,
    SET,
    Conditions,
    Digest,
    DnsLabel,
    DnsSubdomain,
    LabelKey,
    LabelValue,
    Model,
    Quantity,
    Rule,
    Status,
    Tier,
    keyed_by,
)

ABSOLUTE_PATH = r"^/[A-Za-z0-9._/-]+$"
RELATIVE_PATH = r"^[A-Za-z0-9._/-]*$"
PATTERN_MESSAGES[ABSOLUTE_PATH] = "must be an absolute path of letters, digits, `.`, `_`, `-` and `/`"
PATTERN_MESSAGES[RELATIVE_PATH] = "must be a path of letters, digits, `.`, `_`, `-` and `/`"

PINNED_IMAGE = r"^[a-z0-9][A-Za-z0-9._/:-]*@sha256:[0-9a-f]{64}$"
PATTERN_MESSAGES[PINNED_IMAGE] = "must be an image by digest, such as `registry.example/model@sha256:...`"

NO_PARENT = Rule(
    "!has(self.path) || !self.path.split('/').exists(part, part == '..')",
    "`path` must not climb with `..`; write the folder itself",
    field=".path",
)

NAME_RULES = (
    Rule(
        "size(self.metadata.name) <= 47 && self.metadata.name.matches('^[a-z][a-z0-9-]*$')",
        "`metadata.name` must begin with a letter, hold no dots and be at most 47 characters long, since Services and"
        " pods are named after the pool; choose a shorter name",
    ),
)


class ImageSource(Model):
    """The model lies in the engine image, in a folder of safetensors."""

    RULES: ClassVar[tuple[Rule, ...]] = (NO_PARENT,)

    path: Annotated[str, Field(min_length=2, max_length=512, pattern=ABSOLUTE_PATH)]
    """Absolute path inside the image."""


class ClaimSource(Model):
    """The model lies on a PersistentVolumeClaim in the namespace of the pool's pods; mounted read-only."""

    RULES: ClassVar[tuple[Rule, ...]] = (NO_PARENT,)

    claim_name: DnsSubdomain
    """Name of the claim."""
    path: Annotated[str, Field(max_length=512, pattern=RELATIVE_PATH)] = ""
    """Folder on the volume; empty is its root."""


class ImageVolumeSource(Model):
    """The model is an OCI image or artifact of its own, which the kubelet mounts read-only (from Kubernetes 1.33)."""

    RULES: ClassVar[tuple[Rule, ...]] = (NO_PARENT,)

    reference: Annotated[str, Field(min_length=1, max_length=512, pattern=PINNED_IMAGE)]
    """By digest, so that every replica mounts the same bytes."""
    path: Annotated[str, Field(max_length=512, pattern=RELATIVE_PATH)] = ""
    """Folder in the image; empty is its root."""


class ModelSource(Model):
    """Where the base model's folder comes from: exactly one of the fields."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.image), has(self.pvc), has(self.imageVolume)].filter(given, given).size() == 1",
            "`source` must have exactly one of `image`, `imageVolume` and `pvc`; keep the one that holds the model",
        ),
    )

    image: ImageSource | None = None
    """The model lies in the engine image."""
    pvc: ClaimSource | None = None
    """The model lies on a volume."""
    image_volume: ImageVolumeSource | None = None
    """The model is an image of its own."""


class BaseModelRef(Model):
    """The base model of a pool. `name` is what `Tenant.spec.models[].baseModel` refers to."""

    name: DnsLabel
    """What tenants refer to. Never changes: a pool serves one base model for life."""
    source: ModelSource
    digest: Digest | None = None
    """SHA-256 of the model as the engine reports it; another one and no replica is served."""


class Resources(Model):
    """Requests and limits of one engine pod."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.accelerator) == (has(self.acceleratorCount) && self.acceleratorCount > 0)",
            "`acceleratorCount` must be at least 1 where `accelerator` is set and 0 where it is not; set or drop both",
            field=".acceleratorCount",
        ),
    )

    cpu: Quantity = "1"
    """CPUs, requested and limited."""
    memory: Quantity = "2Gi"
    """Memory, requested and limited."""
    accelerator: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """An extended resource, e.g. nvidia.com/gpu."""
    accelerator_count: Annotated[int, Field(ge=0, le=16)] = 0
    """How many of it one pod gets."""


class EngineType(StrEnum):
    TENANTRY = "Tenantry"
    VLLM = "VLLM"


class Dtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Engine(Model):
    """How one engine pod runs."""

    type: EngineType = EngineType.TENANTRY
    """`VLLM`: vLLM on the pod's loopback behind Tenantry's agent; what it cannot guarantee is listed in the condition
    `Guaranteed`."""
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Absent: the release's engine image; vLLM's must be named. `:latest` and no tag are refused."""
    resources: Resources = Resources()
    dtype: Dtype = Dtype.BFLOAT16
    """Type of weights and KV cache."""
    max_model_len: Annotated[int, Field(ge=64, le=1_048_576)] = 2048
    """Longest sequence in tokens, input and output together."""
    pool_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 44)] | None = None
    """Bytes of the page pool that KV cache and adapters share; of vLLM, its KV cache. Absent: what memory leaves."""
    tensor_parallel: Annotated[int, Field(ge=1, le=16)] = 1
    """Processes that hold the model together; on accelerators one each."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.image) || (!self.image.endsWith(':latest')"
            " && self.image.matches('(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[0-9a-f]{64})$'))",
            "`image` must name a tag or a digest, and not `:latest`, so that every replica runs the same; pin it",
            field=".image",
        ),
        Rule(
            "!has(self.type) || self.type != 'VLLM' || has(self.image)",
            "`image` must be set where `type` is `VLLM`, since the release brings none; name vLLM's image",
            field=".image",
            reason="FieldValueRequired",
        ),
        Rule(
            "!has(self.tensorParallel) || self.tensorParallel == 1 || !has(self.resources)"
            " || !has(self.resources.accelerator) || (has(self.resources.acceleratorCount)"
            " && self.tensorParallel <= self.resources.acceleratorCount)",
            "`tensorParallel` must be at most `resources.acceleratorCount`, since each part takes an accelerator of its"
            " own; ask for more of them or split less",
            field=".tensorParallel",
        ),
    )


class Lora(Model):
    """Adapter limits of a pool. An absent `lora` means a shared pool that serves the base model only."""

    max_rank: Annotated[int, Field(ge=1, le=512)] = 64
    """Adapters of a larger rank are refused."""
    max_registered: Annotated[int, Field(ge=1, le=10_000)] = 2000
    """Adapters that one replica may know."""
    target_modules: Annotated[
        list[
            Literal[
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
                "embed_tokens",
                "lm_head",
            ]
        ],
        Field(min_length=1, max_length=9, json_schema_extra=SET),
    ] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Modules that adapters may change: the projections, and, where they are named here, embeddings and head."""


class LaneName(StrEnum):
    FAST = "fast"
    BULK = "bulk"


class Replicas(Model):
    """`min` alone: so many replicas run. With `max`, an autoscaler decides and the operator never writes the number."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.max) || !has(self.min) || self.max >= self.min",
            "`max` must be at least `min`; raise it, or drop it to keep the number fixed",
            field=".max",
        ),
    )

    min: Annotated[int, Field(ge=0, le=1000)] = 1
    """Replicas that run; with `max`, those that a new lane starts with and the fewest that its autoscaler keeps."""
    max: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Hands the number over to the autoscaler (HPA, KEDA) of the lane's StatefulSet. Absent: the operator keeps it."""


class Lane(Model):
    """Replicas for one shape of request."""

    name: LaneName
    """`fast` for short requests, `bulk` for long ones."""
    replicas: Replicas = Replicas()
    max_input_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Longest input that the lane takes. Absent: the engine's `maxModelLen`."""
    slots: Annotated[int, Field(ge=1, le=1024)] = 16
    """Sequences that one replica decodes at once."""


class Toleration(Model):
    """A toleration of the pool's pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.key != 'tenantry.dev/tenant'",
            "`key` must not be `tenantry.dev/tenant`, which keeps a tenant's nodes to its own pods; drop it",
            field=".key",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!(has(self.operator) && self.operator == 'Exists' && has(self.value))",
            "`value` must be absent where `operator` is `Exists`; drop it or use `Equal`",
            field=".value",
        ),
    )

    key: LabelKey
    """Key of the taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """`Exists` tolerates every value of the key."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Absent: every effect."""


class Spread(Model):
    """How evenly a lane's pods lie over the values of one node label."""

    topology_key: LabelKey
    """Label of the nodes."""
    max_skew: Annotated[int, Field(ge=1, le=100)] = 1
    """How many pods more one value may have than another."""
    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"
    """`DoNotSchedule` leaves a pod pending rather than uneven."""


class Scheduling(Model):
    """Where the pool's pods may run."""

    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=16)] = {}
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=16)] = []
    """Taints that the pods put up with."""
    priority_class_name: DnsSubdomain | None = None
    """An existing PriorityClass."""
    topology_spread: (
        Annotated[list[Spread], Field(min_length=1, max_length=4, json_schema_extra=keyed_by("topologyKey"))]
        | None
    ) = None
    """Absent: over nodes and zones, by one, where that can be."""


class Placement(Model):
    """How tenants spread over the replicas of a lane."""

    replicas_per_tenant: Annotated[int, Field(ge=1, le=64)] = 2
    """Replicas of a lane that one tenant is spread over."""
    max_tenants_per_replica: Annotated[int, Field(ge=1, le=10_000)] = 1000
    """Tenants that one replica may serve."""
    headroom_percent: Annotated[int, Field(ge=0, le=90)] = 0
    """Share of `maxTenantsPerReplica` that newcomers do not get, so that the tenants of a lost replica find room."""


class Upgrade(Model):
    """How a changed pool is rolled: canaries first, then the rest, and back where that fails.

    Fields that change no pod (lanes' replicas, placement, tiers, all of this but `retryToken`) roll nothing; neither
    does a new release of the operator, unless it brings another engine image and the pool names none.
    """

    canary_replicas: Annotated[int, Field(ge=0, le=100)] = 1
    """Replicas of a lane that run the new revision before others follow; 0: none goes ahead."""
    canary_seconds: Annotated[int, Field(ge=0, le=86_400)] = 30
    """How long a new replica must be ready and answer, without a restart, before it counts."""
    max_unavailable: Annotated[int, Field(ge=1, le=100)] = 1
    """Replicas of a lane that may be down at once; evictions are bounded by it too."""
    drain_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """Longest wait before a pod ends: for its tenants to find another replica, and again for its requests to end."""
    progress_deadline_seconds: Annotated[int, Field(ge=30, le=86_400)] = 1200
    """A new replica that has not come to count by then fails the revision; the earlier one comes back."""
    retry_token: Annotated[str, Field(max_length=64)] | None = None
    """Any text. Another one rolls the pool with the present release's template, and tries a failed revision again."""


class AdapterPoolSpec(Model):
    """What the platform team writes: one base model, its engine, its lanes and the tiers that may use it."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.baseModel.name == oldSelf.baseModel.name",
            "`baseModel.name` must stay as it is, since tenants and adapters are bound to it; make a new pool and move"
            " the tenants to it with `poolRef`",
            field=".baseModel.name",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.baseModel.digest) || !has(self.engine) || !has(self.engine.type) || self.engine.type != 'VLLM'"
            " || has(self.baseModel.source.pvc) || has(self.baseModel.source.imageVolume)",
            "`baseModel.digest` must be absent for a model in vLLM's image, which nobody but vLLM can read; put the"
            " model on a volume (`source.pvc`, `source.imageVolume`), or pin the image by its digest",
            field=".baseModel.digest",
            reason="FieldValueForbidden",
        ),
    )

    base_model: BaseModelRef
    tiers: Annotated[list[Tier], Field(min_length=1, max_length=5, json_schema_extra=SET)]
    """Tiers that the pool admits."""
    engine: Engine = Engine()
    lora: Lora | None = None
    """Adapter limits. Absent: the pool serves the base model only."""
    lanes: Annotated[list[Lane], Field(min_length=1, max_length=2, json_schema_extra=keyed_by("name"))]
    """Groups of replicas, one for each shape of request."""
    scheduling: Scheduling = Scheduling()
    placement: Placement = Placement()
    upgrade: Upgrade = Upgrade()


class LaneStatus(Status):
    """The StatefulSet of a lane as seen."""

    name: LaneName
    stateful_set: DnsSubdomain
    replicas: Annotated[int, Field(ge=0)] = 0
    ready_replicas: Annotated[int, Field(ge=0)] = 0
    updated_replicas: Annotated[int, Field(ge=0)] = 0
    """Replicas whose pods run the wanted revision."""


class AdapterCounts(Status):
    """Over the whole pool. `registered`: declared and verified on every replica that needs it."""

    declared: Annotated[int, Field(ge=0)] = 0
    registered: Annotated[int, Field(ge=0)] = 0


class AdapterPoolStatus(Status):
    """What the operator saw."""

    observed_generation: int = -1
    """The generation that this status speaks of; -1 until the operator has seen the object."""
    conditions: Conditions = []
    namespace: DnsLabel | None = None
    """Where the pool's pods run."""
    lanes: Annotated[list[LaneStatus], Field(max_length=2)] = []
    tenants: Annotated[int, Field(ge=0)] = 0
    """Tenants placed on the pool."""
    adapters: AdapterCounts = AdapterCounts()
