"""Which batch a task went in, and when: for spans."""
cimport cython
from libc.stdlib cimport free, malloc
from libcpp.unordered_set cimport unordered_set

from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, raise_for
from clipper_core.scheduling.batch_log cimport RECORD_HEAD, batch_log_open


@cython.final
cdef class BatchLog:
    """Threads: one at a time. The batches of an engine from now on; `keep` words of them are
    remembered, as many wait to be read.

    Each engine has one at most. Raises BAD_INPUT for a second one, or a `keep` that is no power of
    two from 64 to 2^26.
    """

    def __cinit__(self, Engine engine not None, u64 keep=1 << 18):
        if keep < 64 or keep > 1 << 26 or keep & (keep - 1):
            raise_for(BAD_INPUT, f"keep is a power of two from 64 to 2^26, not {keep}")
        self.engine = engine
        self.lanes = engine.state.lanes
        self.kept = <u64*> malloc(keep * sizeof(u64))
        self.kept_size = keep
        if self.lanes.log != NULL:
            raise_for(BAD_INPUT, "the batches of this engine are logged already")
        if self.kept == NULL or not batch_log_open(self.lanes, keep):
            raise_for(NO_MEMORY, "no memory for the log of batches")

    def __dealloc__(self):
        free(self.kept)

    @property
    def lost(self):
        """Batches that found no room since the start: it was read too seldom."""
        return self.lanes.log_lost.load(relaxed)

    cdef void _read(self) noexcept nogil:
        cdef u64 mask = self.kept_size - 1
        cdef u64 word = 0
        while self.lanes.log.pop(&word):
            # the oldest record gives way as a whole
            if self.kept_tail - self.kept_head == self.kept_size:
                self.kept_head += self.kept[self.kept_head & mask] + 1
            self.kept[self.kept_tail & mask] = word
            self.kept_tail += 1

    def find(self, ids):
        """Which batches the tasks with these ids (of a Future: `id`, and one more for each further
        task) went in.

        -> {id: (replica, rows, sent_us, begun_us, ended_us)}, times by the monotonic clock; begun:
        when the container had nothing before it. A task that no batch has ended, or one too long
        ago, is not there.
        """
        cdef unordered_set[u64] wanted
        cdef dict found = {}
        cdef u64 id, at, n, i
        cdef u64 mask = self.kept_size - 1
        cdef object batch
        for id in ids:
            wanted.insert(id)
        with nogil:
            self._read()
        at = self.kept_head
        while at < self.kept_tail and at + self.kept[at & mask] < self.kept_tail:
            n = self.kept[at & mask]
            batch = None
            for i in range(at + 1 + RECORD_HEAD, at + 1 + n):
                if wanted.count(self.kept[i & mask]):
                    if batch is None:
                        batch = (self.kept[(at + 1) & mask] >> 32,
                                 self.kept[(at + 1) & mask] & 0xFFFFFFFF,
                                 self.kept[(at + 2) & mask], self.kept[(at
                                                                        + 3) & mask], self.kept[(at
                                                                                + 4) & mask])
                    found[self.kept[i & mask]] = batch
            at += n + 1
        return found
