# Futures as the functions of concurrent.futures read them: a state, a condition and a list of
# waiters beside a future of ours, made when one of these functions first looks at it. By the
# address of the future, which is alive while it is asked.
from clipper_core.runtime.machine cimport u64

cdef bint standard_begin(u64 address, made)     # True for exactly one caller: its `made` is the one
                                                # from now on
cdef object standard_of(u64 address)
cdef void standard_forget(u64 address)          # the future goes
cdef object cancelled_error()                   # a CancelledError as the standard library means it
