"""The one error this package raises for what a person can act on."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """Says what went wrong and what to do; the command line prints it without a traceback."""
