"""Counters of a shard, and how Python reads them."""
from libc.stdlib cimport free
from libc.string cimport memset

from clipper_core.runtime.histogram cimport count, histogram_record, histogram_snapshot, note
from clipper_core.runtime.machine cimport aligned_new, relaxed
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, raise_for


cdef void counts_refuse(ShardCounts* counts, u32 why) noexcept nogil:
    count(&counts.refused[why % REASONS_MAX], 1)


cdef void counts_push(ShardCounts* counts, u32 table, u64 applied, u64 made, u64 unadmitted,
                      u64 refused,
                      u64 evicted) noexcept nogil:
    cdef TableCounts* one = &counts.tables[table]
    note(&one.applied, applied)
    note(&one.made, made)
    note(&one.unadmitted, unadmitted)
    note(&one.refused, refused)
    note(&one.evicted, evicted)


cdef class Counts:
    """Threads: any; of `push` and `expire`, who has held the door."""

    def __cinit__(self):
        self.state = <ShardCounts*> aligned_new(sizeof(ShardCounts))
        if self.state == NULL:
            raise_for(NO_MEMORY, "counters of a shard")

    def __dealloc__(self):
        free(self.state)

    cdef TableCounts* _table(self, u32 table) except NULL:
        if table >= COUNTED_MAX:
            raise_for(BAD_INPUT, f"table {table}: a shard has at most {COUNTED_MAX}")
        return &self.state.tables[table]

    def push(self, u32 table, counted):
        """What `Table.push` said."""
        self._table(table)
        counts_push(self.state, table, counted["applied"], counted["made"], counted["unadmitted"],
                    counted["refused"],
                    counted["evicted"])

    def clear(self, u32 table):
        """A table of another one's number begins at 0."""
        memset(<void*> self._table(table), 0, sizeof(TableCounts))

    def expire(self, u32 table, u64 rows):
        note(&self._table(table).expired, rows)

    def refuse(self, u32 why):
        """A request, by the number that says why."""
        counts_refuse(self.state, why)

    def lag(self, u64 versions):
        """A push whose gradients are of an older version by so many."""
        histogram_record(&self.state.lags, versions)

    def take(self):
        """A push of a whole model."""
        count(&self.state.taken, 1)

    @property
    def taken(self):
        return self.state.taken.load(relaxed)

    def table(self, u32 table):
        """-> rows pulled, missed among them; ids applied, unadmitted, refused; rows made, evicted,
        expired"""
        cdef TableCounts* one = self._table(table)
        return {"pulled": one.pulled.load(relaxed), "missed": one.missed.load(relaxed),
                "applied": one.applied.load(relaxed),
                "made": one.made.load(relaxed), "unadmitted": one.unadmitted.load(relaxed),
                "refused": one.refused.load(relaxed),
                "evicted": one.evicted.load(relaxed), "expired": one.expired.load(relaxed)}

    def refused(self):
        """-> how many requests, by the number that says why"""
        each = {why: self.state.refused[why].load(relaxed) for why in range(REASONS_MAX)}
        return {why: n for why, n in each.items() if n}

    def lags(self):
        """A Snapshot, of versions."""
        return histogram_snapshot(&self.state.lags)
