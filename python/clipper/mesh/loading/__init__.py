"""Models in the memory of this node: the load queue, model host processes and their recovery."""
