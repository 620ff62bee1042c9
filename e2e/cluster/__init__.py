"""A real Kubernetes with several nodes on one Linux machine, built from source modules alone.

`python -m cluster up | down | status` (with `e2e` on PYTHONPATH). Nothing here is imported by the product.
"""
