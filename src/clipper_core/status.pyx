"""Status codes of the core, and the one door from a status to an exception.

The exception tree belongs to the layer above: it is bound once with `bind_errors`; before that (and for a status nobody
claimed) the door raises `StatusError`.
"""


class StatusError(Exception):
    """A core call ended with `status` and no exception class was bound to it."""

    def __init__(self, detail: str, status: int = 0) -> None:
        super().__init__(detail)
        self.status = Status(status)


cdef dict _errors = {}


def bind_errors(dict classes):
    """Bind exception classes to statuses: `{Status.FULL: Overloaded, ...}`. Each is called with one string. Threads: any."""
    for status, error in classes.items():
        _errors[int(status)] = error


def error_for(int status, str detail):
    """The exception a task that ended with `status` raises; it is returned, not raised. Threads: any."""
    cls = _errors.get(status)
    return StatusError(detail, status) if cls is None else cls(detail)


cdef int raise_for(int status, object detail) except -1:
    if status <= OK:
        return 0
    raise error_for(status, detail if isinstance(detail, str) else str(detail))
