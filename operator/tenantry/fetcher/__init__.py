"""The fetcher: a process of its own that pulls adapters, verifies them and pushes them by digest to replicas.

A transfer goes one way: `app` (door) -> `transfers` (what is asked, what runs, when to try again) -> `oci`
(registry, over `net`, which decides where connections may go) -> `artifact` (what the bytes are) -> `cache` -> `push`.
"""
