"""Messages between nodes, and between a node and its model hosts."""
