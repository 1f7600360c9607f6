"""Partition of parameters over shards.

Source: the parameter server's design document, "Model Parameter Partition".
"""

from clipper_core.params.embedding import key_of


def shard_of_name(name: str, shards: int) -> int:
    """Return the shard of a dense variable: a hash of its name, equal in every process, mod
    `shards`."""
    return key_of(name) % shards
