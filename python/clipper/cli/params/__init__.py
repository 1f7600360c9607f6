"""Commands for a parameter server: its shards and its tables."""
