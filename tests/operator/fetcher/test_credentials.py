"""Credentials: from the Adapter's own namespace, by its own Role, for one host, and never in anything that is told."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tenantry.api import names
from tenantry.api.identity import Signer
from tenantry.cluster.transport import Transport, load_configuration
from tenantry.engines import ArtifactState, Pull
from tenantry.fetcher.cache import Cache
from tenantry.fetcher.credentials import access_key, hub_token, login
from tenantry.fetcher.errors import FetchError
from tenantry.fetcher.net import OriginPolicy
from tenantry.fetcher.push import Pusher
from tenantry.fetcher.reference import Origin
from tenantry.fetcher.secrets import Secrets
from tenantry.fetcher.sources import Sources
from tenantry.fetcher.transfers import Transfers

from .conftest import Answer, Identities, Scripted, adapter, settle

if TYPE_CHECKING:
    from tests.conftest import ApiServer

Start = Callable[[], Any]
HOST = Origin("registry.example", 443)
PASSWORD = "pa55-w0rd-of-the-test"
FILES = adapter()


def docker(**entries: Any) -> dict[str, bytes]:
    return {".dockerconfigjson": json.dumps({"auths": entries}).encode()}


def basic(user: str = "robot", password: str = PASSWORD) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


# What a Secret may hold


@pytest.mark.parametrize(
    "name",
    ["registry.example", "registry.example:443", "https://registry.example", "https://registry.example/v1/"],
)
def test_the_names_of_a_registry(name: str) -> None:
    for entry in ({"auth": basic()}, {"username": "robot", "password": PASSWORD}):
        assert (
            login(docker(**{"other.example": {"auth": "x"}, name: entry}), HOST).basic == f"Basic {basic()}"
        )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "kubernetes.io/dockerconfigjson"),
        ({"token": b"x"}, "kubernetes.io/dockerconfigjson"),
        ({".dockerconfigjson": b"{"}, "docker's configuration"),
        ({".dockerconfigjson": b"[]"}, "docker's configuration"),
        ({".dockerconfigjson": b"[" * 100_000}, "docker's configuration"),
        ({".dockerconfigjson": b'{"auths": []}'}, "docker's configuration"),
        (docker(), "an entry for `registry.example`"),
        (docker(**{"registry.example.evil": {"auth": basic()}}), "an entry for `registry.example`"),
        (docker(**{"registry.example:5000": {"auth": basic()}}), "an entry for `registry.example`"),
        (docker(**{"registry.example": "x"}), "an entry for `registry.example`"),
        (docker(**{"registry.example": {"auth": "no base64"}}), "`auth`, or `username` and `password`"),
        (docker(**{"registry.example": {}}), "`auth`, or `username` and `password`"),
        (docker(**{"registry.example": {"auth": basic(password="")}}), "a user and a password"),
    ],
)
def test_logins_that_are_none(data: dict[str, bytes], words: str) -> None:
    with pytest.raises(FetchError) as caught:
        login(data, HOST)
    assert (caught.value.reason, words in caught.value.message) == ("SecretInvalid", True)
    assert PASSWORD not in str(caught.value)
    assert basic() not in str(caught.value)


KEYS = {"host": b"registry.example", "accessKeyId": b"AK", "secretAccessKey": b"SK\n"}


def test_keys_and_tokens() -> None:
    key = access_key({**KEYS, "region": b"eu-1"}, HOST)
    assert (key.id, key.secret, key.region, key.session) == ("AK", "SK", "eu-1", "")
    assert hub_token({"host": b"registry.example:443", "token": b"hf_x"}, HOST) == "hf_x"
    assert access_key({**KEYS, "host": b"registry.example:9000"}, Origin("registry.example", 9000)).id == "AK"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host": None}, "the key `host`"),
        ({"host": b"other.example"}, "must name `registry.example` as its `host`"),
        ({"host": b"registry.example:9000"}, "must name `registry.example` as its `host`"),
        ({"host": b"https://registry.example"}, "must name `registry.example` as its `host`"),
        ({"secretAccessKey": None}, "the key `secretAccessKey`"),
        ({"accessKeyId": b"A\r\nx-evil: 1"}, "printable ASCII in the key `accessKeyId`"),
        ({"secretAccessKey": b"\xff"}, "printable ASCII in the key `secretAccessKey`"),
        ({"secretAccessKey": b""}, "printable ASCII in the key `secretAccessKey`"),
    ],
)
def test_keys_that_are_none(change: dict[str, bytes | None], words: str) -> None:
    data = {key: value for key, value in {**KEYS, **change}.items() if value is not None}
    with pytest.raises(FetchError) as caught:
        access_key(data, HOST)
    assert (caught.value.reason, words in caught.value.message) == ("SecretInvalid", True)


# What a registry is told


class Kept:
    """Secrets without a cluster: one for all names."""

    def __init__(self, data: dict[str, bytes]) -> None:
        self._data = data

    async def read(self, namespace: str, name: str) -> dict[str, bytes]:
        return self._data

    async def close(self) -> None:
        return None


def reader(*servers: Scripted, data: dict[str, bytes]) -> Sources:
    origins = [server.origin for server in servers]
    return Sources(OriginPolicy.build(origins, origins, True), 1 << 20, 10, secrets=Kept(data))  # type: ignore[arg-type]


def behind(server: Scripted, challenge: str, proof: str) -> None:
    """Let every route want a proof."""
    for path, answer in list(server.routes.items()):
        assert isinstance(answer, Answer)
        server.routes[path] = _guarded(answer, Answer(401, {"www-authenticate": challenge}), proof)


def _guarded(answer: Answer, denied: Answer, proof: str) -> Callable[[dict[str, str]], Answer]:
    return lambda headers: answer if headers.get("authorization") == proof else denied


def proofs(server: Scripted) -> set[str | None]:
    return {headers.get("authorization") for _, headers in server.asked}


async def test_basic(scripted: Start, tmp_path: Path) -> None:
    server, storage = await scripted(), await scripted()
    pull = Pull(FILES.digest, server.serve(FILES), "acme-ml", "login")
    path = next(path for path in server.routes if "blobs" in path)
    stored = server.routes[path]
    server.routes[path] = Answer(307, {"location": f"http://{storage.origin}/bytes"})
    storage.routes["/bytes"] = stored
    behind(server, 'Basic realm="all"', f"Basic {basic()}")
    data = docker(**{server.origin: {"auth": basic()}})
    await reader(server, storage, data=data).pull(pull, tmp_path / "b")
    assert proofs(server) == {None, f"Basic {basic()}"}, "nothing is proven before it is asked for"
    assert proofs(storage) == {None}
    wrong = docker(**{server.origin: {"auth": basic(password="wr0ng")}})
    with pytest.raises(FetchError, match=r"AccessDenied.*credentials of `secretRef`"):
        await reader(server, storage, data=wrong).pull(pull, tmp_path / "c")


async def test_a_token_for_a_login(scripted: Start, tmp_path: Path) -> None:
    server, tokens, files = await scripted(), await scripted(), FILES
    pull = Pull(files.digest, server.serve(files), "acme-ml", "login")
    realm = f"http://{tokens.origin}/token?account=x"
    behind(server, f'Bearer realm="{realm}",service="reg",scope="repository:acme/tone:pull"', "Bearer t0k")
    tokens.routes["/token"] = _guarded(
        Answer(body=b'{"access_token": "t0k"}'), Answer(401), f"Basic {basic()}"
    )
    data = docker(**{server.origin: {"auth": basic()}})
    await reader(server, tokens, data=data).pull(pull, tmp_path / "b")
    [(asked, _)] = tokens.asked
    assert asked == "/token?account=x&service=reg&scope=repository%3Aacme%2Ftone%3Apull"
    assert proofs(server) == {None, "Bearer t0k"}, "the password goes to the token server alone"
    wrong = docker(**{server.origin: {"auth": basic(password="wr0ng")}})
    with pytest.raises(FetchError, match=r"AccessDenied: the token server answered HTTP 401"):
        await reader(server, tokens, data=wrong).pull(pull, tmp_path / "c")


@pytest.mark.parametrize(
    "realm",
    [
        "http://{other}/token",
        "http://169.254.169.254/latest/api/token",
        "https://metadata.google.internal/token",
        "http://[::1]:{port}/token",
        "http://localhost:{port}/token",
        "file:///etc/passwd",
        "//{other}/token",
        "http://{listed}@{other}/token",
        "http://{listed}:80@{other}/token",
    ],
)
async def test_a_realm_leads_to_listed_hosts_only(scripted: Start, tmp_path: Path, realm: str) -> None:
    server, other = await scripted(), await scripted()
    pull = Pull(FILES.digest, server.serve(FILES), "acme-ml", "login")
    target = realm.format(other=other.origin, port=other.port, listed=server.origin)
    behind(server, f'Bearer realm="{target}",service="reg"', "Bearer t")
    data = docker(**{server.origin: {"auth": basic()}})
    with pytest.raises(FetchError) as caught:
        await reader(server, data=data).pull(pull, tmp_path / "b")
    assert caught.value.reason == "SourceNotAllowed"
    assert other.asked == []
    assert proofs(server) == {None}


async def test_a_token_server_does_not_pass_the_password_on(scripted: Start, tmp_path: Path) -> None:
    server, tokens, other = await scripted(), await scripted(), await scripted()
    pull = Pull(FILES.digest, server.serve(FILES), "acme-ml", "login")
    behind(server, f'Bearer realm="http://{tokens.origin}/token"', "Bearer t")
    tokens.routes["/token"] = Answer(307, {"location": f"http://{other.origin}/token"})
    data = docker(**{server.origin: {"auth": basic()}})
    with pytest.raises(FetchError, match="the token server answered HTTP 307"):
        await reader(server, tokens, other, data=data).pull(pull, tmp_path / "b")
    assert other.asked == []


@pytest.mark.parametrize("challenge", ["", "Negotiate", 'Digest realm="x"', "Bearer", 'Bearer service="x"'])
async def test_a_challenge_that_is_not_spoken(scripted: Start, tmp_path: Path, challenge: str) -> None:
    server = await scripted()
    pull = Pull(FILES.digest, server.serve(FILES), "acme-ml", "login")
    behind(server, challenge, "x")
    with pytest.raises(FetchError, match="AccessDenied"):
        await reader(server, data=docker(**{server.origin: {"auth": basic()}})).pull(pull, tmp_path / "b")
    assert proofs(server) == {None}


async def test_no_secret_is_read_for_a_host_that_nobody_listed(tmp_path: Path) -> None:
    class Never:
        async def read(self, namespace: str, name: str) -> dict[str, bytes]:
            raise AssertionError("a Secret was read")

    policy = OriginPolicy.build(["registry.example"], [], False)
    sources = Sources(policy, 1, 1, secrets=Never())  # type: ignore[arg-type]
    pull = Pull(FILES.digest, "oci://evil.example/acme/tone:1", "acme-ml", "login")
    with pytest.raises(FetchError, match="SourceNotAllowed"):
        await sources.pull(pull, tmp_path / "b")


async def test_a_release_that_reads_no_secrets_says_so(tmp_path: Path) -> None:
    sources = Sources(OriginPolicy.build(["registry.example"], [], False), 1, 1)
    pull = Pull(FILES.digest, "oci://registry.example/acme/tone:1", "acme-ml", "login")
    with pytest.raises(FetchError, match=r"SecretForbidden.*`fetcher.readSecrets`"):
        await sources.pull(pull, tmp_path / "b")


# The API server


ACCOUNT = "system:serviceaccount:tenantry-system:tenantry-fetcher"


@pytest.fixture
async def secrets(apiserver: ApiServer) -> AsyncIterator[Secrets]:
    """As the fetcher's service account, which has no right of its own."""
    kubeconfig = apiserver.client("fetcher", ACCOUNT, ("system:serviceaccounts", "system:authenticated"))

    async def connect() -> Transport:
        return Transport(await load_configuration(kubeconfig), attempts=2, backoff_seconds=0.01)

    made = Secrets(connect)
    yield made
    await made.close()


