"""The fetcher: a process of its own that pulls adapters, verifies them and pushes them by digest to replicas.

A transfer goes one way: `app` (door) -> `transfers` (what is asked, what runs, when to try again) -> `sources` (`oci`
or `folder`, over `session` and `net`, which decides where connections may go, with `credentials` from `secrets`) ->
`artifact` (what the bytes are) -> `signatures` (whose they are, by `trust`) -> `cache` -> `push`.
"""
