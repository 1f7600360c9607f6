"""One shard of a parameter server: its rows, its training, its replicas and its snapshots."""
