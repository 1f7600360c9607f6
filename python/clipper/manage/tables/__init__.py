"""Management of parameter tables: where they are, their operations, and their client."""
