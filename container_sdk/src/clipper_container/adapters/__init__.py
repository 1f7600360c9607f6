"""Adapters: models of other frameworks and servers as a `Model`."""
