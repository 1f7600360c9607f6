"""One node of the mesh: its event loop, its registration, its periodic tasks."""
