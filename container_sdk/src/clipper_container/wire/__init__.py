"""The wire protocol (docs/wire.md): frames, sockets that carry them, rows in shared memory.

This package imports nothing else of clipper_container.
"""
