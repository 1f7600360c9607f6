"""One node of the mesh: its event loop, its membership, its periodic tasks."""
