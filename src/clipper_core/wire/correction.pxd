# What a model that learns is told, and what it says of itself: FEEDBACK and ACCURACY
# (docs/wire.md).
#
# Threads: any (pure functions); accuracy_read: loop only.
#
# A FEEDBACK's payload is two whole frames, one behind the other: a PREDICT of the inputs, with
# SESSIONS, and a REPLY of as many labels. So every type of input and output that travels is a type
# of feedback, and nobody writes another codec for it.
from clipper_core.runtime.machine cimport atomic, u64, u8
from clipper_core.runtime.status cimport Status

cdef cppclass Progress:         # as a container told it last; anyone may read it
    atomic[u64] learned         # rows that correct() took
    atomic[u64] failed          # rows on which it raised, or that waited too long for it
    atomic[u64] accuracy        # 1 + billionths; 0: the model says none

cdef Status accuracy_read(const u8* payload, u64 n, Progress* progress) noexcept nogil
# ^ BAD_FRAME: an accuracy that is no number from 0 to 1
