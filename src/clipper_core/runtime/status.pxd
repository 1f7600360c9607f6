# How a task can end. Functions of the core that Python does not call are `noexcept nogil` and
# return one of these.

cpdef enum Status:
    PENDING = 0                 # not ended yet
    OK = 1
    FULL = 2           # it could not finish by its deadline, or a named bound is reached: ring,
                       # bytes, futures; back off
    DEADLINE = 3                # the deadline passed before a prediction arrived
    DROPPED = 4                 # shed early: it could not have finished by its deadline
    NO_REPLICA = 5              # the deadline passed and no replica of the model was connected
    MODEL_ERROR = 6             # the model raised; the value has its traceback
    BAD_OUTPUT = 7              # the model's reply had the wrong count, type or shape
    REPLICA_LOST = 8            # the container died with the task and no second try was possible
    CANCELLED = 9               # the caller cancelled the query
    CLOSED = 10                 # the engine is shutting down
    FORKED = 11                 # this process is a fork: the engine exists in the parent only
    BAD_INPUT = 12              # the row's type or shape is not the model's
    BAD_FRAME = 13              # bytes from a peer that are no valid frame
    TOO_LARGE = 14              # a declared length exceeds its named limit
    NO_MEMORY = 15
    UNKNOWN = 16                # no such model, connection or version
    UNNEEDED = 17               # its query was answered without it

# Raise the exception of a status; the only place that does so. detail: names the object and the
# cause.
cdef int raise_for(int status, object detail) except -1
