"""See shard_log.pxd. What Python has of it is for tests: `SequenceWindow`."""

from clipper_core.runtime.machine cimport u64


cdef class SequenceWindow:
    """Threads: one. Which pushes of a worker were seen: the last 1024 up to the highest."""
    cdef Sequences one

    def look(self, u64 sequence):
        """0: new, 1: seen, 2: too old to know."""
        return <int> self.one.look(sequence)

    def mark(self, u64 sequence):
        self.one.mark(sequence)
