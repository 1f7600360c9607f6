"""Keys and tokens of clients, containers and workers."""