def allow(apiserver: ApiServer, namespace: str, *secrets: str) -> None:
    """The Role and the RoleBinding of the how-to guide."""
    name = "tenantry-fetcher"
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": name, "namespace": namespace},
        "rules": [
            {"apiGroups": [""], "resources": ["secrets"], "resourceNames": list(secrets), "verbs": ["get"]}
        ],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "tenantry-system"}],
    }
    apiserver.kubectl(
        "apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": [role, binding]})
    )


def put_secret(apiserver: ApiServer, namespace: str, name: str, **values: str) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "stringData": values,
    }
    apiserver.kubectl("apply", "-f", "-", text=json.dumps(secret))


@pytest.mark.apiserver
async def test_a_secret_is_read_where_its_namespace_allows_it(
    apiserver: ApiServer, namespace: str, secrets: Secrets
) -> None:
    put_secret(apiserver, namespace, "login", host="registry.example", token=PASSWORD)
    put_secret(apiserver, namespace, "other", token="x")
    with pytest.raises(FetchError) as caught:
        await secrets.read(namespace, "login")
    assert caught.value.reason == "SecretForbidden"
    assert "make a Role there with verb `get`" in caught.value.message

    allow(apiserver, namespace, "login", "gone")
    async with asyncio.timeout(20):
        while True:
            try:
                assert (await secrets.read(namespace, "login"))["token"] == PASSWORD.encode()
                break
            except FetchError:
                await asyncio.sleep(0.05)  # the authorizer has not seen the Role yet
    put_secret(apiserver, namespace, "login", host="registry.example", token="rotated")
    assert (await secrets.read(namespace, "login"))["token"] == b"rotated"
    with pytest.raises(FetchError, match="SecretNotFound"):
        await secrets.read(namespace, "gone")
    # Neither another Secret of the namespace nor the same name elsewhere.
    for where, name in ((namespace, "other"), ("default", "login"), ("kube-system", "login")):
        with pytest.raises(FetchError, match="SecretForbidden"):
            await secrets.read(where, name)


