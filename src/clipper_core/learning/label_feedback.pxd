# Feedback about labels, read from the objects of queries: records of the journal, accuracy, and the
# steps of a label, or a list of them, from the answer it is about to the learned state. Unlike the
# rest of this package it holds the states' lock for that.
#
# Threads: any, with the GIL.
from clipper_core.learning.bandit cimport Rule
from clipper_core.runtime.machine cimport i64, u64, u8

# -- The answer of a policy that queries all models and votes on labels, from the objects of a
# query: read, weighed and calibrated in one call.
#
# Threads: any; the state belongs to the caller.
cdef class LabelVotes:
    cdef Rule rule
    cdef double doubt           # observations in a bin from which on they outweigh the confidence

# -- Answers that feedback may still come for, by id, oldest first.
#
# Threads: any, with the GIL. No step gives it up between a check and the change that follows from
# it, so the table needs no lock, and an answer is claimed once.
cdef class Joined:
    cdef readonly object learner, plan, arrived, answer
    cdef readonly str user
    cdef readonly tuple late            # (model, future) of observers
    cdef readonly double until_s
    cdef public bint has_feedback
    cdef public bint is_written         # to the store, or about to be
    cdef public bint is_claimed         # there, by this server
    cdef readonly i64 nbytes

cdef class JoinTable:
    cdef dict known                     # by id
    cdef object order, clock
    cdef object answer_type
    cdef i64 size_max, bytes_max
    cdef double window_s
    cdef readonly i64 nbytes

    cdef Joined find(self, object id)   # None if it is not here
    cdef double now_s(self) except -1

# -- The end of the journal's last segment: the file's pages in memory, to which records are copied
# without a system call, and the number of the next record. A record is u32 length, u32 CRC-32 (of
# the length and the bytes), and the bytes (python/clipper/store/journal.py, which opens segments,
# makes room and reads).
#
# Threads: any, with the GIL, which no append releases: so appends need no lock. Who changes the
# file otherwise sets `room` to 0 first; then no append succeeds until there is room again.
cdef enum:
    HEAD_BYTES = 8              # of a record, before its bytes

cdef class JournalEnd:
    cdef u8* base               # the pages; NULL: none
    cdef readonly u64 mapped    # bytes of them
    cdef public u64 at          # where the next record goes
    cdef public u64 room        # an append ends at this offset at most
    cdef public u64 next        # number of the next record
    cdef bint keeps             # False: records are numbered only

    # Append `count` records that have their heads. Return the number of the last; 0 when there is
    # no room.
    cdef u64 put(self, const u8* framed, u64 nbytes, u64 count) noexcept

cdef void head_of(u8* at, const u8* record, u64 nbytes) noexcept nogil     # writes HEAD_BYTES
