"""The workers' side of a parameter server: connections, pulls and pushes, and caches of rows."""
