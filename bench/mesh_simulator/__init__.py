"""A simulator of the mesh: its decisions on virtual time, with seeded faults."""
