"""The lowest layer: memory, atomics, queues, histograms and status codes."""
