"""Status codes of the core, and the only function that raises the exception of a status.

The exception classes belong to the layer above and are bound once by `bind_errors`. Before that,
and for a status without a class, `StatusError` is raised. `bind_keywords` binds what refuses a
keyword that a compiled function does not have.
"""


class StatusError(Exception):
    """A core call ended with `status` and no exception class was bound to it."""

    def __init__(self, detail: str, status: int = 0) -> None:
        super().__init__(detail)
        self.status = Status(status)


cdef dict _errors = {}
cdef object _refuse_keywords = None

_DETAILS = {
    FULL: "the model is overloaded: the query could not have finished by its deadline, or a queue "
    "is full; try again later, "
          "add replicas, give it more time, or raise limits.queue_rows_max",
    DEADLINE: "no prediction arrived by the query's deadline",
    DROPPED: "shed: the prediction could not have been ready by the query's deadline",
    NO_REPLICA: "no container of the model was connected by the query's deadline",
    MODEL_ERROR: "the model failed without a message",
    BAD_OUTPUT: "the model's reply had the wrong count, type or shape",
    REPLICA_LOST: "the container was lost with the query, and no second try was possible",
    CANCELLED: "the query was cancelled",
    CLOSED: "the server is shutting down",
    FORKED: "this process is a fork; the server lives in its parent: start one of its own here",
    TOO_LARGE: "an input or output is larger than a frame may be; see limits.frame_bytes_max",
    NO_MEMORY: "memory is out",
    UNNEEDED: "the query was answered without it",
}


def bind_errors(dict classes):
    """Bind exception classes to statuses: `{Status.FULL: Overloaded, ...}`. Each is called with one
    string. Threads: any."""
    for status, error in classes.items():
        _errors[int(status)] = error


def error_for(int status, str detail):
    """The exception a task that ended with `status` raises; it is returned, not raised. Threads:
    any."""
    cls = _errors.get(status)
    detail = detail or _DETAILS.get(status, f"the prediction ended with {Status(status).name}")
    return StatusError(detail, status) if cls is None else cls(detail)


def bind_keywords(refuse):
    """Bind what raises for keywords that a function does not have: it is called with the name of
    the function, the keywords, and the names of its arguments. Threads: any."""
    global _refuse_keywords
    _refuse_keywords = refuse


def refuse_keyword(str function, str keyword, list names):
    """Raise for a keyword that a function does not have: what was bound, else TypeError. names: of
    its arguments. Compiled functions call it. Threads: any."""
    if _refuse_keywords is not None:
        _refuse_keywords(function, (keyword,), names)
    raise TypeError(f"{function}() has no keyword {keyword!r}; it has {', '.join(names)}")


cdef int raise_for(int status, object detail) except -1:
    if status <= OK:
        return 0
    raise error_for(status, detail if isinstance(detail, str) else str(detail))
