"""Management over HTTP: its routes, their descriptions, and the listeners of a server."""
