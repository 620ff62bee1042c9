"""Adapters: what may be served (config, tensors), where its bytes lie (store), and in which state it is (registry)."""
