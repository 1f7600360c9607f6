"""Many models on many nodes, loaded when they are asked for: docs/mesh.md."""
