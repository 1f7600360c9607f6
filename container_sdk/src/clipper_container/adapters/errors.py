"""Why a target cannot be loaded."""


class LoadError(Exception):
    """A target that cannot be loaded, for a reason that is not an exception of the user's own
    code."""
