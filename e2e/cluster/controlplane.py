"""etcd and the API server, with controllers and scheduler on demand: the part of a cluster that tests need most.

    with ControlPlane(folder) as plane:
        plane.kubectl("get", "namespaces")

Everything listens on loopback ports that were free, and ends with the process that started it.
"""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from . import binaries, process
from .errors import ClusterError
from .paths import KUBERNETES_SERVICE, POD_NETWORK, SERVICE_NETWORK
from .pki import Authority, Pair

STORE_CONTROLLERS = ("namespace-controller", "garbage-collector-controller", "serviceaccount-controller")
"""What makes deletion and new namespaces behave as in a cluster, without anything that acts on workloads."""


@dataclass
class ControlPlane:
    """A control plane whose state lies in `folder`, which must be empty or absent.

    controllers: names for kube-controller-manager; `("*",)` for all, empty for no controller manager.
    die_with_parent: the kernel ends every part when the starting process ends, however it ends.
    """

    folder: Path
    address: str = "127.0.0.1"
    port: int = 0
    controllers: Sequence[str] = ()
    scheduler: bool = False
    die_with_parent: bool = True
    extra_names: Sequence[str] = ()
    extra_flags: Sequence[str] = ()
    seconds: float = 90
    authority: Authority = field(init=False)
    _parts: dict[str, subprocess.Popen[bytes]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "admin.kubeconfig"

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.port}"

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Starts all parts and returns once the API server is ready. Raises ClusterError with its log otherwise."""
        self._binaries = binaries.ensure(binaries.CONTROL_PLANE)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or process.free_port()
        self._sign()
        try:
            self._start_store_and_server()
            self._wait_ready()
            # Before the server's own roles exist these two exit or stay blind, so they come after readiness.
            self._start_controllers()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends every part. Safe to call twice, and on what an ended run left behind."""
        process.end_all(self.folder)
        for part in self._parts.values():
            part.wait()
        self._parts.clear()

    def kubectl(
        self, *arguments: str, text: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl as administrator with `text` on its stdin; raises ClusterError with its stderr on failure."""
        return kubectl(self.kubeconfig, *arguments, text=text, check=check)

    def client(self, name: str, user: str, groups: Sequence[str] = ()) -> Path:
        """Writes a kubeconfig for another user, e.g. to test rights; returns its path."""
        return self.authority.kubeconfig(
            self.folder / f"{name}.kubeconfig", self.server, self.authority.issue(name, user, groups)
        )

    def _sign(self) -> None:
        authority = self.authority = Authority(self.folder / "pki")
        service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
        addresses = dict.fromkeys(("127.0.0.1", self.address, KUBERNETES_SERVICE))
        self._serving = authority.issue(
            "apiserver", "kube-apiserver", names=(*service, *self.extra_names), ips=tuple(addresses)
        )
        self._admin = authority.issue("admin", "tenantry-admin", ("system:masters",))
        self._kubelet_client = authority.issue(
            "kubelet-client", "apiserver-kubelet-client", ("system:masters",)
        )
        self._front = authority.issue("front-proxy", "front-proxy-client")
        self._tokens = authority.signing_key("service-accounts")
        authority.kubeconfig(self.kubeconfig, self.server, self._admin)

    def _start_store_and_server(self) -> None:
        client, peer = (f"http://127.0.0.1:{process.free_port()}" for _ in range(2))
        # Nothing here outlives a power cut, so etcd need not wait for the disk.
        self._spawn(
            "etcd",
            *(
                "--data-dir",
                str(self.folder / "etcd"),
                "--unsafe-no-fsync",
                "--quota-backend-bytes",
                str(4 << 30),
            ),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}", "--log-level", "warn"),
        )
        ca = str(self.authority.pair.certificate)
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={client}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            # A loopback address is refused as a Service's endpoint; without nodes nobody needs that Service.
            f"--endpoint-reconciler-type={'none' if self.address.startswith('127.') else 'lease'}",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder / 'pki'}",
            *_pair_flags("tls-cert-file", "tls-private-key-file", self._serving),
            f"--client-ca-file={ca}",
            f"--kubelet-certificate-authority={ca}",
            *_pair_flags("kubelet-client-certificate", "kubelet-client-key", self._kubelet_client),
            # Else exec and logs look nodes' names up in the machine's DNS.
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-key-file={self._tokens.certificate}",
            f"--service-account-signing-key-file={self._tokens.key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--allow-privileged=true",
            f"--requestheader-client-ca-file={ca}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            *_pair_flags("proxy-client-cert-file", "proxy-client-key-file", self._front),
            *self.extra_flags,
        )

    def _start_controllers(self) -> None:
        if self.controllers:
            config = str(self.client("controller-manager", "system:kube-controller-manager"))
            ca = self.authority.pair
            self._spawn(
                "kube-controller-manager",
                *(f"--{use}kubeconfig={config}" for use in ("", "authentication-", "authorization-")),
                f"--controllers={','.join(self.controllers)}",
                f"--service-account-private-key-file={self._tokens.key}",
                f"--root-ca-file={ca.certificate}",
                *_pair_flags("cluster-signing-cert-file", "cluster-signing-key-file", ca),
                "--use-service-account-credentials=true",
                "--leader-elect=false",
                "--secure-port=0",
                "--allocate-node-cidrs=false",
                f"--cluster-cidr={POD_NETWORK}",
                f"--flex-volume-plugin-dir={self.folder / 'volume-plugins'}",  # it makes the folder
            )
        if self.scheduler:
            config = str(self.client("scheduler", "system:kube-scheduler"))
            self._spawn("kube-scheduler", f"--kubeconfig={config}", "--leader-elect=false", "--secure-port=0")

    def _spawn(self, part: str, *flags: str) -> None:
        self._parts[part] = process.spawn(
            [str(self._binaries[part]), *flags],
            run=self.folder,
            part=part,
            log=self.folder / "log" / f"{part}.log",
            die_with_parent=self.die_with_parent,
        )

    def _wait_ready(self) -> None:
        context = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        context.load_cert_chain(self._admin.certificate, self._admin.key)
        deadline = time.monotonic() + self.seconds
        while True:
            for part, running in self._parts.items():
                if running.poll() is not None:
                    log = process.tail(self.folder / "log" / f"{part}.log")
                    raise ClusterError(f"{part} ended with {running.returncode} while starting:\n{log}")
            if _is_ready(self.address, self.port, context):
                return
            if time.monotonic() > deadline:
                log = process.tail(self.folder / "log" / "kube-apiserver.log")
                raise ClusterError(f"the API server was not ready within {self.seconds:.0f} s:\n{log}")
            time.sleep(0.1)


def kubectl(
    kubeconfig: Path, *arguments: str, text: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs our own kubectl against `kubeconfig`; raises ClusterError with its stderr on failure."""
    program = binaries.ensure(["kubectl"])["kubectl"]
    result = subprocess.run(
        [str(program), f"--kubeconfig={kubeconfig}", *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    if check and result.returncode:
        raise ClusterError(
            f"kubectl {' '.join(arguments)} exited {result.returncode}: {result.stderr.strip()}"
        )
    return result


def _pair_flags(certificate: str, key: str, pair: Pair) -> tuple[str, str]:
    return f"--{certificate}={pair.certificate}", f"--{key}={pair.key}"


def _is_ready(address: str, port: int, context: ssl.SSLContext) -> bool:
    connection = http.client.HTTPSConnection(address, port, context=context, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
