"""Random valid objects of every kind, drawn from the structural schemas by hypothesis.

What a schema cannot say (the CEL rules) is put right after drawing, so that every object must be taken.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st
from tenantry.api import kinds
from tenantry.api.common import API_VERSION, Model
from tenantry.api.kinds import Kind
from tenantry.api.schema import structural

Object = dict[str, Any]
Draw = Any

_CIDRS = ["203.0.113.0/24", "198.51.100.7/32", "10.1.0.0/16", "2001:db8::/32"]
_TIMES = ["2026-01-02T03:04:05Z", "2027-12-31T23:59:59Z"]


@st.composite
def objects(draw: Draw, kind: Kind, full: bool) -> tuple[Object, Object]:
    """(spec, status) as the models write them; `full` sets every field."""
    spec = _value(draw, _schema(kind.spec), "spec", full)
    _MEND[kind.name](draw, spec)
    status = _value(draw, _schema(kind.status), "status", full)
    return _wire(kind.spec, spec), _wire(kind.status, status)


def document(kind: Kind, name: str, spec: Object) -> Object:
    """An object without status."""
    metadata = {"name": name, **({"namespace": "crd-tests"} if kind.scope == "Namespaced" else {})}
    return {"apiVersion": API_VERSION, "kind": kind.name, "metadata": metadata, "spec": spec}


@cache
def _schema(model: type[Model]) -> Object:
    return structural(model, friendly=False)


@cache
def _matching(pattern: str, low: int, high: int) -> st.SearchStrategy[str]:
    drawn = st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="ascii"))
    return drawn.filter(lambda text: low <= len(text) <= high)


def _wire(model: type[Model], value: Object) -> Object:
    return model.model_validate(value).wire()


def _value(draw: Draw, node: Object, field: str, full: bool) -> Any:
    kind = node["type"]
    if "enum" in node:
        return draw(st.sampled_from(node["enum"]))
    if kind == "object":
        return _object(draw, node, field, full)
    if kind == "array":
        return _list(draw, node, field, full)
    if kind == "integer":
        return draw(st.integers(node.get("minimum", -1), min(node.get("maximum", 2**53), 2**53)))
    if kind == "boolean":
        return draw(st.booleans())
    return _string(draw, node, field)


def _object(draw: Draw, node: Object, field: str, full: bool) -> Object:
    if "properties" in node:
        required = node.get("required", ())
        wanted = [name for name in node["properties"] if full or name in required or draw(st.booleans())]
        return {name: _value(draw, node["properties"][name], name, full) for name in wanted}
    keys = st.sampled_from(["zone", "example.com/zone", "a.b-c_d", "topology.kubernetes.io/region"])
    names = draw(st.lists(keys, unique=True, min_size=1 if full else 0, max_size=3))
    return {name: _value(draw, node["additionalProperties"], field, full) for name in names}


def _list(draw: Draw, node: Object, field: str, full: bool) -> list[Any]:
    low = max(node.get("minItems", 0), 1 if full else 0)
    size = draw(st.integers(low, max(low, min(node["maxItems"], 2))))
    items = [_value(draw, node["items"], field, full) for _ in range(size)]
    keys = node.get("x-kubernetes-list-map-keys")
    if keys:
        return list({tuple(item[key] for key in keys): item for item in items}.values())
    return list(dict.fromkeys(items)) if node["x-kubernetes-list-type"] == "set" else items


def _string(draw: Draw, node: Object, field: str) -> str:
    if node.get("format") == "date-time":
        return str(draw(st.sampled_from(_TIMES)))
    if field == "egress":
        return str(draw(st.sampled_from(_CIDRS)))
    low, high = node.get("minLength", 0), node["maxLength"]
    if "pattern" in node:
        return str(draw(_matching(node["pattern"], low, high)))
    return str(draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=low, max_size=min(high, 40))))


def _mend_tenant(draw: Draw, spec: Object) -> None:
    names = []
    for model in spec["models"]:
        model["name"] = model["name"].replace("--", "-")
        names.append(model["name"])
    spec["models"] = list({model["name"]: model for model in spec["models"]}.values())
    dedicated = spec["tier"] in ("Enterprise", "Regulated")
    if not dedicated:
        spec.pop("dedicated", None)
        spec.pop("isolation", None)
    elif "dedicated" not in spec:
        spec["dedicated"] = {"poolTemplateRef": "standard"}
    for model in spec["models"]:
        if spec["tier"] in ("Free", "Smb"):
            model.pop("adapterRef", None)
        others = [name for name in names if name != model["name"]]
        if "adapterRef" not in model:
            model.pop("pinned", None)
        if "fallback" in model:
            model["fallback"] = others[0] if others else model.pop("fallback") and None
    spec["adapterNamespaces"] = sorted(
        {model["adapterRef"]["namespace"] for model in spec["models"] if "adapterRef" in model}
    )


def _mend_pool(draw: Draw, spec: Object) -> None:
    source = spec["baseModel"]["source"]
    chosen = draw(st.sampled_from(["image", "pvc"]))
    place = {"path": "/models/x"} if chosen == "image" else {"claimName": "models", "path": "a/b"}
    source.clear()
    source[chosen] = place
    engine = spec.get("engine", {})
    if "image" in engine:
        engine["image"] = "registry.example.com:5000/engine:1.0.0"
    resources = engine.get("resources", {})
    if "accelerator" in resources:
        resources["acceleratorCount"] = max(1, resources.get("acceleratorCount", 1))
    else:
        resources.pop("acceleratorCount", None)
    if engine.get("type") == "VLLM":
        engine["image"] = "registry.example.com:5000/vllm:1.0.0"
        if chosen == "image":
            spec["baseModel"].pop("digest", None)
    if "tensorParallel" in engine and "accelerator" in resources:
        engine["tensorParallel"] = min(engine["tensorParallel"], resources["acceleratorCount"])
    for lane in spec["lanes"]:
        count = lane.get("replicas", {})
        if "max" in count:
            count["min"] = min(count.get("min", 1), count["max"])
    for toleration in spec.get("scheduling", {}).get("tolerations", []):
        if toleration.get("operator") == "Exists":
            toleration.pop("value", None)


def _mend_adapter(draw: Draw, spec: Object) -> None:
    listed = [entry["version"] for entry in spec["versions"]]
    spec["channels"][0]["name"] = "stable"
    spec["channels"] = list({channel["name"]: channel for channel in spec["channels"]}.values())
    for channel in spec["channels"]:
        channel["version"] = draw(st.sampled_from(listed))
        if channel["name"] == "stable":
            channel.pop("weight", None)
    verification = spec.get("verification")
    if verification is not None and "identities" not in verification:
        verification["keyRef"] = "release"
    elif verification is not None:
        verification.pop("keyRef", None)
    rollout = spec.get("rollout", {})
    if "steps" in rollout:
        rollout["steps"].sort(key=lambda step: step["weight"])
    if not rollout.get("steps"):
        rollout.pop("analysis", None)


_MEND = {
    kinds.TENANT.name: _mend_tenant,
    kinds.ADAPTER_POOL.name: _mend_pool,
    kinds.ADAPTER.name: _mend_adapter,
}
