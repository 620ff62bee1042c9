#!/bin/bash
# First process of a node: pid 1 of its process namespace, inside mount, UTS, IPC and network namespaces of its own.
# Killing it ends everything on the node, since the kernel then kills the whole process namespace.
#
# NODE_FOLDER: the node's state. NODE_NAME, NODE_ADDRESS, NODE_LABELS. SERVICE_NETWORK. BIN_FOLDERS: search path of our binaries.
# KUBECONFIGS: folder that holds <node>.kubeconfig, kube-proxy.kubeconfig and kube-router.kubeconfig.
set -euo pipefail

# What the node's programs leave under fixed paths belongs to the node, not to the machine.
mount --make-rprivate /
mount --bind "$NODE_FOLDER" "$NODE_FOLDER"
mount --make-rshared /
mkdir -p "$NODE_FOLDER"/{log,cni-cache}
mount -t tmpfs -o mode=0755 node-run /run
mount --bind "$NODE_FOLDER/log" /var/log
case "$NODE_FOLDER" in
/var/lib/*) ;; # it would be covered itself
*) mount -t tmpfs -o mode=0755 node-lib /var/lib ;; # kubelets have a socket there, whatever their --root-dir
esac
mkdir -p /var/lib/cni
mount --bind "$NODE_FOLDER/cni-cache" /var/lib/cni
hostname "$NODE_NAME"
sysctl -qw net.ipv4.ip_forward=1
export PATH="$BIN_FOLDERS:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

supervise() { # part, command...: starts it again when it ends, as an init system would, unless it is switched off
  local part=$1
  shift
  while :; do
    while [ -e "$NODE_FOLDER/$part.off" ]; do sleep 0.2; done
    "$@" >>"$NODE_FOLDER/log/$part.log" 2>&1 || true
    echo "node-init: $part ended, starting it again" >>"$NODE_FOLDER/log/$part.log"
    sleep 1
  done
}

supervise containerd containerd --config "$NODE_FOLDER/containerd.toml" &
until [ -S "$NODE_FOLDER/containerd.sock" ]; do sleep 0.05; done

supervise kubelet kubelet --config "$NODE_FOLDER/kubelet.yaml" --kubeconfig "$KUBECONFIGS/$NODE_NAME.kubeconfig" \
  --root-dir "$NODE_FOLDER/kubelet" --cert-dir "$NODE_FOLDER/kubelet/pki" --hostname-override "$NODE_NAME" \
  --node-ip "$NODE_ADDRESS" --node-labels "$NODE_LABELS" &
supervise kube-proxy kube-proxy --config "$NODE_FOLDER/kube-proxy.yaml" &
# Policies only: routes are static here and Services belong to kube-proxy.
supervise kube-router kube-router --kubeconfig "$KUBECONFIGS/kube-router.kubeconfig" --hostname-override "$NODE_NAME" \
  --run-firewall=true --run-router=false --run-service-proxy=false --run-loadbalancer=false --enable-cni=false \
  --service-cluster-ip-range "$SERVICE_NETWORK" --health-port 0 --metrics-port 0 &

wait
