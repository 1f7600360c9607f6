"""Frontends: HTTP, gRPC and Redis Streams, through which requests reach the server."""
