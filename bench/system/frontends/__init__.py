"""Benchmarks of HTTP, gRPC and Redis Streams, with their clients and attackers."""
