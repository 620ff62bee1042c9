"""What runs in a probe's pod: its own tiny process, of Python's standard library alone. It knows nothing of tenants."""
