"""The data-path front door: identity, limits, fair queues, routing, ledger."""
