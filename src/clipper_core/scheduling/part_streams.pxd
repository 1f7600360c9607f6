# The queries of an engine that are answered in parts: which container makes them, how many parts it
# may send, and when they end. They go beside the batches: each has a frame of its own, begins as
# soon as a container has room, and ends when its model has given its last part, when a part is not
# there in time, or when its reader cancels it.
#
# A container may send `ahead` parts more than were read. So a reader that does not read stops its
# own query, and no other.
#
# Threads: loop only; part_stream_submit: any, with the model kept alive.
from libcpp.vector cimport vector
from clipper_core.results.completion cimport CompletionState
from clipper_core.results.part_stream cimport PartStream, PartStreamInbox
from clipper_core.runtime.machine cimport atomic, relaxed, u32, u64, u8
from clipper_core.runtime.status cimport Status
from clipper_core.scheduling.replica cimport Replica, RowSpec
from clipper_core.wire.codec cimport Header

cdef enum:
    STREAMS_MAX = 65535         # of an engine, with those that wait for a container
    STREAM_TRIES_MAX = 2        # containers that one is sent to, if they die before its first part

ctypedef PartStream* PartStreamPointer

cdef cppclass PartStreams:
    PartStreamInbox inbox
    vector[PartStream*]* all    # by the low 16 bits of their ids; NULL: free
    vector[u32]* free
    vector[PartStream*]* line   # those that have no container, the oldest first
    vector[u32]* touched        # connections with something to send, for the scheduler
    u32 count
    bint look                   # a container may have room for one that waits
    u64 next_serial
    u64 due_us                  # before it none is overdue
    u64 ahead                   # parts
    u64 bytes_max               # of all parts of one answer
    u32 per_replica             # sequences that a container makes at a time

cdef PartStreams* part_streams_new(u64 ahead, u64 bytes_max, u32 per_replica) noexcept nogil
# Free it; those that are left end as CLOSED.
cdef void part_streams_free(PartStreams* p) noexcept nogil
cdef inline bint part_streams_have_news(const PartStreams* p, u64 now_us) noexcept nogil:
    return p.look or p.inbox.newest.load(relaxed) != 0 or now_us >= p.due_us
# Take new ones in, send them to containers, allow further parts, and end those that are overdue.
# The scheduler then sends what is due on the connections `touched`.
cdef void part_streams_step(PartStreams* p, u64 now_us) noexcept nogil
# Take in a PART of a container. Return BAD_FRAME if the connection must be closed.
cdef Status part_streams_frame(PartStreams* p, Replica* r, const RowSpec* spec,
                               const Header* header, const u8* payload,
                               u64 now_us) noexcept nogil
# Handle the end of a connection.
cdef void part_streams_lost(PartStreams* p, u32 conn, Status status, u64 now_us) noexcept nogil
# End all of them. The loop has ended.
cdef void part_streams_close(PartStreams* p, Status status, u64 now_us) noexcept nogil
