"""Replication: copies of a shard's rows on other shards, and reads from them."""
