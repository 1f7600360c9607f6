# Asking several models at once and answering as soon as a decider says so: the door to ensemble
# calls (ensemble_call.pxd).
#
# Threads: any.
from libcpp.vector cimport vector
from clipper_core.results.decider cimport RulingData
from clipper_core.results.ensemble_call cimport EnsembleCall
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.runtime.row_hash cimport Key

cdef struct Row:                # of one task
    const void* data
    u64 nbytes
    u64 mark                    # of its key
    u32 cost                    # as a function gives it; 0: none does
    Key key

cdef class EnsembleRequest:
    cdef tuple models
    cdef EnsembleCall* ensemble_call
    cdef vector[Row] rows
    cdef list kept                  # what the rows point into
    cdef u64 salt, slo_us, now_us

    cdef u64 read(self, object x) except? 0
    cdef int set_votes(self, object weights, object starts_us) except -1
    cdef int set_deferred(self, u32 i, u8* to) except -1
    cdef int look_up(self, u64 now) except -1
    cdef RulingData use_cache_hits(self) except *
    cdef int answer_at_once(self, const RulingData* ruling, u64 queued) except -1
    cdef int submit(self, u64 queued) except -1
    cdef int submit_one(self, u32 i) except -1
