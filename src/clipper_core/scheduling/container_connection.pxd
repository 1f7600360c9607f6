# The connection of one container, as bytes: received bytes that are not parsed yet, and bytes to be
# sent. It has no socket: the IO loop gets a buffer, reports how many bytes it has received, and
# takes the bytes to be sent.
#
# Received frames are not copied: they are read where they were received, 64-byte aligned.
#
# Threads: loop only.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport iovec, u32, u64, u8
from clipper_core.runtime.status cimport Status
from clipper_core.wire.codec cimport Header, Limits

cdef enum:
    LATER_MAX = 64              # frames of connection_send_later that may wait

cdef struct Passing:            # a borrowed descriptor, sent with the byte at position `at`
    u64 at
    int fd

cdef struct ContainerConnection:
    Limits limits
    u8* rx                      # received bytes [rx_at, rx_len)
    u64 rx_at, rx_len, rx_cap
    vector[void*]* spare        # shared buffers of idle connections, all of the initial size; NULL:
                                # none are kept
    u64 rx_frame                # bytes of the frame that connection_next_frame returned; dropped
                                # by the next call
    vector[iovec]* tx           # to be sent [tx_at, size)
    u64 tx_at
    vector[void*]* owned        # for each part of tx: the block to free once it is sent, or NULL
    vector[Passing]* passing    # descriptors that are not sent yet, in order
    vector[iovec]* later        # whole frames, owned, sent when nothing else is to be sent; oldest
                                # first
    bint passes                 # the IO loop can pass descriptors
    bint queued                 # is on the engine's list of writers
    bint closing                # close after the last byte of tx
    bint checked                # payloads have a CRC too
    bint remote                 # may lead to another host (set by the IO loop)
    u8 search                   # LZ4 search of strings (lz4.pxd); LITERALS: not compressed
    u8 protocol                 # 0 before HELLO, then 1 or 2
    int fd                      # of the IO loop; -1: none
    bint waits_out              # of the IO loop: EPOLLOUT is requested
    u64 opened_us, received_us, sent_us
    u64 bytes_in, bytes_out, bytes_queued   # bytes_queued: sent or still to be sent

cdef ContainerConnection* connection_new(const Limits* limits, u64 now_us) noexcept nogil
cdef void connection_free(ContainerConnection* connection) noexcept nogil
# Release the receive buffer if it is empty, because the connection may be idle for long.
cdef void connection_rest(ContainerConnection* connection) noexcept nogil
cdef void spare_free(vector[void*]* spare) noexcept nogil

# Set *at to where received bytes go, and return how many fit. 0: no memory.
cdef u64 connection_reserve(ContainerConnection* connection, u8** at) noexcept nogil
cdef void connection_received(ContainerConnection* connection, u64 n, u64 now_us) noexcept nogil
# OK: *payload is a frame's, valid until the next call. PENDING: the frame is incomplete. BAD_FRAME,
# TOO_LARGE, NO_MEMORY: the connection must be closed.
cdef Status connection_next_frame(ContainerConnection* connection, Header* header,
                                  u8** payload) noexcept nogil
# Protocol 1: return the next nbytes of a reply. NULL: not all of them have arrived.
cdef u8* connection_next_bare(ContainerConnection* connection, u64 nbytes) noexcept nogil

# Queue bytes, borrowed until they are sent.
cdef void connection_send(ContainerConnection* connection, const void* bytes, u64 n) noexcept nogil
# Queue bytes and free them once they are sent.
cdef void connection_send_owned(ContainerConnection* connection, void* bytes, u64 n) noexcept nogil
# Queue a frame; the payload is copied.
cdef Status connection_send_frame(ContainerConnection* connection, int kind, const void* payload,
                                  u64 n, u64 now_us) noexcept nogil
# The same with an id.
cdef Status connection_send_with_id(ContainerConnection* connection, int kind, u64 id,
                                    const void* payload, u64 n, u64 now_us) noexcept nogil
# Queue a frame (copied) that never precedes anything else to be sent. False: LATER_MAX of them
# wait, or there is no memory.
cdef bint connection_send_later(ContainerConnection* connection, int kind, const void* payload,
                                u64 n, u64 now_us) noexcept nogil
cdef Status connection_send_region(ContainerConnection* connection, u32 region, u64 rows,
                                   u64 row_bytes, int fd, u64 now_us) noexcept nogil
# Return how many parts of tx one system call may send. *fd: the descriptor that goes with the first
# of them, or -1.
cdef u64 connection_iovecs(const ContainerConnection* connection, int* fd) noexcept nogil
cdef bint connection_has_unsent(const ContainerConnection* connection) noexcept nogil
cdef void connection_sent(ContainerConnection* connection, u64 n, u64 now_us) noexcept nogil
