"""The whole way over true processes: pushed by the CLI into a real registry, pulled by a real fetcher, taken by a replica."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tenantry.api import names
from tenantry.engines import (
    ArtifactState,
    EngineError,
    FetcherClient,
    PushState,
    Replica,
    Transfer,
)
from tenantry.engines.http import new_client

Run = Callable[..., Iterator[Any]]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


@pytest.fixture
def start(identities: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Starts a fetcher process with the given flags; its URL."""
    import socket

    def run(*flags: str) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        process = subprocess.Popen(
            [
                sys.executable, "-m", "tenantry.fetcher", "--host", "127.0.0.1", "--port", str(port),
                "--identity-key", identities.fetcher_key, "--identity-dir", identities.folder,
                "--cache-dir", tmp_path / "cache", *flags,
            ]
        )  # fmt: skip

        def stop() -> None:
            process.terminate()
            assert process.wait(20) in (0, -15)

        request.addfinalizer(stop)
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                if httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200:
                    return f"http://127.0.0.1:{port}"
            except httpx.TransportError:
                time.sleep(0.05)

    return run


async def until_final(client: FetcherClient, *arguments: Any) -> Transfer:
    async with asyncio.timeout(30):
        while not (transfer := await client.transfer(*arguments)).final:
            await asyncio.sleep(0.02)
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
    start: Any, registry: str, engine: Any, identities: Any, make_adapter: Any, tmp_path: Path, client: Any
) -> None:
    files = make_adapter(rank=8)
    entry = push(files.write(tmp_path / "tone"), f"oci://{registry}/acme/tone:1.0.0")
    assert entry["digest"] == files.digest
    assert (entry["version"], entry["rank"]) == ("1.0.0", 8)

    url = start("--allow-origin", registry, "--plain-http", registry, "--allow-private")
    fetcher = FetcherClient(identities.operator, url, client)
    replicas = [Replica(f"ns/pool-fast-{i}", engine.url, "pool-uid") for i in range(2)]
    first = await fetcher.transfer(entry["digest"], entry["source"], replicas)
    assert first.artifact.state is ArtifactState.PULLING
    assert [r.state for r in first.replicas] == [PushState.WAITING] * 2
    done = await until_final(fetcher, entry["digest"], entry["source"], replicas)
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
    assert (await until_final(fetcher, entry["digest"], tag)).artifact.state is ArtifactState.VERIFIED
    nowhere = f"oci://{registry}/other/tone:1.0.0"
    stranger = await until_final(fetcher, entry["digest"], nowhere)
    assert (stranger.artifact.reason, stranger.adapter) == ("NotFound", None)


async def test_only_the_operator_may_ask_and_only_once(
    start: Any, identities: Any, client: httpx.AsyncClient
) -> None:
    url = start()
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
    from tenantry.api.identity import Signer

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
    start: Any, registry: str, identities: Any, client: httpx.AsyncClient
) -> None:
    fetcher = FetcherClient(identities.operator, start("--allow-origin", "registry.example"), client)
    transfer = await until_final(fetcher, "sha256:" + "0" * 64, f"oci://{registry}/acme/tone:1.0.0")
    assert transfer.artifact.state is ArtifactState.FAILED
    assert transfer.artifact.reason == "SourceNotAllowed"
    assert "--allow-origin" in transfer.artifact.message


def test_bad_flags_end_with_one_line(identities: Any, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "tenantry.fetcher", "--identity-key", identities.fetcher_key,
            "--identity-dir", identities.folder, "--cache-dir", tmp_path / "c", "--allow-origin", "https://x/",
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "`--allow-origin` must be HOST[:PORT]" in done.stderr


async def test_an_unreachable_fetcher_is_told_so(identities: Any, client: httpx.AsyncClient) -> None:
    with pytest.raises(EngineError) as caught:
        await FetcherClient(identities.operator, "http://127.0.0.1:1", client).transfer(
            "sha256:" + "0" * 64, "x"
        )
    assert caught.value.code == "unreachable"
