"""A set of shards as processes: their supervisor, their addresses and their health."""
