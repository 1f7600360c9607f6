"""Errors of loading a target."""


class LoadError(Exception):
    """A target cannot be loaded, for a reason other than an exception of the user's code."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 500 characters; its type, if it has no
    text."""
    return str(error).strip().partition("\n")[0][:500] or type(error).__name__
