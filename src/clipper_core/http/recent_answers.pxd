# The answers that were written without Python (http_route), kept for a while so that feedback can
# name them by their id.
#
# A table of one entry per id, addressed by the low bits of the id: an answer replaces the one that
# was given a full table ago. Outputs that are blobs are shared with the cache and counted; beyond
# `bytes_max` the oldest go first.
#
# Threads: any. A spin lock guards the table; it is held for a few dozen instructions.
from clipper_core.runtime.machine cimport atomic, u32, u64
from clipper_core.wire.prediction cimport Value

cdef struct Entry:
    u64 number                  # of the answer; 0: free
    u64 given_us                # when it was given, monotonic
    Value value                 # holds a reference
    u32 owner                   # who may be told: a number that the caller chose

cdef cppclass RecentState:
    atomic[u32] lock
    u64 mask
    u64 bytes                   # of blobs that are held
    u64 bytes_max
    u64 count
    Entry* entries

cdef void recent_add(RecentState* r, u64 number, u32 owner, const Value* value,
                     u64 now_us) noexcept nogil

cdef class RecentAnswers:
    cdef RecentState* state
