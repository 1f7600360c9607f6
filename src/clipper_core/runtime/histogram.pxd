# Counters and latency histograms that any thread may update and read: relaxed atomics, no locks, no
# allocation. A histogram is log-linear: values below 16 exactly, above that 8 buckets per power of
# two (<= 12.5 % wide), up to 2^42; greater values share the last bucket.
from clipper_core.runtime.machine cimport atomic, i64, relaxed, u32, u64

cdef enum:
    BUCKETS = 320

cdef cppclass Histogram:
    atomic[u64] buckets[320]
    atomic[u64] total           # sum of recorded values

cdef u32 bucket_of(u64 value) noexcept nogil
# Return the smallest value of a bucket.
cdef u64 bucket_low(u32 bucket) noexcept nogil
cdef void histogram_record(Histogram* h, u64 value) noexcept nogil
cdef void histogram_record_many(Histogram* h, u64 value, u64 times) noexcept nogil
# Return a Snapshot, a Python object. Needs the GIL.
cdef object histogram_snapshot(Histogram* h)
cdef void count(atomic[u64]* counter, u64 by) noexcept nogil

# As `count`, for one writer (the loop) and any number of readers: a load and a store, a fifth of
# the cost.
cdef inline void note(atomic[u64]* counter, u64 by) noexcept nogil:
    counter.store(counter.load(relaxed) + by, relaxed)

cdef inline void histogram_note(Histogram* h, u64 value) noexcept nogil:
    note(&h.buckets[bucket_of(value)], 1)
    note(&h.total, value)

cdef inline void histogram_note_many(Histogram* h, u64 value, u64 times) noexcept nogil:
    note(&h.buckets[bucket_of(value)], times)
    note(&h.total, value * times)

cdef class LatencyHistogram:
    cdef Histogram* h

cdef class Counter:
    cdef atomic[u64] n          # of threads without the GIL
    cdef u64 held               # of those with it

# Count for a thread that has the GIL, which keeps the others out: a fifth of the cost.
cdef inline void count_held(Counter counter, u64 by) noexcept:
    counter.held += by

cdef class Gauge:               # a number that Python sets and the core reads, with the GIL
    cdef public i64 value
