"""Errors of loading a target."""


class LoadError(Exception):
    """A target cannot be loaded, for a reason other than an exception of the user's code."""
