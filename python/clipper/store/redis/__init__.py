"""The store in a Redis server: its watches, and its lists that expire."""
