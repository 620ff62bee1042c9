"""Building blocks that the three kinds share: strict models, bounded strings, conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

GROUP: Final = "tenantry.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

DNS_LABEL = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
SHA256_HEX = r"^[0-9a-f]{64}$"
DIGEST = r"^sha256:[0-9a-f]{64}$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
LABEL_VALUE = r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$"
QUALIFIED_NAME = (
    r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
)

# What an error says about a string that does not match, where "should match ^[a-z0-9]..." would help nobody.
PATTERN_MESSAGES: dict[str, str] = {
    DNS_LABEL: "must be a DNS label: lower-case letters, digits and `-`, with a letter or digit at both ends",
    DNS_SUBDOMAIN: "must be a DNS name: labels of lower-case letters, digits and `-`, joined by `.`",
    SHA256_HEX: "must be a SHA-256 in 64 lower-case hex digits; `tenantry keys mint` prints it",
    DIGEST: "must be `sha256:` and 64 lower-case hex digits; `tenantry adapters digest FOLDER` prints it",
    QUANTITY: "must be a Kubernetes quantity such as `500m`, `2` or `16Gi`, quoted where it is a bare number",
    LABEL_VALUE: "must be a label value: letters, digits, `-`, `_` and `.`, with a letter or digit at both ends",
    QUALIFIED_NAME: "must be a label key such as `zone` or `example.com/zone`",
}

DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
DnsSubdomain = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
Digest = Annotated[str, Field(max_length=71, pattern=DIGEST)]
Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=QUANTITY)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=QUALIFIED_NAME)]
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)]

# How server-side apply merges a list: as a set, or by the keys of its items. Lists without either are atomic.
SET: JsonDict = {"x-kubernetes-list-type": "set"}
# The default is the reader's alone: an absent field stays absent in the stored object.
NOT_STORED: JsonDict = {"x-tenantry-not-stored": True}


def keyed_by(key: str) -> JsonDict:
    """A list whose items are told apart by `key`: unique in the list, merged one by one."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


@dataclass(frozen=True)
class Rule:
    """What the API server checks beyond the schema: a CEL expression over `self` (and `oldSelf` on updates).

    `message` says what must be and how to get there; `field`, relative to the object that carries the rule, is where
    the error points.
    """

    cel: str
    message: str
    field: str = ""
    reason: Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired"] = "FieldValueInvalid"
    holds: Callable[[Any], bool] | None = None
    """The same of a model (or name) that was read, where nothing else of the operator's would refuse it: objects may be
    older than the rule."""
    once: bool = False
    """Asked at creation only. For what can never be changed: an object older than the rule could otherwise get neither
    a status nor rid of its finalizer, since every write checks the whole object."""

    def wire(self) -> dict[str, str | bool]:
        """The entry of `x-kubernetes-validations`."""
        entry: dict[str, str | bool] = {"rule": self.cel, "message": self.message, "reason": self.reason}
        if self.once:
            entry |= {"rule": f"oldSelf.hasValue() || ({self.cel})", "optionalOldSelf": True}
        return {**entry, "fieldPath": self.field} if self.field else entry


class Model(BaseModel):
    """An API object or a part of one: camelCase on the wire, unknown fields refused, never mutated."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_enum_values=False,
        use_attribute_docstrings=True,
    )

    RULES: ClassVar[tuple[Rule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema with the model's rules beside its fields."""
        schema = handler(core_schema)
        if cls.RULES:
            body = handler.resolve_ref_schema(schema)
            body["x-kubernetes-validations"] = [rule.wire() for rule in cls.RULES]
        return schema

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


Conditions = Annotated[list[Condition], Field(max_length=16, json_schema_extra=keyed_by("type"))]
