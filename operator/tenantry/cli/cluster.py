"""The cluster that KUBECONFIG points to, read only: our kinds, pods, and what a pod answers on a port."""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from tenantry.api.common import GROUP, VERSION

from .errors import CliError

Obj = dict[str, Any]

PAGE = 500
ANSWER_SECONDS = 5.0
MAX_ANSWER_BYTES = 16 << 20


class Missing(CliError):
    """There is no such object."""


class Cluster:
    """Raises CliError where there is no cluster, or where it refuses."""

    def __init__(self) -> None:
        from kubernetes import client, config

        load: Any = config.load_config
        try:
            with contextlib.redirect_stdout(
                io.StringIO()
            ):  # it tells where it looked, where our own output belongs
                load()
        except (config.ConfigException, OSError, TypeError) as error:
            raise CliError("no cluster: `KUBECONFIG` must name a kubeconfig file that can be read") from error
        self._custom = client.CustomObjectsApi()
        self._core = client.CoreV1Api()
        self._refusal: type[Exception] = client.ApiException

    def tenant(self, name: str) -> Obj:
        """Raises CliError."""
        found: Obj = self._call(
            f"Tenant `{name}`",
            lambda: self._custom.get_cluster_custom_object(GROUP, VERSION, "tenants", name),
        )
        return found

    def tenants(self) -> list[Obj]:
        """All of them, by name. Raises CliError."""
        return sorted(self.all("tenants"), key=lambda item: str(item["metadata"]["name"]))

    def pool(self, name: str) -> Obj | None:
        """None when there is no such pool. Raises CliError."""
        return self._maybe(
            lambda: self._custom.get_cluster_custom_object(GROUP, VERSION, "adapterpools", name)
        )

    def adapter(self, namespace: str, name: str) -> Obj | None:
        """None when there is no such adapter. Raises CliError."""
        return self._maybe(
            lambda: self._custom.get_namespaced_custom_object(GROUP, VERSION, namespace, "adapters", name)
        )

    def config_map(self, namespace: str, name: str) -> Obj | None:
        """None when there is no such ConfigMap. Raises CliError."""

        def get() -> Obj:
            found: Obj = self._core.read_namespaced_config_map(name, namespace).to_dict()
            return found

        return self._maybe(get)

    def all(self, plural: str) -> list[Obj]:
        """Every object of a kind of ours, over all namespaces. Raises CliError."""
        found: list[Obj] = []
        more: str | None = None
        while more is None or more:
            page: dict[str, Any] = {"limit": PAGE, **({"_continue": more} if more else {})}
            get = partial(self._custom.list_cluster_custom_object, GROUP, VERSION, plural, **page)
            answer = self._call(f"`{plural}.{GROUP}`", get)
            found += answer["items"]
            more = str(answer["metadata"].get("continue") or "")
        return found

    def pods(self, selector: str) -> list[Obj]:
        """Running pods with the labels, in all namespaces: name, namespace and labels. Raises CliError."""
        found = self._call("", lambda: self._core.list_pod_for_all_namespaces(label_selector=selector))
        return [
            {
                "name": pod.metadata.name,
                "namespace": pod.metadata.namespace,
                "labels": dict(pod.metadata.labels or {}),
            }
            for pod in found.items
            if pod.status.phase == "Running"
        ]

    def ask(self, namespace: str, pod: str, port: int, path: str) -> str:
        """What a pod answers to GET, by a forwarded port: network policies keep everybody else away from it.

        Raises CliError.
        """
        from kubernetes.stream import portforward

        def get() -> Any:
            forward: Any = portforward(
                self._core.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(port)
            )
            try:
                return _get(forward.socket(port), path)
            finally:
                forward.close()

        raw: bytes = self._call(f"pod `{namespace}/{pod}`", get)
        head, _, body = raw.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise CliError(f"pod `{namespace}/{pod}` did not answer {path} on port {port}")
        return body.decode(errors="replace")

    def _maybe(self, get: Callable[[], Any]) -> Obj | None:
        try:
            found: Obj = self._call("", get)
        except Missing:
            return None
        return found

    def _call(self, what: str, get: Callable[[], Any]) -> Any:
        from urllib3.exceptions import HTTPError

        try:
            return get()
        except self._refusal as error:
            status = getattr(error, "status", None)
            if status == 404:
                raise Missing(f"{what} must exist: there is none of that name in this cluster") from error
            hint = ": ask for a role that may read it" if status == 403 else ""
            raise CliError(
                f"the API server answered {status} {getattr(error, 'reason', '')}".rstrip() + hint
            ) from error
        except (HTTPError, OSError) as error:
            raise CliError("the API server cannot be reached: check `KUBECONFIG`") from error


def _get(connection: socket.socket, path: str) -> bytes:
    """One HTTP/1.0 request, so that the end of the answer is the end of the connection."""
    connection.settimeout(ANSWER_SECONDS)
    connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
    raw = bytearray()
    while len(raw) < MAX_ANSWER_BYTES and (data := connection.recv(65536)):
        raw += data
    return bytes(raw)
