"""Models packed into files for their containers, and the Python environments that they run in."""
