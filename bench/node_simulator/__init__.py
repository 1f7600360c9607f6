"""Nodes of a mesh, the code that servers run, on virtual time and with faults by seed."""
