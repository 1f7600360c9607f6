"""A node of the mesh: how its parts are built and connected, and how it joins and leaves."""
