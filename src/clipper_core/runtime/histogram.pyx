"""Latency histograms and counters: bumped by any thread without a lock, read by any thread without
stopping them.

A value costs two relaxed additions. A snapshot reads bucket by bucket while others go on recording,
so its count and sum may differ by the few records in flight; each alone is exact once the recorders
rest.
"""
cimport cython
from libc.math cimport NAN
from libc.stdlib cimport free
from libc.string cimport memcmp, memset

from clipper_core.runtime.machine cimport aligned_new, relaxed

cdef extern from *:
    int leading_zeros "__builtin_clzll"(u64 word) noexcept nogil


cdef u32 bucket_of(u64 value) noexcept nogil:
    cdef u32 power
    if value < 16:
        return <u32> value
    power = 63 - leading_zeros(value)
    return min(<u32> (8 * (power - 2) + ((value >> (power - 3)) & 7)), <u32> (BUCKETS - 1))


cdef u64 bucket_low(u32 bucket) noexcept nogil:
    if bucket < 16:
        return bucket
    return <u64> (8 + (bucket & 7)) << (bucket // 8 - 1)


cdef u64 bucket_high(u32 bucket) noexcept nogil:
    return bucket_low(bucket + 1) - 1


cdef void histogram_record(Histogram* h, u64 value) noexcept nogil:
    h.buckets[bucket_of(value)].fetch_add(1, relaxed)
    h.total.fetch_add(value, relaxed)


cdef void histogram_record_many(Histogram* h, u64 value, u64 times) noexcept nogil:
    h.buckets[bucket_of(value)].fetch_add(times, relaxed)
    h.total.fetch_add(value * times, relaxed)


cdef void count(atomic[u64]* counter, u64 by) noexcept nogil:
    counter.fetch_add(by, relaxed)


cdef object histogram_snapshot(Histogram* h):
    cdef Snapshot snapshot = Snapshot()
    cdef u32 i
    for i in range(BUCKETS):
        snapshot.counts[i] = h.buckets[i].load(relaxed)
        snapshot._count += snapshot.counts[i]
    snapshot._sum = h.total.load(relaxed)
    return snapshot


cdef class Snapshot:
    """The counts of a histogram at a time: `later - earlier` are those in between, `a + b` those of
    both. Threads: any (it never changes).

    `Snapshot()` is empty. Values keep the unit they were recorded in; the sum is exact modulo
    2**64.
    """
    cdef u64 counts[BUCKETS]
    cdef u64 _count
    cdef u64 _sum

    def __cinit__(self):
        memset(self.counts, 0, sizeof(self.counts))

    @property
    def count(self):
        """The number of values recorded."""
        return self._count

    @property
    def sum(self):
        """Their sum."""
        return self._sum

    @property
    def mean(self):
        """Their mean; nan if there are none."""
        return <double> self._sum / <double> self._count if self._count else NAN

    @property
    def max(self):
        """An upper bound of the largest value, at most 12.5 % above it; 0 if there are none."""
        cdef int i
        for i in range(BUCKETS - 1, -1, -1):
            if self.counts[i]:
                return bucket_high(i)
        return 0

    def quantile(self, double q):
        """The value of rank ceil(q * count), q from 0 to 1; nan if there are none.

        Exact below 16. Above, the k-th of c values in a bucket is taken to lie k/c of the way to
        the bucket's upper edge: a lone value reads as that edge, and no estimate is more than 12.5
        % from the value it stands for. Raises ValueError for q outside 0 to 1.
        """
        cdef u64 rank, below = 0
        cdef double share
        cdef u32 i
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"q must be from 0 to 1, not {q}")
        if self._count == 0:
            return NAN
        rank = self._rank(q)
        for i in range(BUCKETS):
            if below + self.counts[i] >= rank:
                break
            below += self.counts[i]
        share = <double> (rank - below) / <double> self.counts[i]
        return bucket_low(i) + <double> (bucket_high(i) - bucket_low(i)) * share

    cdef u64 _rank(self, double q):
        cdef double exact = q * <double> self._count
        cdef u64 rank = <u64> exact
        if <double> rank < exact:
            rank += 1
        return min(max(rank, <u64> 1), self._count)

    def count_at_most(self, u64 value):
        """Return how many values are surely <= `value`: those of buckets that end by it. Exact at a
        bucket's `high`."""
        cdef u64 total = 0
        cdef u32 i
        for i in range(BUCKETS):
            if bucket_high(i) > value:
                break
            total += self.counts[i]
        return total

    def buckets(self):
        """The buckets in use, rising: (low, high, count), edges inclusive; the last one also holds
        greater values."""
        cdef u32 i
        return [(bucket_low(i), bucket_high(i), self.counts[i]) for i in range(BUCKETS)
                if self.counts[i]]

    def __add__(self, Snapshot other not None):
        cdef Snapshot both = Snapshot()
        cdef u32 i
        for i in range(BUCKETS):
            both.counts[i] = self.counts[i] + other.counts[i]
        both._count = self._count + other._count
        both._sum = self._sum + other._sum
        return both

    def __sub__(self, Snapshot earlier not None):
        """Return the counts since `earlier`. Raises ValueError if `earlier` holds values that this
        one does not."""
        cdef Snapshot between = Snapshot()
        cdef u32 i
        for i in range(BUCKETS):
            if self.counts[i] < earlier.counts[i]:
                raise ValueError("the snapshot on the right is not the earlier one")
            between.counts[i] = self.counts[i] - earlier.counts[i]
        between._count = self._count - earlier._count
        between._sum = self._sum - earlier._sum
        return between

    def __eq__(self, other):
        if not isinstance(other, Snapshot):
            return NotImplemented
        cdef Snapshot that = <Snapshot> other
        return self._sum == that._sum and memcmp(self.counts, that.counts, sizeof(self.counts)) == 0

    __hash__ = None

    def __repr__(self):
        return (f"Snapshot(count={self.count}, mean={self.mean:.4g}, p50={self.quantile(0.5):.4g}, "
                f"p99={self.quantile(0.99):.4g}, max={self.max})")


