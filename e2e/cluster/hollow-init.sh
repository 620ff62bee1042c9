#!/bin/bash
# First process of a hollow node: a kubelet that talks to the API server but runs no container.
# What it leaves under fixed paths (/run, /var/log, /tmp) stays in its own folder.
#
# FOLDER: that folder. KUBEMARK, NODE_KUBECONFIG: files. All arguments go to kubemark.
set -euo pipefail
mount --make-rprivate /
mkdir -p "$FOLDER"/{log,tmp}
mount -t tmpfs -o mode=0755 node-run /run
mount --bind "$FOLDER/log" /var/log
# Both may lie below /tmp, which is about to be covered.
for name in KUBEMARK NODE_KUBECONFIG; do
  touch "/run/$name"
  mount --bind "${!name}" "/run/$name"
done
mount --bind "$FOLDER/tmp" /tmp
# It shares the machine's network, and a kubelet that finds iptables puts its own rules there.
PATH=/nonexistent exec /run/KUBEMARK --kubeconfig=/run/NODE_KUBECONFIG "$@"
