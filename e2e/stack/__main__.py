"""`python -m stack`: build the images that demo and e2e tests run, with progress, before any test's clock starts."""

from __future__ import annotations

import sys

from cluster import images, lifecycle
from cluster.errors import ClusterError

from .install import PROBE_IMAGE, build_images


def main() -> int:
    if lifecycle.foreign_kubeconfig() is not None:
        return 0  # the images of a given cluster are given too
    try:
        images.ensure(PROBE_IMAGE)
        build_images()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