cdef class LatencyHistogram:
    """Values from 0 to 2**64 - 1 in any unit; those from 2**42 on share the last bucket. 2.6 KB.
    Threads: any.

    Raises OverflowError for a value out of range, MemoryError when memory is out.
    """

    def __cinit__(self):
        self.h = <Histogram*> aligned_new(sizeof(Histogram))
        if self.h == NULL:
            raise MemoryError("no memory for a histogram")

    def __dealloc__(self):
        free(self.h)

    def record(self, u64 value):
        """Count one value."""
        histogram_record(self.h, value)

    def record_many(self, u64 value, u64 times):
        """Count one value `times` times, at the price of one."""
        histogram_record_many(self.h, value, times)

    def snapshot(self):
        """Return the counts of now."""
        return histogram_snapshot(self.h)


cdef class Counter:
    """A number that only grows, modulo 2**64. Threads: any."""

    def __cinit__(self):
        self.n.store(0, relaxed)
        self.held = 0

    def add(self, u64 by=1):
        """Count `by` more."""
        count_held(self, by)

    @property
    def value(self):
        """The count."""
        return <u64> (self.n.load(relaxed) + self.held)


def snapshot_of(buckets, u64 total):
    """Return a Snapshot from the result of `buckets()`, (low, high, count) or (low, count), and the
    sum."""
    cdef Snapshot made = Snapshot()
    cdef u64 n
    for low, *_, times in buckets:
        n = times
        made.counts[bucket_of(low)] += n
        made._count += n
    made._sum = total
    return made


@cython.final
cdef class Gauge:
    """A number that the core reads at each query. Threads: any."""

    def __init__(self, i64 value=0):
        self.value = value
