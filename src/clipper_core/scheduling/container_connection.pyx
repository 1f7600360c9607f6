"""The received and unsent bytes of one connection, without a socket."""
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove

from clipper_core.runtime.allocation cimport make, make_room
from clipper_core.runtime.machine cimport aligned_new
from clipper_core.runtime.status cimport BAD_FRAME, NO_MEMORY, OK, PENDING
from clipper_core.wire.codec cimport (
    CHECKED, HEADER_BYTES, REGION, REGION_BYTES, crc32, header_decode, header_encode,
)

ctypedef void* Pointer

cdef extern from "<sys/socket.h>" nogil:
    int SHUT_RDWR
    int shutdown(int fd, int how) noexcept

cdef enum:
    RX_START = 16384
    RX_ROOM_MIN = 8192
    SPARE_MAX = 256             # buffers in the pool
    SENT_MAX = 4096             # parts that were sent and are not removed yet


cdef ContainerConnection* connection_new(const Limits* limits, u64 now_us) noexcept nogil:
    cdef ContainerConnection* connection
    connection = <ContainerConnection*> aligned_new(sizeof(ContainerConnection))
    if connection == NULL:
        return NULL
    connection.limits = limits[0]
    connection.tx = make[vector[iovec]]()
    connection.owned = make[vector[Pointer]]()
    connection.passing = make[vector[Passing]]()
    connection.later = make[vector[iovec]]()
    if (connection.tx == NULL or connection.owned == NULL or connection.passing == NULL
        or connection.later == NULL):
        connection_free(connection)
        return NULL
    connection.fd = -1
    connection.opened_us = connection.received_us = connection.sent_us = now_us
    return connection


cdef void _free_owned(ContainerConnection* connection) noexcept nogil:
    cdef size_t i
    if connection.owned == NULL or connection.later == NULL:
        return
    for i in range(connection.owned.size()):
        free(connection.owned[0][i])
    for i in range(connection.later.size()):
        free(connection.later[0][i].iov_base)
    connection.owned.clear()


cdef void connection_free(ContainerConnection* connection) noexcept nogil:
    if connection == NULL:
        return
    _free_owned(connection)
    del connection.tx
    del connection.owned
    del connection.passing
    del connection.later
    free(connection.rx)
    free(connection)


cdef void connection_rest(ContainerConnection* connection) noexcept nogil:
    """Give the buffer of an idle connection to the pool. Thousands of connections are idle, and few
    are active, so buffers are reused. If they were freed, smaller allocations for other connections
    would be put into their place, and the heap would grow by a buffer for nearly every
    connection."""
    if connection.rx_len == connection.rx_at + connection.rx_frame:
        if (connection.rx_cap == RX_START and connection.spare != NULL
                and connection.spare.size() < SPARE_MAX
                and make_room(connection.spare[0], connection.spare.size() + 1)):
            connection.spare.push_back(connection.rx)
        else:
            free(connection.rx)
        connection.rx = NULL
        connection.rx_at = connection.rx_len = connection.rx_cap = connection.rx_frame = 0


cdef void spare_free(vector[void*]* spare) noexcept nogil:
    cdef size_t i
    for i in range(spare.size() if spare != NULL else 0):
        free(spare[0][i])
    del spare


# -- in
# --------------------------------------------------------------------------------------------------

cdef bint _reserve(ContainerConnection* connection, u64 nbytes) noexcept nogil:
    """Move the unread bytes to the start of a buffer of at least nbytes."""
    cdef u64 held = connection.rx_len - connection.rx_at
    cdef u8* bigger
    if (connection.rx == NULL and nbytes <= RX_START and connection.spare != NULL
        and not connection.spare.empty()):
        connection.rx = <u8*> connection.spare.back()
        connection.spare.pop_back()
        connection.rx_cap = RX_START
    if nbytes <= connection.rx_cap:
        if connection.rx_at:
            memmove(connection.rx, connection.rx + connection.rx_at, held)
    else:
        nbytes = max(nbytes, 2 * connection.rx_cap, <u64> RX_START)
        bigger = <u8*> aligned_new(nbytes)
        if bigger == NULL:
            return False
        if held:
            memcpy(bigger, connection.rx + connection.rx_at, held)
        free(connection.rx)
        connection.rx = bigger
        connection.rx_cap = nbytes
    connection.rx_at = 0
    connection.rx_len = held
    return True


cdef void _drop_frame(ContainerConnection* connection) noexcept nogil:
    connection.rx_at += connection.rx_frame
    connection.rx_frame = 0
    if connection.rx_at == connection.rx_len:
        connection.rx_at = connection.rx_len = 0


