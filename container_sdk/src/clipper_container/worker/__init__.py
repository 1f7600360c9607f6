"""A process that serves one model: handshake, serving loop, batches, feedback, warm-up."""
