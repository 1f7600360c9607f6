"""HTTP/1.1: listeners, connections, the router, and the handlers of the query address."""
