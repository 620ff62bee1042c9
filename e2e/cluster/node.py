"""A worker node: containerd, kubelet, kube-proxy and a policy enforcer in namespaces of their own."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from . import binaries, cgroups, process
from .errors import ClusterError
from .packages import CNI_FOLDER
from .paths import DNS_SERVICE, HERE, IMAGE_HOST, POD_NETWORK, SERVICE_NETWORK, Node
from .pki import Authority
from .shell import run, succeeds

PAUSE_IMAGE = f"{IMAGE_HOST}/pause:1"
CLUSTER_DOMAIN = "cluster.local"
ENFORCER = "kube-router"


@dataclass(frozen=True)
class Worker:
    """One node of the cluster whose state lies in `cluster`."""

    node: Node
    cluster: Path

    @property
    def folder(self) -> Path:
        return self.cluster / self.node.role

    @property
    def socket(self) -> Path:
        """containerd's socket, absolute as its clients demand."""
        return self.folder / "containerd.sock"

    @property
    def snapshotter(self) -> str:
        """What keeps the node's image layers; whoever imports an image must name the same."""
        return (self.folder / "snapshotter").read_text()

    def start(self, authority: Authority, server: str) -> None:
        """Writes the node's settings and starts its first process; the network namespace must exist."""
        for name in ("cni", "kubelet", "pod-logs", "opt"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        serving = authority.issue(
            self.node.name,
            f"system:node:{self.node.name}",
            ("system:nodes",),
            names=(self.node.name,),
            ips=(self.node.address,),
        )
        authority.kubeconfig(self.cluster / "kubeconfigs" / f"{self.node.name}.kubeconfig", server, serving)
        self._write("snapshotter", "overlayfs" if can_overlay(self.folder) else "native")
        self._write("containerd.toml", containerd_config(self.folder, self.snapshotter, may_raise_priority()))
        self._write("cni/10-pods.conflist", json.dumps(cni_config(self.folder, self.node.pod_cidr)))
        self._write("resolv.conf", "")
        kubelet = kubelet_config(
            self.folder, authority.pair.certificate, serving.certificate, serving.key, self.node
        )
        self._write("kubelet.yaml", yaml.safe_dump(kubelet))
        proxy = proxy_config(self.cluster / "kubeconfigs" / "kube-proxy.kubeconfig", self.node.name)
        self._write("kube-proxy.yaml", yaml.safe_dump(proxy))
        cgroups.create(self.node.name)
        self.launch()

    def launch(self) -> None:
        """Starts the node's first process with the settings that lie there (again, after `stop`)."""
        # go-cni keeps its results below this fixed path; the node binds its own folder over it.
        Path("/var/lib/cni").mkdir(exist_ok=True)
        folders = dict.fromkeys(str(binaries.location(name).parent) for name in binaries.NODE)
        namespaces = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        process.spawn(
            # Not `ip netns exec`: that hides /sys/fs/cgroup.
            [
                "unshare",
                *namespaces,
                "nsenter",
                f"--net=/run/netns/{self.node.name}",
                "bash",
                str(HERE / "node-init.sh"),
            ],
            run=self.cluster,
            part=self.node.name,
            log=self.cluster / "log" / f"{self.node.name}.log",
            die_with_parent=False,
            environment={
                "PATH": os.environ.get("PATH", os.defpath),
                "NODE_FOLDER": str(self.folder),
                "NODE_NAME": self.node.name,
                "NODE_ADDRESS": self.node.address,
                "NODE_LABELS": ",".join(f"{name}={value}" for name, value in self.node.labels),
                "SERVICE_NETWORK": SERVICE_NETWORK,
                "BIN_FOLDERS": ":".join(folders),
                "KUBECONFIGS": str(self.cluster / "kubeconfigs"),
            },
        )

    def stop(self) -> None:
        """Kills the node as a power cut would; its state stays, so `launch` brings it back."""
        process.end_all(self.cluster, part=self.node.name)
        self.socket.unlink(missing_ok=True)

    def enforce_policies(self, on: bool) -> None:
        """Switches the node's policy enforcer on, or off with all that it wrote, as on a cluster whose network ignores
        NetworkPolicies. Pods are reached again, or not any more, within seconds."""
        switch = self.folder / "kube-router.off"
        if on:
            switch.unlink(missing_ok=True)
            return
        switch.touch()
        for enforcer in process.find(self.cluster, part=self.node.name):
            if enforcer.command == ENFORCER:
                os.kill(enforcer.pid, signal.SIGKILL)
        # What it wrote stays behind it. Nobody else writes to this table: kube-proxy has one of its own.
        for flush in ("-F", "-X"):
            run("nsenter", f"--net=/run/netns/{self.node.name}", "iptables", "-w", "-t", "filter", flush)

    def ctr(self, *arguments: str | Path, seconds: float = 600) -> str:
        """Runs containerd's client against the node, in the namespace of Kubernetes' images."""
        return run(
            binaries.location("ctr"),
            "--address",
            self.socket,
            "--namespace",
            "k8s.io",
            *arguments,
            seconds=seconds,
        )

    def wait_for_runtime(self, seconds: float = 60) -> None:
        """Returns once containerd answers; raises ClusterError with its log otherwise."""
        deadline = time.monotonic() + seconds
        while not (
            self.socket.exists() and succeeds(binaries.location("ctr"), "--address", self.socket, "version")
        ):
            if time.monotonic() > deadline:
                log = process.tail(self.folder / "log" / "containerd.log")
                start = process.tail(self.cluster / "log" / f"{self.node.name}.log")
                raise ClusterError(f"containerd of `{self.node.name}` does not answer:\n{start}\n{log}")
            time.sleep(0.1)

    def _write(self, name: str, content: str) -> None:
        (self.folder / name).write_text(content)


def may_raise_priority(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process holds CAP_SYS_RESOURCE; sandboxes often take it away.

    Without it runc dies ("can't get final child's PID from pipe") when a pod's oom score is negative.
    """
    for line in status.read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 24 & 1)
    return False


def can_overlay(folder: Path) -> bool:
    """Whether an overlay can be mounted over `folder` (not where it lies on an overlay itself)."""
    probe = folder / "overlay-probe"
    for name in ("lower", "upper", "work", "merged"):
        (probe / name).mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={probe}/lower,upperdir={probe}/upper,workdir={probe}/work"
    works = succeeds("mount", "-t", "overlay", "overlay", "-o", options, probe / "merged")
    if works:
        run("umount", probe / "merged")
    run("rm", "-rf", probe)
    return works


def containerd_config(folder: Path, snapshotter: str, raise_priority: bool) -> str:
    """containerd's settings (format version 3), all state below `folder`."""
    return f"""\
version = 3
root = "{folder}/containerd"
state = "{folder}/state"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp"]

[grpc]
  address = "{folder}/containerd.sock"

[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "{snapshotter}"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
  # Else pods' namespaces appear under the machine's /run/netns.
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = {str(not raise_priority).lower()}
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{CNI_FOLDER}"]
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def cni_config(folder: Path, pod_cidr: str) -> dict[str, Any]:
    """Point-to-point links: every packet of a pod is routed, so policies see traffic within a node too."""
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            {
                "type": "ptp",
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": pod_cidr}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": f"{folder}/ipam",
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def kubelet_config(folder: Path, ca: Path, certificate: Path, key: Path, node: Node) -> dict[str, Any]:
    """kubelet's settings; the unusual ones let it live on a machine that it does not own."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(ca)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(certificate),
        "tlsPrivateKeyFile": str(key),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroups.parent(node.name),
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": CLUSTER_DOMAIN,
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "resolvConf": str(folder / "resolv.conf"),
        # Images are imported, never pulled: one that is collected would be gone.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "readOnlyPort": 0,
        "registerNode": True,
    }


def proxy_config(kubeconfig: Path, name: str) -> dict[str, Any]:
    """kube-proxy's settings; it leaves connection tracking's limits, which are the machine's, alone."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "mode": "nftables",
        "clusterCIDR": POD_NETWORK,
        "detectLocalMode": "ClusterCIDR",
        "hostnameOverride": name,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
