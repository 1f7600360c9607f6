"""Durability: what a shard writes to disk, and how it starts from that."""