cdef u64 connection_reserve(ContainerConnection* connection, u8** at) noexcept nogil:
    _drop_frame(connection)
    if connection.rx_cap - connection.rx_len < RX_ROOM_MIN and not _reserve(connection,
            connection.rx_len - connection.rx_at + RX_ROOM_MIN):
        return 0
    at[0] = connection.rx + connection.rx_len
    return connection.rx_cap - connection.rx_len


cdef void connection_received(ContainerConnection* connection, u64 n, u64 now_us) noexcept nogil:
    connection.rx_len += n
    connection.bytes_in += n
    connection.received_us = now_us


cdef Status connection_next_frame(ContainerConnection* connection, Header* header,
                                  u8** payload) noexcept nogil:
    cdef Status status
    cdef u64 total
    _drop_frame(connection)
    if connection.rx_len - connection.rx_at < HEADER_BYTES:
        return PENDING
    status = header_decode(connection.rx + connection.rx_at, connection.rx_len - connection.rx_at,
                           &connection.limits, header)
    if status != OK:
        return status
    total = HEADER_BYTES + header.payload_bytes
    if connection.rx_len - connection.rx_at < total:
        if connection.rx_cap - connection.rx_at < total and not _reserve(connection, total):
            return NO_MEMORY
        return PENDING
    if connection.rx_at & 7 and not _reserve(connection, total):
        return NO_MEMORY
    payload[0] = connection.rx + connection.rx_at + HEADER_BYTES
    if header.flags & CHECKED and crc32(0, payload[0], header.payload_bytes) != header.payload_crc:
        return BAD_FRAME
    connection.rx_frame = total
    return OK


cdef u8* connection_next_bare(ContainerConnection* connection, u64 nbytes) noexcept nogil:
    _drop_frame(connection)
    if connection.rx_len - connection.rx_at < nbytes:
        if connection.rx_cap - connection.rx_at < nbytes:
            _reserve(connection, nbytes)
        return NULL
    if connection.rx_at & 7:
        _reserve(connection, nbytes)
    connection.rx_frame = nbytes
    return connection.rx + connection.rx_at


# -- out
# --------------------------------------------------------------------------------------------------

cdef bint _has_room(ContainerConnection* connection) noexcept nogil:
    """Make room for one more part. Return False when there is no memory. Then the connection is
    shut down, because part of a frame is missing; the loop handles this as the end of the
    container."""
    if make_room(connection.tx[0], connection.tx.size() + 1) and make_room(connection.owned[0],
            connection.tx.size() + 1):
        return True
    shutdown(connection.fd, SHUT_RDWR)
    return False


cdef void connection_send(ContainerConnection* connection, const void* bytes, u64 n) noexcept nogil:
    cdef iovec part
    if n == 0:
        return
    connection.bytes_queued += n
    if (connection.tx.size() > connection.tx_at and connection.owned.back() == NULL
            and <u8*> connection.tx.back().iov_base + connection.tx.back().iov_len == <u8*> bytes):
        part = connection.tx.back()
        part.iov_len += n
        connection.tx[0][connection.tx.size() - 1] = part
        return
    part.iov_base = <void*> bytes
    part.iov_len = n
    if _has_room(connection):
        connection.tx.push_back(part)
        connection.owned.push_back(NULL)


cdef void connection_send_owned(ContainerConnection* connection, void* bytes, u64 n) noexcept nogil:
    cdef iovec part
    part.iov_base = bytes
    part.iov_len = n
    if not _has_room(connection):
        free(bytes)
        return
    connection.tx.push_back(part)
    connection.owned.push_back(bytes)
    connection.bytes_queued += n


cdef u8* _frame(ContainerConnection* connection, int kind, u64 id, const void* payload,
                u64 n) noexcept nogil:
    cdef Header header
    cdef u8* bytes = <u8*> malloc(HEADER_BYTES + n)
    if bytes == NULL:
        return NULL
    _clear(&header)
    header.kind = <u8> kind
    header.id = id
    header.payload_bytes = n
    if connection.checked and n:
        header.flags = CHECKED
        header.payload_crc = crc32(0, <const u8*> payload, n)
    header_encode(&header, bytes)
    if n:
        memcpy(bytes + HEADER_BYTES, payload, n)
    return bytes


cdef Status connection_send_frame(ContainerConnection* connection, int kind, const void* payload,
                                  u64 n, u64 now_us) noexcept nogil:
    return connection_send_with_id(connection, kind, 0, payload, n, now_us)


