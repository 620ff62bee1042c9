"""Tensor parallelism: one model held by several processes of one machine, rank 0 driving the others."""
