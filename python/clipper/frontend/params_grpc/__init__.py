"""A parameter shard over gRPC: the PServer service."""