cdef Status connection_send_with_id(ContainerConnection* connection, int kind, u64 id,
                                    const void* payload, u64 n, u64 now_us) noexcept nogil:
    cdef u8* bytes = _frame(connection, kind, id, payload, n)
    if bytes == NULL:
        return NO_MEMORY
    connection_send_owned(connection, bytes, HEADER_BYTES + n)
    connection.sent_us = now_us
    return OK


cdef bint connection_send_later(ContainerConnection* connection, int kind, const void* payload,
                                u64 n, u64 now_us) noexcept nogil:
    cdef iovec part
    if (connection.later.size() >= LATER_MAX or connection.closing
            or not make_room(connection.later[0], connection.later.size() + 1)):
        return False
    if connection.later.empty() and not connection_has_unsent(connection):
        return connection_send_frame(connection, kind, payload, n, now_us) == OK
    part.iov_base = _frame(connection, kind, 0, payload, n)
    part.iov_len = HEADER_BYTES + n
    if part.iov_base != NULL:
        connection.later.push_back(part)
    return part.iov_base != NULL


cdef Status connection_send_region(ContainerConnection* connection, u32 region, u64 rows,
                                   u64 row_bytes, int fd,
                             u64 now_us) noexcept nogil:
    cdef u64[3] payload
    cdef Passing passing
    cdef Status status
    passing.at = connection.bytes_queued
    passing.fd = fd
    payload[0] = region
    payload[1] = rows
    payload[2] = row_bytes
    if not make_room(connection.passing[0], connection.passing.size() + 1):
        return NO_MEMORY
    status = connection_send_frame(connection, REGION, payload, REGION_BYTES, now_us)
    if status == OK:
        connection.passing.push_back(passing)
    return status


cdef u64 connection_iovecs(const ContainerConnection* connection, int* fd) noexcept nogil:
    cdef u64 n = connection.tx.size() - connection.tx_at
    cdef u64 at = connection.bytes_out, until = ~<u64> 0
    cdef size_t i
    fd[0] = -1
    for i in range(min(connection.passing.size(), <size_t> 2)):
        if connection.passing[0][i].at == at:
            fd[0] = connection.passing[0][i].fd
        else:
            until = min(until, connection.passing[0][i].at)
    for i in range(n if until != ~<u64> 0 else 0):
        if at == until:                 # a descriptor is sent with the first byte of a call, so
                                        # that its frame is clear
            return i
        at += connection.tx[0][connection.tx_at + i].iov_len
    return n


cdef void _clear(Header* header) noexcept nogil:
    header.kind = header.dtype = header.rank = 0
    header.flags = 0
    header.id = header.payload_bytes = header.time_us = 0
    header.rows = header.payload_crc = 0
    header.dims[0] = header.dims[1] = header.dims[2] = header.dims[3] = 0


cdef bint connection_has_unsent(const ContainerConnection* connection) noexcept nogil:
    return connection.tx_at < connection.tx.size()


cdef void connection_sent(ContainerConnection* connection, u64 n, u64 now_us) noexcept nogil:
    cdef iovec part
    connection.bytes_out += n
    connection.sent_us = now_us
    while not connection.passing.empty() and connection.passing.front().at < connection.bytes_out:
        connection.passing.erase(connection.passing.begin())
    while n:
        part = connection.tx[0][connection.tx_at]
        if part.iov_len > n:
            part.iov_base = <u8*> part.iov_base + n
            part.iov_len -= n
            connection.tx[0][connection.tx_at] = part
            return
        n -= part.iov_len
        free(connection.owned[0][connection.tx_at])
        connection.owned[0][connection.tx_at] = NULL
        connection.tx_at += 1
    if connection.tx_at == connection.tx.size() or connection.tx_at > SENT_MAX:
        _forget_sent(connection)
    if (not connection_has_unsent(connection) and not connection.later.empty()
        and not connection.closing):
        connection_send_owned(connection, connection.later.front().iov_base,
                              connection.later.front().iov_len)
        connection.later.erase(connection.later.begin())


cdef void _forget_sent(ContainerConnection* connection) noexcept nogil:
    """Remove parts that were sent. A busy connection may never be empty, so they would accumulate.
    """
    connection.tx.erase(connection.tx.begin(), connection.tx.begin() + connection.tx_at)
    connection.owned.erase(connection.owned.begin(), connection.owned.begin() + connection.tx_at)
    connection.tx_at = 0
