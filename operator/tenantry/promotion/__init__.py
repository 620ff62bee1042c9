"""Pure: which version of an adapter is served, and which ones replicas must hold meanwhile."""
