"""TLS without the GIL: contexts, sessions, and relays between a session and Python."""
