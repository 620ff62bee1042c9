"""Adapters as two files in a folder: at hubs, one of which Hugging Face's own client takes for one, and in general."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import huggingface_hub
import pytest
from tenantry.engines import Pull
from tenantry.fetcher.credentials import AccessKey
from tenantry.fetcher.net import OriginPolicy
from tenantry.fetcher.sigv4 import signed_headers
from tenantry.fetcher.sources import Receipt, Sources

from .conftest import Answer, Scripted, adapter, refused, sources
from .hub import COMMIT, Hub

FILES = adapter()


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    made = Hub(
        {
            "adapter_config.json": FILES.config,
            "adapter_model.safetensors": FILES.weights,
            "fr/adapter_config.json": FILES.config,
            "fr/adapter_model.safetensors": FILES.weights,
        }
    )
    runners = await made.start()
    yield made
    for runner in runners:
        await runner.cleanup()


def at(hub: Hub, folder: str = "", commit: str = COMMIT, secret: str = "") -> Pull:
    return Pull(FILES.digest, f"hf://{hub.origin}/acme/tone{folder}@{commit}", "acme-ml", secret)


async def test_the_hub_of_these_tests_is_one_to_the_hubs_own_client(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    for name, raw in (("adapter_config.json", FILES.config), ("adapter_model.safetensors", FILES.weights)):
        path = await asyncio.to_thread(
            huggingface_hub.hf_hub_download,
            "acme/tone", name, revision=COMMIT, endpoint=f"http://{hub.origin}", cache_dir=tmp_path, token=False,
        )  # fmt: skip
        assert Path(path).read_bytes() == raw


@pytest.mark.parametrize("folder", ["", "/fr"])
async def test_a_commit_of_a_hub(hub: Hub, tmp_path: Path, folder: str) -> None:
    reader = sources(hub.origin, hub.storage)
    assert await reader.pull(at(hub, folder), tmp_path / "b") == Receipt(len(FILES.blob), FILES.digest)
    assert (tmp_path / "b").read_bytes() == FILES.blob


async def test_a_hubs_token_stays_with_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_t0ps3cret"
    secret = {"host": hub.origin, "token": "hf_t0ps3cret"}
    reader = sources(hub.origin, hub.storage, hub=secret)
    await reader.pull(at(hub, secret="hub"), tmp_path / "b")
    assert {proof for _, proof in hub.asked} == {"Bearer hf_t0ps3cret"}
    assert [("authorization" in headers) for headers in hub.stored_asked] == [False]
    denied = await refused(sources(hub.origin, hub.storage), at(hub), tmp_path / "c")
    assert denied.reason == "AccessDenied"
    wrong = sources(hub.origin, hub=secret | {"token": "hf_wrong"})
    error = await refused(wrong, at(hub, secret="hub"), tmp_path / "d")
    assert (error.reason, "hf_" in str(error)) == ("AccessDenied", False)
    elsewhere = sources(hub.origin, hub=secret | {"host": "hub.example.com"})
    hub.asked.clear()
    assert (await refused(elsewhere, at(hub, secret="hub"), tmp_path / "e")).reason == "SecretInvalid"
    assert hub.asked == []


async def test_storage_that_nobody_listed_is_not_asked(hub: Hub, tmp_path: Path) -> None:
    error = await refused(sources(hub.origin), at(hub), tmp_path / "b")
    assert (error.reason, hub.storage in error.message) == ("SourceNotAllowed", True)
    assert hub.stored_asked == []


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"commit": "f" * 40}, "answers for another commit"),
        ({"etag": "0" * 64}, "the source itself promises"),
        ({"linked_size": 7}, "not as many bytes"),
        ({"stored": FILES.weights[:-1] + b"\x07"}, "the source itself promises"),
        ({"stored": FILES.weights[:-1]}, "not as many bytes"),
    ],
)
async def test_a_hub_that_lies(hub: Hub, tmp_path: Path, lie: dict[str, object], words: str) -> None:
    for name, value in lie.items():
        setattr(hub, name, value)
    error = await refused(sources(hub.origin, hub.storage), at(hub), tmp_path / "b")
    assert (error.reason, words in error.message) == ("DigestMismatch", True)


async def test_another_commit_is_another_thing(hub: Hub, tmp_path: Path) -> None:
    error = await refused(sources(hub.origin, hub.storage), at(hub, commit="1" * 40), tmp_path / "b")
    assert error.reason == "NotFound"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(body=FILES.config, headers={"content-encoding": "gzip"}), "InvalidArtifact"),
        (Answer(307, {"location": "http://169.254.169.254/latest/meta-data/"}), "SourceNotAllowed"),
        (Answer(429), "SourceUnavailable"),
        (Answer(body=b"x" * (2 << 20)), "TooLarge"),
        (Answer(body=b"{}", length=99), "SourceUnavailable"),
    ],
    ids=["encoded", "metadata", "429", "large", "cut"],
)
async def test_a_folder_that_is_not_served_as_it_should(
    scripted: object, tmp_path: Path, answer: Answer, reason: str
) -> None:
    server: Scripted = await scripted()  # type: ignore[operator]
    for scheme, path, pull in (
        ("s3", "/models/tone", f"s3://{server.origin}/models/tone"),
        ("hf", f"/acme/tone/resolve/{COMMIT}", f"hf://{server.origin}/acme/tone@{COMMIT}"),
    ):
        server.routes[f"{path}/adapter_config.json"] = answer
        error = await refused(sources(server.origin), Pull(FILES.digest, pull), tmp_path / scheme)
        assert error.reason == reason


@pytest.mark.parametrize("length", ["", "-1", "9" * 30, "1e3"])
async def test_a_file_must_say_how_long_it_is(scripted: object, tmp_path: Path, length: str) -> None:
    server: Scripted = await scripted()  # type: ignore[operator]
    server.routes["/models/adapter_config.json"] = Answer(body=FILES.config)
    server.routes["/models/adapter_model.safetensors"] = Answer(body=FILES.weights, length_text=length)
    error = await refused(
        sources(server.origin), Pull(FILES.digest, f"s3://{server.origin}/models"), tmp_path / "b"
    )
    assert error.reason in ("SourceUnavailable", "TooLarge")


async def test_a_drip_ends_at_the_time_limit(scripted: object, tmp_path: Path) -> None:
    """A body that always has one byte more holds a transfer no longer than any other."""
    server: Scripted = await scripted()  # type: ignore[operator]
    server.routes["/models/adapter_config.json"] = Answer(body=FILES.config)
    server.routes["/models/adapter_model.safetensors"] = Answer(body=FILES.weights, drip=True)
    reader = Sources(OriginPolicy.build([server.origin], [server.origin], True), 1 << 20, 0.5)
    error = await refused(reader, Pull(FILES.digest, f"s3://{server.origin}/models"), tmp_path / "b")
    assert (error.reason, "within 0.5 s" in error.message) == ("SourceUnavailable", True)


def test_a_known_signature() -> None:
    """Computed by hand from the algorithm's own description, step by step."""
    url = "http://s3.example:9000/models/tone/adapter_config.json"
    key = AccessKey("AK", "SK", "eu-1", "TOKEN")
    headers = signed_headers(url, key, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    request = (
        "GET\n/models/tone/adapter_config.json\n\n"
        f"host:s3.example:9000\nx-amz-content-sha256:{empty}\n"
        "x-amz-date:20260102T030405Z\nx-amz-security-token:TOKEN\n\n"
        f"host;x-amz-content-sha256;x-amz-date;x-amz-security-token\n{empty}"
    )
    text = (
        "AWS4-HMAC-SHA256\n20260102T030405Z\n20260102/eu-1/s3/aws4_request\n"
        + hashlib.sha256(request.encode()).hexdigest()
    )
    mac = b"AWS4SK"
    for part in ("20260102", "eu-1", "s3", "aws4_request", text):
        mac = hmac.digest(mac, part.encode(), "sha256")
    assert headers["authorization"].endswith(f"Signature={mac.hex()}")
    assert "SK" not in str(headers)
    assert "SK" not in repr(key)
