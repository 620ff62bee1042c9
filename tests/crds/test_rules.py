"""Every rule from both sides on the real API server: what it must take, and what it must refuse with which words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tenantry.api.crd import root_schema
from tenantry.api.kinds import KINDS

from . import samples
from .samples import DIGEST, HEX, OTHER_DIGEST, adapter, changed, pool, tenant, version

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]

REF = {"namespace": "acme-ml", "name": "tone"}
SHARED = ("Free", "Smb", "MidMarket")
NO_CIDRS = ("203.0.113.7/24", "203.0.113.7", "example.com")
LINK_LOCAL = (
    *("169.254.169.254/32", "169.254.0.0/16", "0.0.0.0/0", "168.0.0.0/6"),
    *("127.0.0.1/32", "fe80::1/128", "::/0"),
)
CHAT = {"name": "chat", "baseModel": "smollm2"}
MODEL = {"name": "smollm2", "source": {"image": {"path": "/models/smollm2"}}}


def _bound(**extra: Any) -> list[Object]:
    return [{**CHAT, "adapterRef": REF, **extra}]


def _mid(name: str, *namespaces: str, tier: str = "MidMarket") -> Object:
    return tenant(name, tier, models=_bound(), adapterNamespaces=list(namespaces))


def _key(**fields: Any) -> Object:
    return tenant("t-key", auth={"apiKeys": [{"name": "a", "sha256": HEX, **fields}]})


def _tolerating(**fields: Any) -> Object:
    return pool("p-tolerating", scheduling={"tolerations": [fields]})


def _at(number: str) -> Object:
    return adapter("a-at", versions=[version(number)], channels=[{"name": "stable", "version": number}])


def _verified(**fields: Any) -> Object:
    return adapter("a-verified", verification=fields)
_STABLE = {"name": "stable", "version": "1.0.0"}
_ERRORS = {"metric": "ErrorsPerThousand", "threshold": 10}


def _isolated(**fields: Any) -> Object:
    return tenant("t-isolated", "Enterprise", isolation=fields)


def _model(**source: Any) -> Object:
    return pool("p-source", baseModel={"name": "smollm2", "source": source})


def _engine(**fields: Any) -> Object:
    return pool("p-engine", engine=fields)


# (what it shows, object that must be taken)
TAKEN: list[tuple[str, Object]] = [
    ("smallest", tenant("t-small")),
    ("longest name", tenant("t" * 40)),
    ("name begins with a digit", tenant("1t")),
    ("adapter in a listed namespace", _mid("t-a", "acme-ml")),
    ("adapter of a dedicated tenant", _mid("t-b", "acme-ml", tier="Enterprise")),
    ("fallback", tenant("t-c", models=[{**CHAT, "fallback": "small"}, {"name": "small", "baseModel": "tiny"}])),
    ("dedicated", tenant("t-d", "Regulated")),
    ("isolation", _isolated(region="eu-1", nodeSelector={"example.com/zone": "a", "rack": ""}, nodes=3)),
    ("isolation that asks for nothing", tenant("t-e", "Free", isolation={"nodes": 1, "egress": []})),
    ("egress", _isolated(egress=["203.0.113.0/24", "198.51.100.7/32", "2001:db8::/32", "10.0.0.0/8"])),
    ("keys", _key(expiresAt=samples.TIME)),
    ("single hyphens in an alias", tenant("t-g", models=[{**CHAT, "name": "a-b-c"}])),
    ("pool on a claim", _model(pvc={"claimName": "models", "path": "smollm2/v1"})),
    ("longest pool name", pool("p" * 47)),
    ("accelerator", _engine(resources={"accelerator": "nvidia.com/gpu", "acceleratorCount": 1})),
    ("image by tag", _engine(image="registry.example.com:5000/engine:1.0.0")),
    ("image by digest", _engine(image=f"registry.example.com/engine@{DIGEST}")),
    ("two lanes", pool("p-lanes", lanes=[{"name": "fast"}, {"name": "bulk", "maxInputTokens": 4096}])),
    ("tolerations", _tolerating(key="gpu", operator="Exists")),
    ("adapter", adapter("a-small")),
    ("longest adapter name", adapter("a" * 63)),
    ("canary", adapter("a-can", channels=[_STABLE, {"name": "canary", "version": "1.0.0", "weight": 100}])),
    ("steps", adapter("a-steps", rollout={"steps": [{"weight": 5}, {"weight": 5}], "analysis": [_ERRORS]})),
    ("no steps", adapter("a-no", rollout={"steps": [], "analysis": []})),
    ("pre-release", _at("1.0.0-rc.1")),
    ("source by digest", adapter("a-dig", versions=[version("1.0.0", source=f"oci://r.example/a/b@{DIGEST}")])),
    ("a bucket", adapter("a-s3", versions=[version("1.0.0", source="s3://s3.example:9000/models/Tone/1.0.0")])),
    ("a commit", adapter("a-hf", versions=[version("1.0.0", source=f"hf://hub.example/acme/tone@{HEX[:40]}")])),
    ("credentials", adapter("a-sec", versions=[version("1.0.0", secretRef="registry.login")])),
    ("a key", _verified(keyRef="release")),
    ("a signer", _verified(policy="Warn", identities=[{"issuer": "https://i.example", "subject": "a@b.example"}])),
]  # fmt: skip

# (words of the complaint, object that must be refused)
REFUSED: list[tuple[str, Object]] = [
    ("`metadata.name` must be a DNS label of at most 40", tenant("t" * 41)),
    ("`metadata.name` must be a DNS label of at most 40", tenant("a.b")),
    ("`models[].adapterRef.namespace` must be listed in `adapterNamespaces`", _mid("x")),
    ("`models[].adapterRef.namespace` must be listed", _mid("x", "b")),
    ("`models[].adapterRef` must be absent in tiers Free", _mid("x", "acme-ml", tier="Free")),
    ("`models[].adapterRef` must be absent in tiers Free", _mid("x", "acme-ml", tier="Smb")),
    ("`pinned` must stand beside `adapterRef`", tenant("x", models=[{**CHAT, "pinned": True}])),
    ("`models[].fallback` must be the `name` of another", tenant("x", models=[{**CHAT, "fallback": "chat"}])),
    ("`models[].fallback` must be the `name` of another", tenant("x", models=[{**CHAT, "fallback": "gone"}])),
    ("`dedicated` must be set", changed(tenant("x"), tier="Enterprise")),
    ("`dedicated` must be set", changed(tenant("x"), tier="Regulated")),
    *(("`dedicated` must be absent", changed(tenant("x", "Enterprise"), tier=tier)) for tier in SHARED),
    ("`isolation` must be absent", tenant("x", isolation={"region": "eu-1"})),
    ("`isolation` must be absent", tenant("x", isolation={"nodes": 2})),
    ("`isolation` must be absent", tenant("x", isolation={"nodeSelector": {"a": "b"}})),
    ("`isolation` must be absent", tenant("x", "MidMarket", isolation={"egress": ["203.0.113.0/24"]})),
    *(("`egress` must be a list of CIDRs", _isolated(egress=[text])) for text in NO_CIDRS),
    *(("`egress` must not touch link-local", _isolated(egress=[text])) for text in LINK_LOCAL),
    ("each key of `nodeSelector` must be a label key", _isolated(nodeSelector={"a b": "c"})),
    ("each key of `nodeSelector` must be a label key", _isolated(nodeSelector={"k" * 318: "c"})),
    ("must be a label value", _isolated(nodeSelector={"a": "b c"})),
    ("`region` must be a label value", _isolated(region="-x")),
    ("`name` must not contain `--`", tenant("x", models=[{**CHAT, "name": "a--b"}])),
    ("`name` must be a DNS label", tenant("x", models=[{**CHAT, "name": "Chat"}])),
    ("`baseModel` must be a DNS label", tenant("x", models=[{**CHAT, "baseModel": "a/b"}])),
    ("`poolRef` must be a DNS name", tenant("x", models=[{**CHAT, "poolRef": "../x"}])),
    ("`adapterNamespaces[]` must be a DNS label", tenant("x", adapterNamespaces=["*"])),
    ("duplicate entries for key", tenant("x", models=[CHAT, CHAT])),
    ("`sha256` must be a SHA-256 in 64 lower-case hex digits", _key(sha256=HEX.upper())),
    ("`sha256` must be a SHA-256 in 64 lower-case hex digits", _key(sha256="tk_x_secret")),
    ("date-time", _key(expiresAt="soon")),
    ("Unsupported value", changed(tenant("x"), tier="Gold")),
    ("field not declared in schema", tenant("x", prompts={})),
    ("`metadata.name` must begin with a letter", pool("1p")),
    ("`metadata.name` must begin with a letter", pool("a.b")),
    ("`metadata.name` must begin with a letter", pool("p" * 48)),
    ("`source` must have exactly one", _model()),
    ("`source` must have exactly one", _model(image={"path": "/m"}, pvc={"claimName": "m"})),
    ("must be an image by digest", _model(imageVolume={"reference": "registry.example/model:1"})),
    ("`path` must not climb", _model(image={"path": "/models/../etc"})),
    ("`path` must not climb", _model(pvc={"claimName": "m", "path": ".."})),
    ("`path` must be an absolute path", _model(image={"path": "models"})),
    ("`path` must be a path of letters", _model(pvc={"claimName": "m", "path": "a b"})),
    ("`claimName` must be a DNS name", _model(pvc={"claimName": "M"})),
    ("`acceleratorCount` must be at least 1", _engine(resources={"accelerator": "nvidia.com/gpu"})),
    ("`acceleratorCount` must be at least 1", _engine(resources={"acceleratorCount": 1})),
    ("`cpu` must be a Kubernetes quantity", _engine(resources={"cpu": "two"})),
    ("`image` must name a tag or a digest", _engine(image="registry.example.com:5000/engine")),
    ("`image` must name a tag or a digest", _engine(image="engine:latest")),
    ("`key` must not be `tenantry.dev/tenant`", _tolerating(key="tenantry.dev/tenant")),
    ("`key` must be a label key", _tolerating(key="a b")),
    ("`value` must be absent", _tolerating(key="a", operator="Exists", value="b")),
    ("Required value", _tolerating(operator="Exists")),
    ("duplicate entries for key", pool("x", lanes=[{"name": "fast"}, {"name": "fast"}])),
    ("duplicate entries for key", pool("x", tiers=["Free", "Free"])),
    ("`max` must be at least `min`", pool("x", lanes=[{"name": "fast", "replicas": {"min": 3, "max": 2}}])),
    ("`image` must be set where `type` is `VLLM`", pool("x", engine={"type": "VLLM"})),
    (
        "`tensorParallel` must be at most",
        pool("x", engine={"tensorParallel": 2, "resources": {"accelerator": "a/b", "acceleratorCount": 1}}),
    ),
    (
        "`baseModel.digest` must be absent",
        pool(
            "x",
            baseModel={**MODEL, "digest": DIGEST},
            engine={"type": "VLLM", "image": "registry.example/vllm:1"},
        ),
    ),
    ("`digest` must be `sha256:`", pool("x", baseModel={**MODEL, "digest": HEX})),
    ("`metadata.name` must be a DNS label of at most 63", adapter("a--b")),
    ("`metadata.name` must be a DNS label of at most 63", adapter("a.b")),
    ("`metadata.name` must be a DNS label of at most 63", adapter("a" * 64)),
    ("`version` must be a semantic version", _at("1.0.0+1")),
    ("`version` must be a semantic version", _at("1.0.0-a--b")),
    ("`digest` must be `sha256:`", adapter("x", versions=[version("1.0.0", digest="md5:1234")])),
    ("`source` must be an OCI reference", adapter("x", versions=[version("1.0.0", source="https://example.com/a")])),
    *(
        ("`source` must be an OCI reference", adapter("x", versions=[version("1.0.0", source=source)]))
        for source in ("s3://h/b/../c", "hf://h/acme/tone@main", "hf://h/acme/tone", "s3://k:s@h/b/c", "file:///etc")
    ),
    ("`secretRef` must be a DNS name", adapter("x", versions=[version("1.0.0", secretRef="../other")])),
    ("exactly one of `keyRef` and `identities`", _verified(policy="Warn")),
    (
        "exactly one of `keyRef` and `identities`",
        _verified(keyRef="a", identities=[{"issuer": "https://i.example", "subject": "a"}]),
    ),
    ("`issuer` must be the URL", _verified(identities=[{"issuer": "i.example", "subject": "a@b.example"}])),
    ("Unsupported value", _verified(policy="Maybe", keyRef="a")),
    ("`channels[].version` must be one of", adapter("x", channels=[{"name": "stable", "version": "2.0.0"}])),
    ("duplicate entries for key", adapter("x", versions=[version("1.0.0"), version("1.0.0")])),
    ("`channels` must hold the channel `stable`", adapter("x", channels=[{"name": "canary", "version": "1.0.0"}])),
    ("`weight` must be absent from", adapter("x", channels=[{"name": "stable", "version": "1.0.0", "weight": 5}])),
    ("`steps[].weight` must not fall", adapter("x", rollout={"steps": [{"weight": 50}, {"weight": 10}]})),
    ("`analysis` must stand beside `steps`", adapter("x", rollout={"analysis": [_ERRORS]})),
    ("duplicate entries for key", adapter("x", rollout={"steps": [{"weight": 5}], "analysis": [_ERRORS, _ERRORS]})),
    ("Unsupported value", adapter("x", channels=[{"name": "beta", "version": "1.0.0"}])),
    ("`tenantRef` must be a DNS name", adapter("x", tenantRef="A")),
]  # fmt: skip

# (words, object as it is, change that must be refused)
FROZEN: list[tuple[str, Object, Object]] = [
    ("`tenantRef` must stay as it is", adapter("f-a"), {"tenantRef": "other"}),
    ("`baseModel.name` must stay as it is", pool("f-p"), {"baseModel": {**MODEL, "name": "other"}}),
    *(
        ("`source` and `rank` must stay", adapter("f-a"), {"versions": [version("1.0.0", **field)]})
        for field in ({"digest": OTHER_DIGEST}, {"source": "oci://elsewhere.example/a/b:1"}, {"rank": 16})
    ),
]  # fmt: skip

_TWO = [version("1.0.0"), version("1.1.0", digest=OTHER_DIGEST, rank=16)]
# (what it shows, object as it is, change that must be taken)
MOVES: list[tuple[str, Object, Object]] = [
    ("a promotion", adapter("m-a", versions=_TWO), {"channels": [{"name": "stable", "version": "1.1.0"}]}),
    ("a version more", adapter("m-a"), {"versions": _TWO}),
    ("a version less", adapter("m-a", versions=_TWO), {"versions": _TWO[:1]}),
    ("other weights of the same model", pool("m-p"), {"baseModel": {**MODEL, "digest": DIGEST}}),
    ("a tier down", tenant("m-t", "MidMarket"), {"tier": "Smb"}),
]


@pytest.mark.parametrize("document", [d for _, d in TAKEN], ids=[title for title, _ in TAKEN])
def test_taken(apply: Callable[[Object], str], document: Object) -> None:
    assert apply(document) == ""


@pytest.mark.parametrize(("words", "document"), REFUSED)
def test_refused(apply: Callable[[Object], str], words: str, document: Object) -> None:
    assert words in apply(document)


@pytest.mark.parametrize(("words", "document", "change"), FROZEN)
def test_frozen(apply: Callable[[Object], str], words: str, document: Object, change: Object) -> None:
    assert apply(document) == ""
    assert words in apply(changed(document, **change))


@pytest.mark.parametrize(("document", "change"), [m[1:] for m in MOVES], ids=[title for title, *_ in MOVES])
def test_moves(apply: Callable[[Object], str], document: Object, change: Object) -> None:
    assert apply(document) == ""
    assert apply(changed(document, **change)) == ""


def test_every_message_is_seen_in_a_refusal() -> None:
    """No rule without a test: each message of the schemas begins with words that a refusal above expects."""
    expected = [words for words, *_ in (*REFUSED, *FROZEN)]
    kinds_of_message = {_words(message) for kind in KINDS for message in _messages(root_schema(kind))}
    unseen = {
        m for m in kinds_of_message if not any(_words(words) in m or m in _words(words) for words in expected)
    }
    assert unseen == set()


def test_every_message_says_what_must_be() -> None:
    for kind in KINDS:
        for message in _messages(root_schema(kind)):
            assert " must " in message
            assert "`" in message


def _words(message: str) -> str:
    """The message from its "must" on for shared patterns, so that one field stands for all of the type."""
    return message[message.index("must") :] if "must" in message else message


def _messages(node: Object) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", ()):
        yield rule["message"]
    for child in (*node.get("properties", {}).values(), node.get("items"), node.get("additionalProperties")):
        if isinstance(child, dict):
            yield from _messages(child)
