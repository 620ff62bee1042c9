"""The whole way over true processes: CLI, registry, fetcher, replica; and the door of the fetcher."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cluster.process import free_port
from tenantry.api import names
from tenantry.api.identity import Signer
from tenantry.cli.adapters import parse_target
from tenantry.cli.errors import CliError
from tenantry.cli.registry import push_adapter
from tenantry.engines import (
    ArtifactState,
    EngineError,
    FetcherClient,
    Pull,
    PushState,
    Replica,
    SignaturePolicy,
    SignatureReport,
    Transfer,
    Verification,
)
from tenantry.engines.http import new_client
from tenantry.fetcher.main import build, main, parser

from .conftest import MANIFEST, Answer, adapter, sha256, wait_for
from .signing import SHA256, Encoding, b64, new_key, simple_payload, spki


def arguments(identities: Any, tmp_path: Path) -> list[str]:
    return [
        "--identity-key", str(identities.fetcher_key), "--identity-dir", str(identities.folder),
        "--cache-dir", str(tmp_path / "cache"),
    ]  # fmt: skip


@pytest.fixture
def door(identities: Any, tmp_path: Path) -> Callable[..., httpx.AsyncClient]:
    """The application of the given flags, without a process of its own."""

    def make(*flags: str) -> httpx.AsyncClient:
        app = build(parser().parse_args([*arguments(identities, tmp_path), *flags]))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app))

    return make


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


@pytest.fixture
def start(identities: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Starts a fetcher process with the given flags; its URL."""

    def run(*flags: str) -> str:
        port = free_port()
        command = [sys.executable, "-m", "tenantry.fetcher", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen([*command, *arguments(identities, tmp_path), *flags])

        def stop() -> None:
            process.terminate()
            assert process.wait(20) in (0, -15)

        request.addfinalizer(stop)
        wait_for(f"http://127.0.0.1:{port}/readyz", process)
        return f"http://127.0.0.1:{port}"

    return run


async def until_final(client: FetcherClient, *arguments: Any) -> Transfer:
    async with asyncio.timeout(30):
        transfer = await client.transfer(*arguments)
        while not transfer.final:
            await asyncio.sleep(0.02)
            transfer = await client.transfer(*arguments)
        return transfer


def push(folder: Path, target: str) -> dict[str, Any]:
    """`tenantry adapters push`, and the entry it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tenantry.cli", "adapters", "push", folder, target, "--plain-http"],
        check=True,
        capture_output=True,
        text=True,
    )
    [entry] = yaml.safe_load(done.stdout)
    return dict(entry)


async def test_from_folder_to_replica(
    start: Any, registry: str, engine: Any, identities: Any, tmp_path: Path, client: Any
) -> None:
    files = adapter(rank=8)
    entry = push(files.write(tmp_path / "tone"), f"oci://{registry}/acme/tone:1.0.0")
    assert entry["digest"] == files.digest
    assert (entry["version"], entry["rank"]) == ("1.0.0", 8)

    url = start("--allow-origin", registry, "--plain-http", registry, "--allow-private")
    fetcher = FetcherClient(identities.operator, url, client)
    replicas = [Replica(f"ns/pool-fast-{i}", engine.url, "pool-uid") for i in range(2)]
    first = await fetcher.transfer(Pull(entry["digest"], entry["source"]), replicas)
    assert first.artifact.state is ArtifactState.PULLING
    assert [r.state for r in first.replicas] == [PushState.WAITING] * 2
    done = await until_final(fetcher, Pull(entry["digest"], entry["source"]), replicas)
    assert done.artifact.state is ArtifactState.VERIFIED
    assert done.artifact.bytes == len(files.blob)
    assert done.adapter is not None
    assert (done.adapter.rank, done.adapter.base_model, done.adapter.target_modules) == (
        8, "smollm2-135m", ("q_proj",),
    )  # fmt: skip
    assert [r.state for r in done.replicas] == [PushState.PUSHED] * 2
    assert engine.blobs == {files.digest: files.blob}
    assert engine.puts == 2
    metrics = (await client.get(f"{url}/metrics")).text
    assert 'tenantry_fetcher_pulls_total{result="ok"} 1.0' in metrics
    assert 'tenantry_fetcher_pushes_total{result="ok"} 2.0' in metrics

    # A tag works as well, and a source that nobody has seen deliver the bytes is pulled for itself.
    tag = f"oci://{registry}/acme/tone:1.0.0"
    assert (await until_final(fetcher, Pull(entry["digest"], tag))).artifact.state is ArtifactState.VERIFIED
    nowhere = f"oci://{registry}/other/tone:1.0.0"
    stranger = await until_final(fetcher, Pull(entry["digest"], nowhere))
    assert (stranger.artifact.reason, stranger.adapter) == ("NotFound", None)


def put_signature(registry: str, repository: str, digest: str, signature: bytes) -> None:
    """What `cosign sign` leaves in a registry: a payload and a manifest under a tag made of the digest."""
    payload = simple_payload(digest)
    base = f"http://{registry}/v2/{repository}"
    begun = httpx.post(f"{base}/blobs/uploads/", trust_env=False)
    location = str(begun.url.join(begun.headers["location"]))
    httpx.put(
        location, params={"digest": sha256(payload)}, content=payload, trust_env=False
    ).raise_for_status()
    layer = {
        "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
        "digest": sha256(payload),
        "size": len(payload),
        "annotations": {"dev.cosignproject.cosign/signature": b64(signature)},
    }
    body = {"schemaVersion": 2, "mediaType": MANIFEST, "config": layer, "layers": [layer]}
    tag = digest.replace(":", "-") + ".sig"
    httpx.put(
        f"{base}/manifests/{tag}", json=body, headers={"content-type": MANIFEST}, trust_env=False
    ).raise_for_status()


async def test_nothing_unsigned_reaches_a_replica(
    start: Any, registry: str, engine: Any, identities: Any, tmp_path: Path, client: Any
) -> None:
    files, key, trust = adapter(fill=3), new_key(), tmp_path / "trust"
    entry = push(files.write(tmp_path / "tone"), f"oci://{registry}/acme/signed:1.0.0")
    trust.mkdir()
    (trust / "release.pub").write_bytes(spki(key, Encoding.PEM))
    flags = ("--allow-origin", registry, "--plain-http", registry, "--allow-private")
    fetcher = FetcherClient(identities.operator, start(*flags, "--trust-dir", str(trust)), client)
    replica = Replica("ns/pool-fast-0", engine.url, "pool-uid")
    tag = f"oci://{registry}/acme/signed:1.0.0"

    def signed(policy: SignaturePolicy, source: str = entry["source"], key_ref: str = "release") -> Pull:
        return Pull(files.digest, source, verification=Verification(policy, key_ref))

    unsigned = await until_final(fetcher, signed(SignaturePolicy.REQUIRED), [replica])
    assert (unsigned.artifact.state, unsigned.artifact.reason) == (ArtifactState.FAILED, "SignatureMissing")
    assert engine.blobs == {}
    manifest = entry["source"].partition("@")[2]
    put_signature(registry, "acme/signed", manifest, key.sign(simple_payload(manifest), SHA256))
    # By a tag as well: what counts is the manifest that the tag delivered the bytes by.
    done = await until_final(fetcher, signed(SignaturePolicy.REQUIRED, tag), [replica])
    assert done.artifact.state is ArtifactState.VERIFIED
    assert done.artifact.signature == SignatureReport(True, "", "key `release`")
    assert engine.blobs == {files.digest: files.blob}
    other = await until_final(fetcher, signed(SignaturePolicy.WARN, tag, "other"))
    assert other.artifact.state is ArtifactState.VERIFIED
    assert other.artifact.signature is not None
    assert (other.artifact.signature.verified, other.artifact.signature.reason) == (False, "KeyNotFound")
    plain = await until_final(fetcher, Pull(files.digest, tag))
    assert plain.artifact.signature is None


async def test_only_the_operator_may_ask_and_only_once(
    identities: Any, tmp_path: Path, door: Callable[..., httpx.AsyncClient]
) -> None:
    client, url = door(), "http://fetcher"
    body = b'{"digest": "sha256:' + b"0" * 64 + b'", "source": "oci://registry.example/a/b:1"}'

    async def post(token: str, sent: bytes = body, path: str = "/v1/transfers") -> tuple[int, str]:
        answer = await client.post(url + path, content=sent, headers={"authorization": f"Bearer {token}"})
        return answer.status_code, answer.json()["error"]["code"] if answer.status_code != 200 else ""

    sign = identities.operator.sign
    token = sign(names.FETCHER_AUDIENCE, "/v1/transfers", body)
    assert await post(token) == (200, "")
    assert await post(token) == (401, "unauthorized")
    assert await post(sign(names.FETCHER_AUDIENCE, "/v1/transfers", body), body + b" ") == (
        401,
        "unauthorized",
    )
    assert await post(sign("pool-uid", "/v1/transfers", body)) == (401, "unauthorized")
    fetcher = Signer.load(names.FETCHER_ISSUER, identities.fetcher_key)
    assert await post(fetcher.sign(names.FETCHER_AUDIENCE, "/v1/transfers", body)) == (401, "unauthorized")
    assert (await client.post(f"{url}/v1/transfers", content=body)).status_code == 401
    for bad, field in (
        (b"{}", "digest"),
        (body.replace(b'"}', b'", "surprise": 1}'), "surprise"),
        (
            body.replace(b'"}', b'", "replicas": [{"name": "a", "url": "http://h:1/x", "audience": "u"}]}'),
            "url",
        ),
    ):
        answer = await client.post(
            f"{url}/v1/transfers",
            content=bad,
            headers={"authorization": f"Bearer {sign(names.FETCHER_AUDIENCE, '/v1/transfers', bad)}"},
        )
        assert answer.status_code == 400
        assert field in answer.json()["error"]["param"]
    large = await client.post(f"{url}/v1/transfers", content=b" " * (2 << 20))
    assert large.status_code == 413
    assert (await client.get(f"{url}/nothing")).json()["error"]["code"] == "not_found"


async def test_an_unlisted_registry_is_not_asked(
    identities: Any, door: Callable[..., httpx.AsyncClient]
) -> None:
    fetcher = FetcherClient(identities.operator, "http://fetcher", door("--allow-origin", "registry.example"))
    transfer = await until_final(fetcher, Pull("sha256:" + "0" * 64, "oci://127.0.0.1:5000/acme/tone:1.0.0"))
    assert transfer.artifact.state is ArtifactState.FAILED
    assert transfer.artifact.reason == "SourceNotAllowed"
    assert "--allow-origin" in transfer.artifact.message


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--allow-origin", "https://x/"], "`--allow-origin` must be HOST[:PORT]"),
        (["--allow-origin", "x:70000"], "`--allow-origin` must have a port between 1 and 65535"),
        (["--plain-http", "x:5000"], "`--plain-http` x:5000 must be listed by `--allow-origin` too"),
        (["--identity-dir", "/nowhere"], "`/nowhere` must hold at least one Ed25519 certificate"),
        (["--identity-key", "/nowhere"], "No such file"),
    ],
)
def test_bad_flags_end_with_one_line(
    flags: list[str],
    text: str,
    identities: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments(identities, tmp_path), *flags])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


async def test_an_unreachable_fetcher_is_told_so(identities: Any, client: httpx.AsyncClient) -> None:
    with pytest.raises(EngineError) as caught:
        await FetcherClient(identities.operator, "http://127.0.0.1:1", client).transfer(
            Pull("sha256:" + "0" * 64, "x")
        )
    assert caught.value.code == "unreachable"


def test_a_tag_does_not_move_unasked(registry: str, tmp_path: Path) -> None:
    target = parse_target(f"oci://{registry}/acme/fixed:1.0.0")
    one, two = adapter(fill=1).write(tmp_path / "one"), adapter(fill=2).write(tmp_path / "two")
    first = push_adapter(one, target, plain_http=True, force=False)
    assert push_adapter(one, target, plain_http=True, force=False) == first
    with pytest.raises(CliError, match="another artifact already"):
        push_adapter(two, target, plain_http=True, force=False)
    assert push_adapter(two, target, plain_http=True, force=True) != first


async def test_pushing_with_docker_credentials(
    scripted: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token server gets the credentials; the registry gets the token; a storage host gets neither."""
    server, storage = await scripted(), await scripted()
    (tmp_path / "docker").mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("NO_PROXY", "*")
    (tmp_path / "docker" / "config.json").write_text(
        json.dumps({"auths": {server.origin: {"auth": "dXNlcjpwYXNz"}}})
    )
    challenge = f'Bearer realm="http://{server.origin}/token",service="reg"'
    server.routes["/token"] = lambda headers: (
        Answer(body=b'{"token": "t"}')
        if headers.get("authorization") == "Basic dXNlcjpwYXNz"
        else Answer(403)
    )

    def guarded(answer: Answer) -> Callable[[dict[str, str]], Answer]:
        denied = Answer(401, {"www-authenticate": challenge})
        return lambda headers: answer if headers.get("authorization") == "Bearer t" else denied

    files = adapter()
    storage.routes["/upload"] = Answer(201)
    server.routes["/v2/a/b/blobs/uploads/"] = guarded(
        Answer(202, {"location": f"http://{storage.origin}/upload"})
    )
    for raw in (files.config, files.weights, b"{}"):
        server.routes[f"/v2/a/b/blobs/{sha256(raw)}"] = guarded(Answer(404))
    server.routes["/v2/a/b/manifests/1.0.0"] = guarded(Answer(201))
    folder = files.write(tmp_path / "tone")
    target = parse_target(f"oci://{server.origin}/a/b:1.0.0")
    await asyncio.to_thread(push_adapter, folder, target, plain_http=True, force=False)
    assert [path.partition("?")[0] for path, _ in storage.asked] == ["/upload"] * 3
    assert not any("authorization" in headers for _, headers in storage.asked)
    tokens = [path for path, _ in server.asked if path.startswith("/token")]
    assert tokens == ["/token?scope=repository%3Aa%2Fb%3Apull%2Cpush&service=reg"]
