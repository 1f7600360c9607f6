"""Formats: bytes on sockets, and predictions in memory."""
