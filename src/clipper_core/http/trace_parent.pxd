# The header `traceparent` of a request, and of its response, which names the same trace and a span
# of this server.
#
# Source: w3.org/TR/trace-context, sections 3.2 and 4.3.
#
# Threads: any (pure functions).
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u64, u8

cdef enum:
    TRACE_PARENT_BYTES = 55     # the version, the trace, the caller's span and its flags

# Return whether a value names a trace. A value that does not counts as none.
cdef bint trace_parent_is_valid(const u8* value, u64 n) noexcept nogil
# Return whether the caller records the trace. value: a valid one
cdef bint trace_parent_is_sampled(const u8* value) noexcept nogil
# Append the value of the response's header. span: not 0
cdef void trace_parent_put(Bytes* out, const u8* value, u64 span) noexcept nogil
# Return another number that is not 0, at random but no secret. draws: the state, of one thread
cdef u64 span_new(u64* draws) noexcept nogil
