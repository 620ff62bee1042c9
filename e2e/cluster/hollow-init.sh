#!/bin/bash
# First process of a hollow node: a kubelet that talks to the API server but runs no container.
# What it leaves under fixed paths stays in its own folder. FOLDER: that folder. All arguments go to kubemark.
set -euo pipefail
mount --make-rprivate /
mkdir -p "$FOLDER"/{log,tmp}
mount -t tmpfs -o mode=0755 node-run /run
mount --bind "$FOLDER/log" /var/log
export TMPDIR="$FOLDER/tmp"
exec "$@"
