"""What `concurrent.futures.wait` and `as_completed` look at in a future: its state, a condition,
and those who wait."""
import threading
from concurrent.futures import CancelledError

from clipper_core.runtime.machine cimport u64
from clipper_core.runtime.status cimport CANCELLED

from clipper_core.runtime.status import error_for

cdef dict _states = {}      # by the address of a future; beside it, since hardly any future has one


class StandardState:
    """The state of a future as the functions of concurrent.futures read it. It does not refer to
    its future.

    Threads: any, under `condition`.
    """

    def __init__(self):
        self.condition = threading.Condition()
        self.state = "PENDING"
        self.waiters = []

    def end(self, future):
        """Tell those who wait that the future is done. Does nothing the second time."""
        with self.condition:
            if self.state != "PENDING":
                return
            self.state = "CANCELLED_AND_NOTIFIED" if future.cancelled() else "FINISHED"
            for waiter in self.waiters:
                if future.cancelled():
                    waiter.add_cancelled(future)
                elif future.exception() is None:
                    waiter.add_result(future)
                else:
                    waiter.add_exception(future)


cdef bint standard_begin(u64 address, made):
    return _states.setdefault(address, made) is made


cdef object standard_of(u64 address):
    return _states[address]


cdef void standard_forget(u64 address):
    _states.pop(address, None)


cdef object cancelled_error():
    error = error_for(CANCELLED, "")        # of the class that is bound to it, if that is one
    return error if isinstance(error, CancelledError) else CancelledError()
