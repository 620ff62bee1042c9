"""The pure parts: what is written for programs, and what is read from the machine."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from cluster import binaries, cgroups, lifecycle, network, node, packages
from cluster.errors import ClusterError
from cluster.paths import NODES, Node


def test_every_binary_is_pinned_by_a_committed_folder() -> None:
    for binary in binaries.BINARIES.values():
        assert (binaries.GO_FOLDER / binary.folder / "go.mod").exists()
    groups = (
        binaries.CONTROL_PLANE,
        binaries.NODE,
        binaries.ADDONS,
        binaries.HOLLOW,
        binaries.PEERS,
        binaries.FLUX,
        binaries.KARPENTER,
    )
    assert {name for group in groups for name in group} == set(binaries.BINARIES)


def test_a_changed_pin_changes_where_binaries_lie(tmp_path: Path) -> None:
    folder = tmp_path / "helm"
    folder.mkdir()
    (folder / "go.mod").write_text("module x\n")
    (folder / "go.sum").write_text("")
    first = binaries.folder_key("helm", tmp_path)
    assert binaries.folder_key("helm", tmp_path) == first
    (folder / "go.sum").write_text("helm.sh/helm/v4 v4.3.1 h1:x\n")
    assert binaries.folder_key("helm", tmp_path) != first


def test_kubernetes_programs_learn_their_version_from_the_pin() -> None:
    flags = binaries.linker_flags("kubernetes")
    stated = {flag.rpartition(".")[2] for flag in flags if "component-base" in flag}
    assert any(flag.endswith("gitMajor=1") for flag in flags)
    assert {item.partition("=")[0] for item in stated} >= {"gitMajor", "gitMinor"}


def test_package_list_is_read_line_by_line() -> None:
    assert packages.listed("# all\nrunc\n\nbuildah # builds\n") == ["runc", "buildah"]
    assert "runc" in packages.listed(packages.LIST.read_text())


def test_without_root_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"need root.*KUBECONFIG.*kind"):
        packages.require_machine()


def test_off_linux_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(ClusterError, match=r"need Linux and this is Darwin.*KUBECONFIG"):
        packages.require_machine()


def test_a_given_kubeconfig_is_used_and_ours_is_not_foreign(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENANTRY_CACHE", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "/elsewhere/config")
    assert lifecycle.kubeconfig() == Path("/elsewhere/config")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "cluster" / "admin.kubeconfig"))
    assert lifecycle.foreign_kubeconfig() is None
    monkeypatch.setenv("KUBECONFIG", "")
    assert lifecycle.kubeconfig() == tmp_path / "cluster" / "admin.kubeconfig"


def test_links_fit_the_kernels_limit_and_networks_do_not_meet() -> None:
    assert all(len(item.link) <= 15 for item in NODES)
    assert len({item.address for item in NODES}) == len({item.pod_cidr for item in NODES}) == len(NODES)


@pytest.mark.parametrize("destination", ["10.96.0.0/12", "172.30.0.0/16", "10.244.1.0/24"])
def test_a_foreign_route_into_our_networks_is_refused(
    monkeypatch: pytest.MonkeyPatch, destination: str
) -> None:
    monkeypatch.setattr(
        network, "_ip", lambda _: [{"dst": "default", "dev": "eth0"}, {"dst": destination, "dev": "vpn0"}]
    )
    with pytest.raises(ClusterError, match=r"`vpn0`.*KUBECONFIG"):
        network.refuse_overlap()


def test_containerd_settings_are_valid_and_stay_in_the_nodes_folder() -> None:
    config = tomllib.loads(node.containerd_config(Path("/c/shared"), "overlayfs", raise_priority=False))
    assert config["root"] == "/c/shared/containerd"
    runtime = config["plugins"]["io.containerd.cri.v1.runtime"]
    assert runtime["restrict_oom_score_adj"] is True
    assert config["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == node.PAUSE_IMAGE


@pytest.mark.parametrize(("mask", "may"), [("000001fffeffffff", False), ("000001ffffffffff", True)])
def test_the_missing_capability_is_seen(tmp_path: Path, mask: str, may: bool) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nCapEff:\t{mask}\n")
    assert node.may_raise_priority(status) is may


def test_kubelet_lives_below_the_nodes_group() -> None:
    dedicated = Node("dedicated", 3)
    config = node.kubelet_config(Path("/c"), Path("ca"), Path("crt"), Path("key"), dedicated)
    assert config["cgroupRoot"] == cgroups.parent("tenantry-dedicated") == "/tenantry/tenantry-dedicated"


def test_groups_of_version_1_are_made_in_every_hierarchy_and_cpusets_filled(tmp_path: Path) -> None:
    for name in ("cpuset", "memory"):
        (tmp_path / name).mkdir()
    for name, value in (("cpuset.cpus", "0-1"), ("cpuset.mems", "0")):
        (tmp_path / "cpuset" / name).write_text(value)
        # The kernel offers both files in every new group.
        for group in ("tenantry", "tenantry/n"):
            (tmp_path / "cpuset" / group).mkdir(parents=True, exist_ok=True)
            (tmp_path / "cpuset" / group / name).write_text("")
    assert cgroups.version(tmp_path) == 1
    cgroups.create("n", tmp_path)
    assert (tmp_path / "memory" / "tenantry" / "n").is_dir()
    assert (tmp_path / "cpuset" / "tenantry" / "n" / "cpuset.cpus").read_text() == "0-1"
    assert len(cgroups.left(tmp_path)) == 2


def test_groups_of_version_2_pass_on_the_controllers_that_are_offered(tmp_path: Path) -> None:
    for group in (tmp_path, tmp_path / "tenantry", tmp_path / "tenantry" / "n"):
        group.mkdir(exist_ok=True)
        (group / "cgroup.controllers").write_text("cpuset cpu memory pids hugetlb\n")
    assert cgroups.version(tmp_path) == 2
    cgroups.create("n", tmp_path)
    for group in (tmp_path, tmp_path / "tenantry", tmp_path / "tenantry" / "n"):
        assert (group / "cgroup.subtree_control").read_text() == "+cpuset +cpu +memory +pids"


def test_a_group_that_holds_processes_is_explained(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    (tmp_path / "cgroup.subtree_control").mkdir()  # any write fails, as the kernel's does
    with pytest.raises(ClusterError, match="processes live in it"):
        cgroups.create("n", tmp_path)


def test_mounts_below_a_folder_are_told_apart_from_its_neighbours(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / /c/cluster rw - ext4 x rw\n2 0 8:1 / /c/cluster/n rw - x x rw\n3 0 8:1 / /c/cluster2 rw - x x rw\n"
    )
    assert lifecycle.mounts_below(Path("/c/cluster"), table) == ["/c/cluster", "/c/cluster/n"]