@pytest.mark.apiserver
async def test_an_empty_secret_and_an_absent_api_server(
    apiserver: ApiServer, namespace: str, secrets: Secrets
) -> None:
    apiserver.kubectl("create", "secret", "generic", "login", "-n", namespace)
    allow(apiserver, namespace, "login")
    async with asyncio.timeout(20):
        while True:
            with pytest.raises(FetchError) as caught:
                await secrets.read(namespace, "login")
            if caught.value.reason != "SecretForbidden":
                break
            await asyncio.sleep(0.05)
    assert caught.value.reason == "SecretInvalid"

    async def nowhere() -> Transport:
        configuration = await load_configuration(apiserver.kubeconfig)
        configuration.host = "https://127.0.0.1:1"
        return Transport(configuration, attempts=1)

    away = Secrets(nowhere)
    with pytest.raises(FetchError, match=r"SourceUnavailable.*does not answer"):
        await away.read(namespace, "login")
    await away.close()


# What is told


async def test_nothing_tells_a_credential(
    scripted: Start, identities: Identities, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a report, nor a log line at any level, nor the name of a file, whether the pull succeeds or fails."""
    caplog.set_level(logging.DEBUG)
    server = await scripted()
    pull = Pull(FILES.digest, server.serve(FILES), "acme-ml", "login")
    behind(server, 'Basic realm="all"', f"Basic {basic()}")
    signer = Signer.load(names.FETCHER_ISSUER, identities.fetcher_key)
    told: list[str] = []
    for number, password in enumerate((PASSWORD, "wr0ng-" + PASSWORD)):
        data = docker(**{server.origin: {"auth": basic(password=password)}})
        async with httpx.AsyncClient(trust_env=False) as client:
            cache = Cache(tmp_path / f"cache{number}", 1 << 20)
            transfers = Transfers(reader(server, data=data), Pusher(signer, client), cache)
            transfer = await settle(transfers, pull)
            await transfers.close()
        told += [repr(transfer), json.dumps(asdict(transfer), default=str)]
        told += [str(path) for path in (tmp_path / f"cache{number}").rglob("*")]
        assert transfer.artifact.state is (ArtifactState.VERIFIED, ArtifactState.FAILED)[number]
    text = caplog.text + "".join(told)
    for secret in (PASSWORD, basic(), basic(password="wr0ng-" + PASSWORD)):
        assert secret not in text


async def test_what_one_secret_opens_stays_shut_to_others(
    scripted: Start, identities: Identities, tmp_path: Path
) -> None:
    """The bytes are in the cache, and the digest is known: still each namespace needs a Secret that opens them."""
    server = await scripted()
    source = server.serve(FILES)
    behind(server, 'Basic realm="all"', f"Basic {basic()}")

    class ByNamespace:
        async def read(self, namespace: str, name: str) -> dict[str, bytes]:
            password = PASSWORD if namespace == "acme-ml" else "guessed"
            return docker(**{server.origin: {"auth": basic(password=password)}})

        async def close(self) -> None:
            return None

    policy = OriginPolicy.build([server.origin], [server.origin], True)
    sources = Sources(policy, 1 << 20, 10, secrets=ByNamespace())  # type: ignore[arg-type]
    signer = Signer.load(names.FETCHER_ISSUER, identities.fetcher_key)
    async with httpx.AsyncClient(trust_env=False) as client:
        transfers = Transfers(sources, Pusher(signer, client), Cache(tmp_path / "cache", 1 << 20))
        found: dict[tuple[str, str], ArtifactState] = {}
        for namespace, name in (("acme-ml", "login"), ("mallory", "login"), ("mallory", ""), ("acme-ml", "")):
            pull = Pull(FILES.digest, source, namespace, name)
            found[namespace, name] = (await settle(transfers, pull)).artifact.state
        await transfers.close()
    assert found.pop(("acme-ml", "login")) is ArtifactState.VERIFIED
    assert set(found.values()) == {ArtifactState.FAILED}


async def test_a_request_with_a_secret_names_its_namespace() -> None:
    from tenantry.fetcher.app import TransferRequest

    body = {"digest": FILES.digest, "source": "oci://registry.example/a/b:1", "secretRef": "login"}
    with pytest.raises(ValueError, match="`namespace` must be given with `secretRef`"):
        TransferRequest.model_validate(body)
    asked = TransferRequest.model_validate(body | {"namespace": "acme-ml"}).pull()
    assert (asked.namespace, asked.secret_ref) == ("acme-ml", "login")
    for wrong in ({"namespace": "../kube-system"}, {"namespace": "acme-ml", "secretRef": "a/b"}):
        with pytest.raises(ValueError, match="pattern"):
            TransferRequest.model_validate(body | wrong)
