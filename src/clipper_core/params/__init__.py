"""The parameter server: embedding tables, and the shard that serves them."""
