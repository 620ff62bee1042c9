"""One request to the API server: authentication and TLS by the official client, retries and counting by us.

Retried are answers that say "later" (429), that say nothing about the request (5xx), and lost connections. A lost
answer to a write leaves open whether it happened; all our writes bear that: a POST of an existing name is recognised
as ours by its owner, applies are idempotent, deletes carry preconditions.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import ApiClient, Configuration
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from prometheus_client import Counter, Histogram

from .errors import ApiError, Unavailable, api_error

REQUESTS = Counter(
    "rest_client_requests_total",
    "Requests to the API server, by answer.",
    ["code", "method", "host"],
)

REQUEST_SECONDS = Histogram(
    "rest_client_request_duration_seconds",
    "Seconds until the API server had answered, for each attempt.",
    ["verb", "host"],
    buckets=(0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0),
)

_tracer = trace.get_tracer("tenantry.operator")

JSON = "application/json"
APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

# Control characters that YAML does not take raw, and that JSON may leave as they are.
_RAW = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")

_RETRIED = frozenset({429, 500, 502, 503, 504})


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """From the kubeconfig file, else from the pod's service account.

    Raises kubernetes.aio.config.ConfigException when neither works.
    """
    configuration = Configuration()
    loader: Any = kubernetes_config
    if kubeconfig is None:
        loader.load_incluster_config(client_configuration=configuration)
    else:
        await loader.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    return configuration


class Transport:
    """Sends requests; safe for many tasks of one event loop."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        user_agent: str = "tenantry-operator",
        attempts: int = 5,
        timeout_seconds: float = 30.0,
        backoff_seconds: float = 0.2,
    ) -> None:
        configuration.retries = None
        self._api: Any = ApiClient(configuration)
        self._api.user_agent = user_agent
        self._attempts = attempts
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._backoff = backoff_seconds
        self._host = configuration.host.partition("://")[2]

    async def close(self) -> None:
        await self._api.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> Any:
        """The decoded JSON answer.

        Raises the ApiError of a refused request at once, Unavailable when all attempts failed.
        """
        failure: ApiError = Unavailable(0, "Unreachable", "no attempt was made")
        for attempt in range(self._attempts):
            retry_after = 0.0
            try:
                status, headers, text = await self._send(
                    method, path, query=query, body=body, content_type=content_type, accept=accept
                )
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                REQUESTS.labels("<error>", method, self._host).inc()
                failure = Unavailable(0, "Unreachable", f"{type(error).__name__}: {error}")
            else:
                REQUESTS.labels(str(status), method, self._host).inc()
                if status < 300:
                    return json.loads(text) if text else None
                failure = _refusal(status, text)
                if status not in _RETRIED:
                    raise failure
                retry_after = _seconds(headers.get("Retry-After", ""))
            if attempt + 1 < self._attempts:
                pause = self._backoff * 2**attempt * random.uniform(0.5, 1.5)  # noqa: S311
                await asyncio.sleep(max(pause, min(retry_after, 30.0)))
        raise failure

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None,
        body: Any,
        content_type: str,
        accept: str,
    ) -> tuple[int, Mapping[str, str], str]:
        headers = {"Accept": accept, "Content-Type": content_type, **self._api.default_headers}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        if content_type == APPLY_PATCH:
            # the client's own encoding is for JSON; with a parameter in the type it leaves the body alone
            headers["Content-Type"], body = f"{APPLY_PATCH}; charset=utf-8", as_yaml(body)
        url = self._api.configuration.host + path + ("?" + urlencode(query) if query else "")
        about = {"http.request.method": method, "url.path": path}
        with (
            REQUEST_SECONDS.labels(method, self._host).time(),
            _tracer.start_as_current_span(method, kind=SpanKind.CLIENT, attributes=about) as span,
        ):
            response = await self._api.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=self._timeout
            )
            text = (await response.read()).decode()
            span.set_attribute("http.response.status_code", response.status)
        return response.status, response.headers, text


def as_yaml(body: Any) -> bytes:
    """JSON that is YAML too: YAML has no surrogate pairs, so characters beyond U+FFFF must not be escaped."""
    text = json.dumps(body, ensure_ascii=False)
    return _RAW.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode("utf-8", "replace")


def _seconds(text: str) -> float:
    """The delay form of Retry-After; anything else counts as none."""
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _refusal(status: int, text: str) -> ApiError:
    """The error that a Status object describes; other bodies are not repeated, they may come from anywhere."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or answer.get("kind") != "Status":
        return api_error(status, "Unknown", "the answer is no Status object")
    reason = str(answer.get("reason", "") or "Unknown")
    causes = (answer.get("details") or {}).get("causes") or []
    if any(cause.get("field") == "metadata.uid" for cause in causes):
        # a patch with the uid of a former incarnation is called invalid, but it is a precondition that does not hold
        status, reason = 409, "Conflict"
    return api_error(status, reason, str(answer.get("message", "")))
