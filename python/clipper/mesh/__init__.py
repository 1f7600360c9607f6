"""Many models on many nodes, loaded on first use: docs/mesh.md."""
