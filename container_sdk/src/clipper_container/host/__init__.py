"""A process that holds many models for a node (docs/hosts.md).

`control` answers the node, `model_cache` loads and unloads, `server_connections` serves.
"""
