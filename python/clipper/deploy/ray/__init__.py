"""Servers, mesh nodes and parameter shards on a Ray cluster, behind one address."""
