"""Adapters in buckets, read from a real S3 server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster.binaries import ensure
from cluster.process import free_port
from tenantry.engines import Pull, SignaturePolicy, Verification
from tenantry.fetcher.errors import FetchError
from tenantry.fetcher.sources import Receipt

from .conftest import adapter, refused, sources, wait_for_port
from .signing import Encoding, blob_signature, key_bundle, new_key, spki

FILES = adapter()
KEY, SECRET = "AKIDTEST", "s3cr3t/with+signs"


@dataclass(frozen=True)
class Store:
    """A real S3 server over a folder: its buckets are the folders in it."""

    origin: str
    folder: Path

    def put(self, path: str, name: str, raw: bytes) -> None:
        (self.folder / path).mkdir(parents=True, exist_ok=True)
        (self.folder / path / name).write_bytes(raw)

    def pull(self, path: str, secret: str = "key") -> Pull:
        return Pull(FILES.digest, f"s3://{self.origin}/{path}", "acme-ml", secret)

    def key(self, **changes: str) -> dict[str, str]:
        return {"host": self.origin, "accessKeyId": KEY, "secretAccessKey": SECRET, **changes}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """versitygw, an S3 gateway, over a folder."""
    folder, port = tmp_path_factory.mktemp("buckets"), free_port()
    program = ensure(["versitygw"])["versitygw"]
    process = subprocess.Popen(
        [
            program,
            "--access",
            KEY,
            "--secret",
            SECRET,
            "--port",
            f"127.0.0.1:{port}",
            "--quiet",
            "posix",
            folder,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port, process)
        made = Store(f"127.0.0.1:{port}", folder)
        made.put("models/tone/1.0.0", "adapter_config.json", FILES.config)
        made.put("models/tone/1.0.0", "adapter_model.safetensors", FILES.weights)
        yield made
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


async def test_a_folder_of_a_bucket(store: Store, tmp_path: Path) -> None:
    reader = sources(store.origin, key=store.key())
    receipt = await reader.pull(store.pull("models/tone/1.0.0"), tmp_path / "b")
    assert receipt == Receipt(len(FILES.blob), FILES.digest)
    assert (tmp_path / "b").read_bytes() == FILES.blob
    store.put("flat", "adapter_config.json", FILES.config)
    store.put("flat", "adapter_model.safetensors", FILES.weights)
    await reader.pull(store.pull("flat"), tmp_path / "c")


@pytest.mark.parametrize(
    ("path", "change", "reason", "words"),
    [
        ("models/tone/1.0.0", {"secretAccessKey": "wrong"}, "AccessDenied", "the credentials of `secretRef`"),
        ("models/tone/1.0.0", {"secretAccessKey": SECRET + "x"}, "AccessDenied", "HTTP 403"),
        ("models/tone/1.0.0", {"host": "s3.example.com"}, "SecretInvalid", "as its `host`"),
        ("models/tone/2.0.0", {}, "NotFound", "adapter_config.json"),
        ("nowhere/tone", {}, "NotFound", "adapter_config.json"),
    ],
)
async def test_a_bucket_that_stays_shut(
    store: Store, tmp_path: Path, path: str, change: dict[str, str], reason: str, words: str
) -> None:
    reader = sources(store.origin, key=store.key(**change))
    error = await refused(reader, store.pull(path), tmp_path / "b")
    assert (error.reason, words in error.message) == (reason, True)
    assert not any(value in str(error) for value in (SECRET, KEY, "wrong"))


async def test_a_bucket_without_credentials(store: Store, tmp_path: Path) -> None:
    error = await refused(sources(store.origin), store.pull("models/tone/1.0.0", ""), tmp_path / "b")
    assert (error.reason, "or `secretRef` must name credentials" in error.message) == ("AccessDenied", True)


async def test_a_bucket_of_other_or_too_many_bytes(store: Store, tmp_path: Path) -> None:
    other = adapter(fill=7)
    store.put("models/other", "adapter_config.json", other.config)
    store.put("models/other", "adapter_model.safetensors", other.weights)
    reader = sources(store.origin, key=store.key())
    assert (await refused(reader, store.pull("models/other"), tmp_path / "b")).reason == "DigestMismatch"
    small = sources(store.origin, key=store.key(), max_bytes=len(FILES.blob) - 1)
    assert (await refused(small, store.pull("models/tone/1.0.0"), tmp_path / "c")).reason == "TooLarge"
    store.put("models/large", "adapter_config.json", b" " * (2 << 20))
    assert (await refused(reader, store.pull("models/large"), tmp_path / "d")).reason == "TooLarge"


async def test_a_signed_folder(store: Store, tmp_path: Path) -> None:
    key, trust = new_key(), tmp_path / "trust"
    trust.mkdir()
    (trust / "release.pub").write_bytes(spki(key, Encoding.PEM))
    reader = sources(store.origin, trust=trust, key=store.key())
    asked = Verification(SignaturePolicy.REQUIRED, key_ref="release")
    pull = Pull(FILES.digest, f"s3://{store.origin}/models/tone/1.0.0", "acme-ml", "key", asked)
    with pytest.raises(FetchError, match=r"SignatureMissing.*adapter\.sigstore\.json"):
        await reader.signature(pull, FILES.digest)
    store.put("models/tone/1.0.0", "adapter.sigstore.json", key_bundle(blob_signature(FILES.blob, key)))
    report = await reader.signature(pull, FILES.digest)
    assert report is not None
    assert (report.verified, report.message) == (True, "key `release`")
