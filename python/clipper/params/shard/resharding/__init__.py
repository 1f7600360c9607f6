"""Resharding: the move of a set's rows to another number of shards."""
