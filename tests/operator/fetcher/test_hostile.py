"""Registries that lie, redirect or never end; addresses nobody may read; files that are not what they say."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tenantry.engines import Pull
from tenantry.fetcher.artifact import facts, read_facts
from tenantry.fetcher.errors import FetchError
from tenantry.fetcher.net import OriginPolicy, Resolver, forbidden, system_resolver
from tenantry.fetcher.reference import parse_source
from tenantry.fetcher.sources import Receipt, Sources

from .conftest import Answer, Files, Scripted, adapter, descriptor, manifest, safetensors, sha256

Start = Callable[[], Any]


def reader(
    *servers: Scripted | str,
    private: bool = True,
    max_bytes: int = 1 << 20,
    seconds: float = 10.0,
    resolver: Resolver = system_resolver,
) -> Sources:
    origins = [server if isinstance(server, str) else server.origin for server in servers]
    return Sources(OriginPolicy.build(origins, origins, private), max_bytes, seconds, resolver)


async def refused(registry: Sources, source: str, digest: str, target: Path) -> FetchError:
    with pytest.raises(FetchError) as caught:
        await registry.pull(Pull(digest, source), target)
    return caught.value


async def test_the_honest_way(scripted: Start, tmp_path: Path) -> None:
    server, files = await scripted(), adapter()
    source = server.serve(files)
    assert await reader(server).pull(Pull(files.digest, source), tmp_path / "b") == Receipt(
        len(files.blob), sha256(json.dumps(manifest(files)).encode())
    )
    assert (tmp_path / "b").read_bytes() == files.blob
    assert read_facts(tmp_path / "b").rank == 4
    pinned = f"{source}@{sha256(json.dumps(manifest(files)).encode())}"
    server.routes[f"/v2/acme/tone/manifests/{pinned.partition('@')[2]}"] = server.routes[
        "/v2/acme/tone/manifests/1.0.0"
    ]
    await reader(server).pull(Pull(files.digest, pinned), tmp_path / "c")


async def test_other_bytes_than_the_adapter_names(scripted: Start, tmp_path: Path) -> None:
    server = await scripted()
    source = server.serve(adapter(fill=1))
    error = await refused(reader(server), source, adapter(fill=2).digest, tmp_path / "b")
    assert error.reason == "DigestMismatch"
    assert adapter(fill=1).digest in error.message


async def test_a_manifest_other_than_the_pinned_one(scripted: Start, tmp_path: Path) -> None:
    server, files = await scripted(), adapter()
    source = server.serve(files) + "@sha256:" + "0" * 64
    server.routes["/v2/acme/tone/manifests/sha256:" + "0" * 64] = server.routes[
        "/v2/acme/tone/manifests/1.0.0"
    ]
    error = await refused(reader(server), source, files.digest, tmp_path / "b")
    assert (error.reason, "manifest" in error.message) == ("DigestMismatch", True)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda raw: Answer(body=raw[:-1] + b"\x01"), "DigestMismatch"),
        (lambda raw: Answer(body=raw[:-1]), "DigestMismatch"),
        (lambda raw: Answer(body=raw[:-1], length=len(raw)), "SourceUnavailable"),
        (lambda raw: Answer(body=raw + b"more"), "DigestMismatch"),
        (lambda raw: Answer(body=raw, headers={"content-encoding": "gzip"}), "InvalidArtifact"),
        (lambda raw: Answer(404), "NotFound"),
        (lambda raw: Answer(403), "AccessDenied"),
        (lambda raw: Answer(500), "SourceUnavailable"),
    ],
    ids=["flipped", "short", "cut", "long", "encoded", "404", "403", "500"],
)
async def test_a_layer_that_is_not_what_was_promised(
    scripted: Start, tmp_path: Path, answer: Callable[[bytes], Answer], reason: str
) -> None:
    server, files = await scripted(), adapter()
    source = server.serve(files)
    server.routes[f"/v2/acme/tone/blobs/{sha256(files.weights)}"] = answer(files.weights)
    assert (await refused(reader(server), source, files.digest, tmp_path / "b")).reason == reason


async def test_too_large_is_refused_before_a_layer_is_read(scripted: Start, tmp_path: Path) -> None:
    server, files = await scripted(), adapter()
    source = server.serve(files)
    error = await refused(reader(server, max_bytes=len(files.blob) - 1), source, files.digest, tmp_path / "b")
    assert (error.reason, len(server.asked)) == ("TooLarge", 1)
    await reader(server, max_bytes=len(files.blob)).pull(Pull(files.digest, source), tmp_path / "c")


async def test_an_endless_layer_stops_at_its_promise(scripted: Start, tmp_path: Path) -> None:
    server, files = await scripted(), adapter()
    source = server.serve(files)
    server.routes[f"/v2/acme/tone/blobs/{sha256(files.config)}"] = Answer(
        body=b"x" * (4 << 20), length=1 << 40
    )
    assert (await refused(reader(server), source, files.digest, tmp_path / "b")).reason == "DigestMismatch"
    assert (tmp_path / "b").stat().st_size <= len(files.blob)


async def test_a_silent_registry_ends_at_the_time_limit(scripted: Start, tmp_path: Path) -> None:
    server, files = await scripted(), adapter()
    source = server.serve(files)
    server.routes[f"/v2/acme/tone/blobs/{sha256(files.weights)}"] = Answer(length=1000, hang=True)
    error = await refused(reader(server, seconds=0.3), source, files.digest, tmp_path / "b")
    assert (error.reason, "0.3 s" in error.message) == ("SourceUnavailable", True)


async def test_a_huge_manifest(scripted: Start, tmp_path: Path) -> None:
    server = await scripted()
    source = server.serve(adapter(), lambda m: json.dumps(m).encode() + b" " * (2 << 20))
    assert (await refused(reader(server), source, adapter().digest, tmp_path / "b")).reason == "TooLarge"


def _layers(
    change: Callable[[list[dict[str, Any]]], list[Any]],
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda m: m | {"layers": change(m["layers"])}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_layers(lambda _: []), "adapter_config.json"),
        (_layers(lambda layers: layers[:1]), "adapter_model.safetensors"),
        (_layers(lambda layers: [*layers, layers[0]]), "not two"),
        (_layers(lambda _: ["a", 1, None]), "adapter_config.json"),
        (_layers(lambda layers: [layers[0], layers[1] | {"digest": "sha256:../../x"}]), "sha256 digest"),
        (_layers(lambda layers: [layers[0], layers[1] | {"size": -1}]), "size"),
        (_layers(lambda layers: [layers[0], layers[1] | {"size": True}]), "size"),
        (lambda _: b"[1, 2]", "one manifest"),
        (lambda _: b"\xff\xfe", "JSON"),
        (lambda _: b"[" * 100_000, "JSON"),
        (lambda m: m | {"mediaType": "application/vnd.oci.image.index.v1+json"}, "not an index"),
        (lambda m: m | {"layers": {}}, "adapter_config.json"),
    ],
)
async def test_a_manifest_of_something_else(
    scripted: Start, tmp_path: Path, change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    server = await scripted()
    source = server.serve(adapter(), change)
    error = await refused(reader(server), source, adapter().digest, tmp_path / "b")
    assert error.reason == "InvalidArtifact"
    assert text in error.message


@pytest.mark.parametrize(
    "title", ["../adapter_config.json", "/etc/passwd", "./adapter_config.json", "a/adapter_config.json", 7]
)
async def test_titles_never_become_paths(scripted: Start, tmp_path: Path, title: Any) -> None:
    server, files = await scripted(), adapter()
    source = server.serve(files, _layers(lambda ls: [descriptor(files.config, title), ls[1]]))
    assert (await refused(reader(server), source, files.digest, tmp_path / "b")).reason == "InvalidArtifact"
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("b", 0)]


async def test_layers_that_nobody_asked_for_are_left_there(scripted: Start, tmp_path: Path) -> None:
    server, files = await scripted(), adapter()
    source = server.serve(files, _layers(lambda ls: [descriptor(b"x", "../../evil.pkl"), *ls]))
    await reader(server).pull(Pull(files.digest, source), tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest/meta-data/",
        "https://169.254.169.254/latest/meta-data/",
        "https://127.0.0.1:{other}/secret",
        "http://127.0.0.1:{other}/secret",
        "http://localhost:{other}/secret",
        "http://[::1]:{other}/secret",
        "http://2130706433:{other}/secret",
        "file:///etc/passwd",
        "//127.0.0.1:{other}/secret",
        "http://[broken",
    ],
)
async def test_a_redirect_leads_to_listed_hosts_only(scripted: Start, tmp_path: Path, location: str) -> None:
    server, other, files = await scripted(), await scripted(), adapter()
    source = server.serve(files)
    server.routes[f"/v2/acme/tone/blobs/{sha256(files.config)}"] = Answer(
        307, {"location": location.format(other=other.port)}
    )
    error = await refused(reader(server), source, files.digest, tmp_path / "b")
    unreadable = "broken" in location
    assert error.reason == ("SourceUnavailable" if unreadable else "SourceNotAllowed")
    assert not other.asked


async def test_a_redirect_to_a_listed_host_carries_no_token(scripted: Start, tmp_path: Path) -> None:
    server, storage, files = await scripted(), await scripted(), adapter()
    source = server.serve(files)
    storage.routes["/bytes"] = Answer(body=files.weights)
    server.routes[f"/v2/acme/tone/blobs/{sha256(files.weights)}"] = Answer(
        307, {"location": f"http://{storage.origin}/bytes"}
    )
    guard(server, storage)
    await reader(server, storage).pull(Pull(files.digest, source), tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == files.blob
    bytes_asked = [headers for path, headers in storage.asked if path == "/bytes"]
    assert [("authorization" in headers) for headers in bytes_asked] == [False]


async def test_an_endless_redirect(scripted: Start, tmp_path: Path) -> None:
    server = await scripted()
    server.routes["/v2/acme/tone/manifests/1"] = Answer(302, {"location": "1"})
    error = await refused(
        reader(server), f"oci://{server.origin}/acme/tone:1", "sha256:" + "0" * 64, tmp_path / "b"
    )
    assert "redirects more than" in error.message
    assert len(server.asked) == 4


def guard(server: Scripted, tokens: Scripted) -> None:
    """Let every route of the registry want an anonymous token of another server."""
    challenge = f'Bearer realm="http://{tokens.origin}/token",service="reg",scope="repository:acme/tone:pull"'
    tokens.routes["/token"] = Answer(body=b'{"token": "t0k"}')

    def behind(answer: Answer) -> Callable[[dict[str, str]], Answer]:
        denied = Answer(401, {"www-authenticate": challenge})
        return lambda headers: answer if headers.get("authorization") == "Bearer t0k" else denied

    for path, answer in list(server.routes.items()):
        assert isinstance(answer, Answer)
        server.routes[path] = behind(answer)


async def test_anonymous_tokens(scripted: Start, tmp_path: Path) -> None:
    server, tokens, files = await scripted(), await scripted(), adapter()
    source = server.serve(files)
    guard(server, tokens)
    await reader(server, tokens).pull(Pull(files.digest, source), tmp_path / "b")
    assert [path for path, _ in tokens.asked] == ["/token?service=reg&scope=repository%3Aacme%2Ftone%3Apull"]

    error = await refused(reader(server), source, files.digest, tmp_path / "c")
    assert error.reason == "SourceNotAllowed"
    assert len(tokens.asked) == 1


async def test_a_private_address_behind_a_listed_name(scripted: Start, tmp_path: Path) -> None:
    server, files = await scripted(), adapter()
    server.serve(files)
    source = f"oci://localhost:{server.port}/acme/tone:1.0.0"
    registry = reader(f"localhost:{server.port}", private=False)
    error = await refused(registry, source, files.digest, tmp_path / "b")
    assert (error.reason, "loopback" in error.message) == ("SourceNotAllowed", True)
    assert not server.asked


@pytest.mark.parametrize(
    "addresses", [["169.254.169.254"], ["127.0.0.1", "169.254.169.254"], ["fd00:ec2::254"]]
)
async def test_metadata_addresses_stay_forbidden(
    scripted: Start, tmp_path: Path, addresses: list[str]
) -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return addresses

    server = await scripted()
    registry = reader(f"registry.example:{server.port}", resolver=resolver)
    source = f"oci://registry.example:{server.port}/acme/tone:1.0.0"
    error = await refused(registry, source, "sha256:" + "0" * 64, tmp_path / "b")
    assert (error.reason, "metadata" in error.message) == ("SourceNotAllowed", True)
    assert not server.asked


async def test_a_name_is_resolved_once_and_that_address_is_used(scripted: Start, tmp_path: Path) -> None:
    answers = [["127.0.0.1"], ["169.254.169.254"]]
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers[min(len(asked) - 1, 1)]

    server, files = await scripted(), adapter()
    server.serve(files)
    origin = f"registry.example:{server.port}"
    await reader(origin, resolver=rebinding).pull(
        Pull(files.digest, f"oci://{origin}/acme/tone:1.0.0"), tmp_path / "b"
    )
    assert asked == ["registry.example"]
    assert {headers["host"] for _, headers in server.asked} == {origin}


async def test_an_address_that_leads_nowhere_is_passed_over(scripted: Start, tmp_path: Path) -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.2", "127.0.0.1"]

    server, files = await scripted(), adapter()
    server.serve(files)
    origin = f"registry.example:{server.port}"
    source = f"oci://{origin}/acme/tone:1.0.0"
    await reader(origin, resolver=resolver).pull(Pull(files.digest, source), tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == files.blob


async def test_https_is_the_rule(scripted: Start, tmp_path: Path) -> None:
    server = await scripted()
    source = server.serve(adapter())
    registry = Sources(OriginPolicy.build([server.origin], [], True), 1 << 20, 1)
    assert (await refused(registry, source, adapter().digest, tmp_path / "b")).reason == "SourceUnavailable"
    assert not any(path.startswith("/v2") for path, _ in server.asked)


@pytest.mark.parametrize(
    ("address", "private", "allowed"),
    [
        ("8.8.8.8", False, True),
        ("2606:4700::1111", False, True),
        ("10.1.2.3", False, False),
        ("10.1.2.3", True, True),
        ("127.0.0.1", False, False),
        ("127.0.0.1", True, True),
        ("100.64.0.1", False, False),
        ("::1", False, False),
        ("fd12::1", False, False),
        ("fd12::1", True, True),
        ("::ffff:10.1.2.3", False, False),
        ("::ffff:169.254.169.254", True, False),
        ("64:ff9b::a9fe:a9fe", True, False),
        ("2002:a9fe:a9fe::1", True, False),
        ("169.254.169.254", True, False),
        ("fe80::1", True, False),
        ("0.0.0.0", True, False),
        ("::", True, False),
        ("224.0.0.1", True, False),
        ("100.100.100.200", True, False),
        ("168.63.129.16", False, False),
    ],
)
def test_addresses(address: str, private: bool, allowed: bool) -> None:
    assert (forbidden(ipaddress.ip_address(address), allow_private=private) is None) is allowed


@pytest.mark.parametrize(
    "source",
    [
        "https://host/a:1", "oci://host", "oci://host/", "oci://user@host/a:1", "oci://HOST/a:1", "oci://host:0/a",
        "oci://host:99999/a", "oci://host/../a", "oci://host/a//b", "oci://host/a:1@sha256:00", "oci://host/a?x=1",
        "oci://-host/a:1", "oci://host/a:1\n", "oci://" + "h" * 600 + "/a", "oci://host/a%2e%2e/b:1",
        "s3://host", "s3://host/", "s3://host/a", "s3://host/UPPER/x", "s3://host/bucket/../other", "s3://host/bucket/.x",
        "s3://host/bucket//x", "s3://host/bucket/a?x=1", "s3://host/bucket/a%2f", "s3://k:s@host/bucket/a",
        "hf://host/owner/name", "hf://host/owner/name@main", "hf://host/name@" + "0" * 40,
        "hf://host/owner/name@" + "0" * 39, "hf://host/owner/name@" + "A" * 40, "hf://host/../name@" + "0" * 40,
        "hf://host/owner/name/..@" + "0" * 40, "file:///etc/passwd", "", "gs://host/bucket/a",
    ],
)  # fmt: skip
def test_sources_that_are_none(source: str) -> None:
    with pytest.raises(ValueError, match="`source`"):
        parse_source(source)


def weights(header: Any, size: int = 128) -> bytes:
    return safetensors(header, b"\0" * size)


A = "m.lora_A.weight"
OK = {A: {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "safetensors"),
        (b"PK\x03\x04" + b"\0" * 200, "safetensors"),
        (b"\x80\x04\x95" + b"\0" * 200, "safetensors"),
        (struct.pack("<Q", 1 << 62) + b"{}", "safetensors"),
        (weights(b"not json"), "JSON"),
        (weights(b"[]"), "object"),
        (weights(b'{"a": 1, "a": 2}'), "twice"),
        (weights(b"{" * 5000), "JSON"),
        (weights({}, 0), "LoRA"),
        (weights({A: OK[A] | {"data_offsets": [0, 64]}}), "as many bytes"),
        (weights({A: OK[A] | {"data_offsets": [128, 0]}}), "as many bytes"),
        (weights({A: OK[A] | {"dtype": "OBJ"}}), "dtype"),
        (weights({A: OK[A] | {"shape": [4, -8]}}), "shape"),
        (weights({A: OK[A] | {"shape": [4, 8.0]}}), "shape"),
        (weights({A: OK[A] | {"shape": [True, 32]}}), "shape"),
        (weights({A: []}), "dtype, shape"),
        (weights(OK, 129), "end where"),
        (weights(OK | {"b": OK[A]}), "overlap"),
        (weights({A: OK[A] | {"data_offsets": [4, 132]}}, 132), "gap"),
        (weights({"m.other": OK[A]}), "LoRA"),
        (weights({A: OK[A] | {"shape": [8, 4]}}), "rank 8"),
    ],
)
def test_weights_that_are_none(tmp_path: Path, raw: bytes, text: str) -> None:
    (tmp_path / "b").write_bytes(Files(adapter(rank=4).config, raw).blob)
    with pytest.raises(FetchError) as caught:
        read_facts(tmp_path / "b")
    assert caught.value.reason == "InvalidArtifact"
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 0}, "`r`"),
        ({"r": True}, "`r`"),
        ({"r": 10**9}, "`r`"),
        ({"r": 2}, "rank 4"),
        ({"rank_pattern": {"q_proj": "9"}}, "`rank_pattern`"),
        ({"rank_pattern": [1]}, "`rank_pattern`"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path"),
        ({"base_model_name_or_path": "a\nb"}, "base_model_name_or_path"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["x" * 200]}, "target_modules"),
    ],
)
def test_configurations_that_are_none(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    files = adapter(rank=4)
    config = json.dumps(json.loads(files.config) | changes).encode()
    (tmp_path / "b").write_bytes(Files(config, files.weights).blob)
    with pytest.raises(FetchError) as caught:
        read_facts(tmp_path / "b")
    assert text in caught.value.message


@pytest.mark.parametrize(
    "raw", [b'{"r": 4, "r": 8}', b'{"r": NaN}', b"null", b"\xff", b'{"a": {"b": 1, "b": 2}}']
)
def test_json_with_two_meanings(raw: bytes) -> None:
    with pytest.raises(FetchError) as caught:
        facts(raw, OK)
    assert caught.value.reason == "InvalidArtifact"


def test_ranks_by_pattern(tmp_path: Path) -> None:
    files = adapter(rank=8)
    config = json.dumps(json.loads(files.config) | {"r": 4, "rank_pattern": {"q_proj": 8}}).encode()
    (tmp_path / "b").write_bytes(Files(config, files.weights).blob)
    assert read_facts(tmp_path / "b").rank == 8


def test_the_digest_is_the_one_of_the_api(tmp_path: Path) -> None:
    from tenantry.api.digest import adapter_digest

    files = adapter()
    assert adapter_digest(files.write(tmp_path)) == f"sha256:{hashlib.sha256(files.blob).hexdigest()}"
