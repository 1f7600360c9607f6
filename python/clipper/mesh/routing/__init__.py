"""The way of a query from a model name to a copy that serves it."""
