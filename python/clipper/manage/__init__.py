"""Management of a running server: one function per verb."""
