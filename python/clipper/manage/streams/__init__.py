"""Management of Redis streams: their operations, and their client."""
