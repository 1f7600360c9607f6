"""The HTTP server of the hot path: plain predictions are answered without the GIL."""
