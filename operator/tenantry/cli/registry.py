"""A writing client of the OCI distribution protocol (v1.1): two layers, an empty config, one manifest.

Runs on a person's machine: credentials come from the folder that `docker login`, `oras login` and `crane auth login`
write to.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx

from tenantry.api.digest import CONFIG_FILE, WEIGHTS_FILE
from tenantry.fetcher.reference import ARTIFACT_TYPE, EMPTY_TYPE, LAYER_TYPE, MANIFEST_TYPE, TITLE, Reference

from .errors import CliError

_CHALLENGE = re.compile(r'(realm|service|scope)="([^"]*)"')
_EMPTY = b"{}"


def push_adapter(folder: Path, reference: Reference, *, plain_http: bool, force: bool) -> str:
    """Push the folder's two files under the reference's tag; the manifest's digest. Raises CliError."""
    host = reference.host if reference.port is None else f"{reference.host}:{reference.port}"
    base = f"{'http' if plain_http else 'https'}://{host}/v2/{reference.repository}"
    try:
        with httpx.Client(timeout=60.0) as client:
            return _Push(client, base, host).run(folder, str(reference.tag), force)
    except httpx.HTTPError as error:
        raise CliError(f"`{host}` cannot be reached: {error or type(error).__name__}") from error


class _Push:
    def __init__(self, client: httpx.Client, base: str, host: str) -> None:
        self._client = client
        self._base = base
        self._host = host
        self._authorization: str | None = None

    def run(self, folder: Path, tag: str, force: bool) -> str:
        layers = [self._file(folder / name, name) for name in (CONFIG_FILE, WEIGHTS_FILE)]
        empty = f"sha256:{hashlib.sha256(_EMPTY).hexdigest()}"
        self._upload(empty, len(_EMPTY), lambda: _EMPTY)
        # Nothing in it depends on time or machine: the same folder is the same manifest everywhere.
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": {"mediaType": EMPTY_TYPE, "digest": empty, "size": len(_EMPTY)},
            "layers": layers,
        }
        raw = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        url = f"{self._base}/manifests/{tag}"
        there = self._send("GET", url, headers={"accept": MANIFEST_TYPE})
        if there.status_code == 200 and there.content != raw and not force:
            raise CliError(
                f"tag `{tag}` names another artifact already; push a new tag, or say --force to let it move"
            )
        answer = self._send("PUT", url, content=raw, headers={"content-type": MANIFEST_TYPE})
        self._expect(answer, 201, "the manifest")
        return digest

    def _file(self, path: Path, title: str) -> dict[str, Any]:
        """Upload a file and return its descriptor."""
        with path.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        size = path.stat().st_size
        self._upload(digest, size, lambda: path.open("rb"))
        return {"mediaType": LAYER_TYPE, "digest": digest, "size": size, "annotations": {TITLE: title}}

    def _upload(self, digest: str, size: int, content: Any) -> None:
        if self._send("HEAD", f"{self._base}/blobs/{digest}").status_code == 200:
            return
        start = self._send("POST", f"{self._base}/blobs/uploads/")
        self._expect(start, 202, "an upload")
        location = urljoin(f"{self._base}/blobs/uploads/", start.headers.get("location", ""))
        url = f"{location}{'&' if urlsplit(location).query else '?'}digest={digest}"
        headers = {"content-type": LAYER_TYPE, "content-length": str(size)}
        self._expect(self._send("PUT", url, content=content(), headers=headers), 201, "a layer")

    def _send(
        self, method: str, url: str, *, content: Any = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """A request, once more after the registry said what it wants. The first one of a push carries no file."""
        response = self._once(method, url, content, headers)
        if response.status_code == 401 and self._authorization is None:
            self._authorization = self._authorize(response.headers.get("www-authenticate", ""))
            response = self._once(method, url, content, headers)
        return response

    def _once(self, method: str, url: str, content: Any, headers: dict[str, str] | None) -> httpx.Response:
        own = dict(headers or {})
        # Uploads may go to a storage host, which has no business with the registry's credentials.
        if self._authorization and urlsplit(url).netloc == urlsplit(self._base).netloc:
            own["authorization"] = self._authorization
        return self._client.request(method, url, content=content, headers=own)

    def _authorize(self, challenge: str) -> str:
        credentials = _credentials(self._host)
        if challenge.lower().startswith("basic") and credentials:
            return f"Basic {credentials}"
        fields = dict(_CHALLENGE.findall(challenge))
        if not challenge.lower().startswith("bearer ") or "realm" not in fields:
            raise CliError(f"`{self._host}` wants credentials: run `docker login {self._host}` first")
        repository = self._base.partition("/v2/")[2]
        query = {"scope": f"repository:{repository}:pull,push"}
        if "service" in fields:
            query["service"] = fields["service"]
        headers = {"authorization": f"Basic {credentials}"} if credentials else {}
        answer = self._client.get(fields["realm"], params=query, headers=headers)
        self._expect(answer, 200, "a token")
        token = answer.json().get("token") or answer.json().get("access_token")
        return f"Bearer {token}"

    def _expect(self, response: httpx.Response, status: int, what: str) -> None:
        if response.status_code == status:
            return
        hint = f"; run `docker login {self._host}`" if response.status_code in (401, 403) else ""
        raise CliError(f"`{self._host}` answered HTTP {response.status_code} for {what}{hint}")


def _credentials(host: str) -> str | None:
    """`user:password` in base64 of a host, from docker's configuration file."""
    folder = os.environ.get("DOCKER_CONFIG") or str(Path.home() / ".docker")
    try:
        entry = json.loads((Path(folder) / "config.json").read_text())["auths"][host]["auth"]
        base64.b64decode(entry, validate=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(entry)
