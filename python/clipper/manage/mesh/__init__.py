"""Management of a mesh: its routes, its changes as a stream, and their client."""
