"""The prediction cache."""
