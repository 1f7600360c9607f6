"""Management of a running server: one row and one function per verb."""
