"""Tenantry: tenants, adapter pools and adapters, reconciled on Kubernetes."""
