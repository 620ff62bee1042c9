"""The operator's machinery: store, queues, workers, watches, leadership, metrics. Knows nothing of tenants."""
