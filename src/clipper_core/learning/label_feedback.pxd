# Feedback about labels, read from the objects of queries: records of the journal, accuracy, and the
# steps of a label, or a list of them, from the answer it is about to the learned state. Unlike the
# rest of this package, it takes the lock of the states.
#
# Threads: any, with the GIL.
from clipper_core.learning.answer_window cimport AnswerWindow
from clipper_core.learning.bandit cimport Rule
from clipper_core.runtime.machine cimport i64, u64, u8

# -- The answer of a policy that queries all models and votes on labels, from the objects of a
# query: predictions are read, weighted and calibrated in one call.
#
# Threads: any; the state belongs to the caller.
cdef class LabelVotes:
    cdef Rule rule
    cdef double doubt           # number of observations in a bin above which they outweigh the
                                # confidence

# -- The end of the journal's last segment: the file's pages in memory, to which records are copied
# without a system call, and the number of the next record. A record is u32 length, u32 CRC-32 (of
# the length and the bytes), and the bytes (python/clipper/store/journal.py, which opens segments,
# makes room and reads).
#
# Threads: any, with the GIL. An append does not release it, so appends need no lock. Code that
# changes the file in another way first sets `room` to 0; then no append succeeds until there is
# room again.
cdef enum:
    HEAD_BYTES = 8              # of a record, before its bytes

cdef class JournalEnd:
    cdef u8* base               # the pages; NULL: none
    cdef readonly u64 mapped    # bytes of them
    cdef public u64 at          # where the next record goes
    cdef public u64 room        # an append ends at this offset at most
    cdef public u64 next        # number of the next record
    cdef bint keeps             # False: records are only counted, not stored

    # Append `count` records with their heads. Return the number of the last one; 0 if there is no
    # room.
    cdef u64 put(self, const u8* framed, u64 nbytes, u64 count) noexcept

cdef void head_of(u8* at, const u8* record, u64 nbytes) noexcept nogil     # writes HEAD_BYTES

# -- Shares and means, with weights. Threads: any, with the GIL.
cdef class Mean:
    cdef public double n, total

    cdef void add_one(self, double value, double weight) noexcept
    cdef void add_sum(self, double n, double total) noexcept

# -- Learning the label of an answer, given by itself or by its id. Threads: any, with the GIL.
cdef enum:
    LEFT = 0                    # nothing has changed: the general path must learn it
    KNOWN_BEFORE = 1            # the answer had feedback already
    LEARNED = 2

# Learn the label of an answer of this server. Raises what the journal raises: then it may be sent
# again.
cdef int label_learned(AnswerWindow table, object prediction, str application,
                       object label) except -1
