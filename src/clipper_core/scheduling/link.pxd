# One container's connection, as bytes: what has been received and not yet understood, what is to be
# sent and has not left. No socket in here: whoever moves bytes asks for room, says how much came,
# and takes what is to go.
#
# Threads: loop only. Frames are never copied on the way in: they are opened where they were
# received, 64-byte aligned.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport iovec, u8, u32, u64
from clipper_core.runtime.status cimport Status
from clipper_core.wire.codec cimport Header, Limits

cdef enum:
    LATER_MAX = 64              # frames that wait until nothing else is to be sent

cdef struct Passing:            # a descriptor that travels with the byte at this position of all
                                # that is sent; borrowed
    u64 at
    int fd

cdef struct Link:
    Limits limits
    u8* rx                      # received bytes [rx_at, rx_len)
    u64 rx_at, rx_len, rx_cap
    vector[void*]* spare        # buffers of others that rest, of the size all begin with; NULL:
                                # none are kept
    u64 rx_frame                # bytes of the frame that link_next handed out; dropped at the next
                                # call
    vector[iovec]* tx           # to be sent [tx_at, size)
    u64 tx_at
    vector[void*]* owned        # beside tx: the block to free once that piece has left, or NULL
    vector[Passing]* passing    # in order; those that have not left
    vector[iovec]* later        # whole frames, owned, that leave when nothing else is to; oldest
                                # first
    bint passes                 # the mover can hand over descriptors
    bint queued                 # its conn is already in the engine's list of writers
    bint closing                # close it once tx has left
    bint checked                # CRC over payloads too
    bint remote                 # the mover's: it may lead to another host
    u8 search                   # of its strings, for LZ4 (lz4.pxd); LITERALS: they travel as they
                                # are
    u8 protocol                 # 0 before HELLO, then 1 or 2
    int fd                      # the mover's; -1 without one
    bint waits_out              # the mover's: EPOLLOUT is asked for
    u64 opened_us, heard_us, spoke_us
    u64 bytes_in, bytes_out, bytes_queued        # bytes_queued: left or still to leave

cdef Link* link_new(const Limits* limits, u64 now_us) noexcept nogil
cdef void link_free(Link* link) noexcept nogil
cdef void link_rest(Link* link) noexcept nogil     # nothing may come for long: keep no buffer, if
                                                   # nothing is in it
cdef void spare_free(vector[void*]* spare) noexcept nogil

# where received bytes go, and how many fit; 0: no memory
cdef u64 link_room(Link* link, u8** at) noexcept nogil
cdef void link_received(Link* link, u64 n, u64 now_us) noexcept nogil
cdef Status link_next(Link* link, Header* header, u8** payload) noexcept nogil
# ^ OK: a frame, valid until the next call; PENDING: not all there; BAD_FRAME, TOO_LARGE, NO_MEMORY:
# the link is of no more use
# protocol 1: nbytes of reply, or NULL while not all there
cdef u8* link_next_bare(Link* link, u64 nbytes) noexcept nogil

# borrowed until sent
cdef void link_send(Link* link, const void* bytes, u64 n) noexcept nogil
cdef void link_send_owned(Link* link, void* bytes, u64 n) noexcept nogil           # freed once sent
# copied
cdef Status link_send_frame(Link* link, int kind, const void* payload, u64 n,
                            u64 now_us) noexcept nogil
cdef bint link_send_later(Link* link, int kind, const void* payload, u64 n,
                          u64 now_us) noexcept nogil
# ^ copied; it never stands before anything else that is to be sent. False: LATER_MAX of them wait,
# or memory is out
cdef Status link_send_region(Link* link, u32 region, u64 rows, u64 row_bytes, int fd,
                             u64 now_us) noexcept nogil
cdef u64 link_pieces(const Link* link, int* fd) noexcept nogil
# ^ how many pieces of tx may leave in one call, and the descriptor that goes with the first of
# them, or -1
cdef bint link_unsent(const Link* link) noexcept nogil
cdef void link_sent(Link* link, u64 n, u64 now_us) noexcept nogil
