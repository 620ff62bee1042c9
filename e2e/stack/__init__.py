"""Tenantry installed on a cluster, with a registry and tenants of every tier: what the demo shows and e2e tests."""
