"""Pure: which pool and which replicas serve whom, with the reason in words."""
