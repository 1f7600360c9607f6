"""Commands that start, stop, configure and check the servers of a host."""
