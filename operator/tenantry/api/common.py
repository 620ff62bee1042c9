"""Building blocks that the three kinds share: strict models, bounded strings, conditions."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP: Final = "tenantry.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

DNS_LABEL = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
SHA256_HEX = r"^[0-9a-f]{64}$"
DIGEST = r"^sha256:[0-9a-f]{64}$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"

DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
DnsSubdomain = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
Digest = Annotated[str, Field(max_length=71, pattern=DIGEST)]
Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=QUANTITY)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$")]


class Model(BaseModel):
    """An API object or a part of one: camelCase on the wire, unknown fields refused, never mutated."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_enum_values=False
    )

    def wire(self) -> dict[str, object]:
        """The JSON object as Kubernetes stores it: camelCase, without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Status(Model):
    """A status: what newer releases wrote there is ignored, not refused."""

    model_config = ConfigDict(extra="ignore")


class Tier(StrEnum):
    FREE = "Free"
    SMB = "Smb"
    MID_MARKET = "MidMarket"
    ENTERPRISE = "Enterprise"
    REGULATED = "Regulated"

    @property
    def dedicated(self) -> bool:
        """Whether the tier runs on nodes of its own."""
        return self in (Tier.ENTERPRISE, Tier.REGULATED)


class Condition(Status):
    """A metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    last_transition_time: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    message: Annotated[str, Field(max_length=4096)] = ""


Conditions = Annotated[list[Condition], Field(max_length=16)]
