"""Benchmarks of containers: SDKs, start, shared memory, tensors, batches, a GPU."""
