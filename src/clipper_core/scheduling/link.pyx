"""The bytes of one connection, in and out, without a socket."""
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
    SPARE_MAX = 256             # buffers kept
    SENT_MAX = 4096             # pieces that have left and are not forgotten yet


cdef Link* link_new(const Limits* limits, u64 now_us) noexcept nogil:
    cdef Link* link = <Link*> aligned_new(sizeof(Link))
    if link == NULL:
        return NULL
    link.limits = limits[0]
    link.tx = make[vector[iovec]]()
    link.owned = make[vector[Pointer]]()
    link.passing = make[vector[Passing]]()
    link.later = make[vector[iovec]]()
    if link.tx == NULL or link.owned == NULL or link.passing == NULL or link.later == NULL:
        link_free(link)
        return NULL
    link.fd = -1
    link.opened_us = link.heard_us = link.spoke_us = now_us
    return link


cdef void _free_owned(Link* link) noexcept nogil:
    cdef size_t i
    if link.owned == NULL or link.later == NULL:
        return
    for i in range(link.owned.size()):
        free(link.owned[0][i])
    for i in range(link.later.size()):
        free(link.later[0][i].iov_base)
    link.owned.clear()


cdef void link_free(Link* link) noexcept nogil:
    if link == NULL:
        return
    _free_owned(link)
    del link.tx
    del link.owned
    del link.passing
    del link.later
    free(link.rx)
    free(link)


cdef void link_rest(Link* link) noexcept nogil:
    """Thousands of links rest, and few are at work: the buffers of these few are handed around.
    Were they freed, what is allocated for other links would be put into the holes, and the heap
    would grow by a buffer for nearly every link."""
    if link.rx_len == link.rx_at + link.rx_frame:
        if link.rx_cap == RX_START and link.spare != NULL and link.spare.size() < SPARE_MAX and make_room(
                link.spare[0], link.spare.size() + 1):
            link.spare.push_back(link.rx)
        else:
            free(link.rx)
        link.rx = NULL
        link.rx_at = link.rx_len = link.rx_cap = link.rx_frame = 0


cdef void spare_free(vector[void*]* spare) noexcept nogil:
    cdef size_t i
    for i in range(spare.size() if spare != NULL else 0):
        free(spare[0][i])
    del spare


# -- in
# --------------------------------------------------------------------------------------------------

cdef bint _reserve(Link* link, u64 nbytes) noexcept nogil:
    """The unread bytes at the start of a buffer of at least nbytes."""
    cdef u64 held = link.rx_len - link.rx_at
    cdef u8* bigger
    if link.rx == NULL and nbytes <= RX_START and link.spare != NULL and not link.spare.empty():
        link.rx = <u8*> link.spare.back()
        link.spare.pop_back()
        link.rx_cap = RX_START
    if nbytes <= link.rx_cap:
        if link.rx_at:
            memmove(link.rx, link.rx + link.rx_at, held)
    else:
        nbytes = max(nbytes, 2 * link.rx_cap, <u64> RX_START)
        bigger = <u8*> aligned_new(nbytes)
        if bigger == NULL:
            return False
        if held:
            memcpy(bigger, link.rx + link.rx_at, held)
        free(link.rx)
        link.rx = bigger
        link.rx_cap = nbytes
    link.rx_at = 0
    link.rx_len = held
    return True


cdef void _drop_frame(Link* link) noexcept nogil:
    link.rx_at += link.rx_frame
    link.rx_frame = 0
    if link.rx_at == link.rx_len:
        link.rx_at = link.rx_len = 0


cdef u64 link_room(Link* link, u8** at) noexcept nogil:
    _drop_frame(link)
    if link.rx_cap - link.rx_len < RX_ROOM_MIN and not _reserve(link, link.rx_len - link.rx_at + RX_ROOM_MIN):
        return 0
    at[0] = link.rx + link.rx_len
    return link.rx_cap - link.rx_len


cdef void link_received(Link* link, u64 n, u64 now_us) noexcept nogil:
    link.rx_len += n
    link.bytes_in += n
    link.heard_us = now_us


cdef Status link_next(Link* link, Header* header, u8** payload) noexcept nogil:
    cdef Status status
    cdef u64 total
    _drop_frame(link)
    if link.rx_len - link.rx_at < HEADER_BYTES:
        return PENDING
    status = header_decode(link.rx + link.rx_at, link.rx_len - link.rx_at, &link.limits, header)
    if status != OK:
        return status
    total = HEADER_BYTES + header.payload_bytes
    if link.rx_len - link.rx_at < total:
        if link.rx_cap - link.rx_at < total and not _reserve(link, total):
            return NO_MEMORY
        return PENDING
    if link.rx_at & 7 and not _reserve(link, total):
        return NO_MEMORY
    payload[0] = link.rx + link.rx_at + HEADER_BYTES
    if header.flags & CHECKED and crc32(0, payload[0], header.payload_bytes) != header.payload_crc:
        return BAD_FRAME
    link.rx_frame = total
    return OK


cdef u8* link_next_bare(Link* link, u64 nbytes) noexcept nogil:
    _drop_frame(link)
    if link.rx_len - link.rx_at < nbytes:
        if link.rx_cap - link.rx_at < nbytes:
            _reserve(link, nbytes)
        return NULL
    if link.rx_at & 7:
        _reserve(link, nbytes)
    link.rx_frame = nbytes
    return link.rx + link.rx_at


# -- out
# --------------------------------------------------------------------------------------------------

cdef bint _has_room(Link* link) noexcept nogil:
    """Room for one more piece. False: there is no memory. Then the connection is shut down, since
    part of a frame is missing: the loop finds it closed, as if the container had gone."""
    if make_room(link.tx[0], link.tx.size() + 1) and make_room(link.owned[0], link.tx.size() + 1):
        return True
    shutdown(link.fd, SHUT_RDWR)
    return False


cdef void link_send(Link* link, const void* bytes, u64 n) noexcept nogil:
    cdef iovec piece
    if n == 0:
        return
    link.bytes_queued += n
    if (link.tx.size() > link.tx_at and link.owned.back() == NULL
            and <u8*> link.tx.back().iov_base + link.tx.back().iov_len == <u8*> bytes):
        piece = link.tx.back()
        piece.iov_len += n
        link.tx[0][link.tx.size() - 1] = piece
        return
    piece.iov_base = <void*> bytes
    piece.iov_len = n
    if _has_room(link):
        link.tx.push_back(piece)
        link.owned.push_back(NULL)


cdef void link_send_owned(Link* link, void* bytes, u64 n) noexcept nogil:
    cdef iovec piece
    piece.iov_base = bytes
    piece.iov_len = n
    if not _has_room(link):
        free(bytes)
        return
    link.tx.push_back(piece)
    link.owned.push_back(bytes)
    link.bytes_queued += n


cdef u8* _frame(Link* link, int kind, const void* payload, u64 n) noexcept nogil:
    cdef Header header
    cdef u8* bytes = <u8*> malloc(HEADER_BYTES + n)
    if bytes == NULL:
        return NULL
    _clear(&header)
    header.kind = <u8> kind
    header.payload_bytes = n
    if link.checked and n:
        header.flags = CHECKED
        header.payload_crc = crc32(0, <const u8*> payload, n)
    header_encode(&header, bytes)
    if n:
        memcpy(bytes + HEADER_BYTES, payload, n)
    return bytes


cdef Status link_send_frame(Link* link, int kind, const void* payload, u64 n,
                            u64 now_us) noexcept nogil:
    cdef u8* bytes = _frame(link, kind, payload, n)
    if bytes == NULL:
        return NO_MEMORY
    link_send_owned(link, bytes, HEADER_BYTES + n)
    link.spoke_us = now_us
    return OK


cdef bint link_send_later(Link* link, int kind, const void* payload, u64 n,
                          u64 now_us) noexcept nogil:
    cdef iovec piece
    if link.later.size() >= LATER_MAX or link.closing or not make_room(link.later[0],
                                                                       link.later.size() + 1):
        return False
    if link.later.empty() and not link_unsent(link):
        return link_send_frame(link, kind, payload, n, now_us) == OK
    piece.iov_base = _frame(link, kind, payload, n)
    piece.iov_len = HEADER_BYTES + n
    if piece.iov_base != NULL:
        link.later.push_back(piece)
    return piece.iov_base != NULL


cdef Status link_send_region(Link* link, u32 region, u64 rows, u64 row_bytes, int fd,
                             u64 now_us) noexcept nogil:
    cdef u64[3] payload
    cdef Passing passing
    cdef Status status
    passing.at = link.bytes_queued
    passing.fd = fd
    payload[0] = region
    payload[1] = rows
    payload[2] = row_bytes
    if not make_room(link.passing[0], link.passing.size() + 1):
        return NO_MEMORY
    status = link_send_frame(link, REGION, payload, REGION_BYTES, now_us)
    if status == OK:
        link.passing.push_back(passing)
    return status


cdef u64 link_pieces(const Link* link, int* fd) noexcept nogil:
    cdef u64 n = link.tx.size() - link.tx_at, at = link.bytes_out, until = ~<u64> 0
    cdef size_t i
    fd[0] = -1
    for i in range(min(link.passing.size(), <size_t> 2)):
        if link.passing[0][i].at == at:
            fd[0] = link.passing[0][i].fd
        else:
            until = min(until, link.passing[0][i].at)
    for i in range(n if until != ~<u64> 0 else 0):
        if at == until:                 # a descriptor begins a call: so it is clear which frame it
                                        # belongs to
            return i
        at += link.tx[0][link.tx_at + i].iov_len
    return n


cdef void _clear(Header* header) noexcept nogil:
    header.kind = header.dtype = header.rank = 0
    header.flags = 0
    header.id = header.payload_bytes = header.time_us = 0
    header.rows = header.payload_crc = 0
    header.dims[0] = header.dims[1] = header.dims[2] = header.dims[3] = 0


cdef bint link_unsent(const Link* link) noexcept nogil:
    return link.tx_at < link.tx.size()


cdef void link_sent(Link* link, u64 n, u64 now_us) noexcept nogil:
    cdef iovec piece
    link.bytes_out += n
    link.spoke_us = now_us
    while not link.passing.empty() and link.passing.front().at < link.bytes_out:
        link.passing.erase(link.passing.begin())
    while n:
        piece = link.tx[0][link.tx_at]
        if piece.iov_len > n:
            piece.iov_base = <u8*> piece.iov_base + n
            piece.iov_len -= n
            link.tx[0][link.tx_at] = piece
            return
        n -= piece.iov_len
        free(link.owned[0][link.tx_at])
        link.owned[0][link.tx_at] = NULL
        link.tx_at += 1
    if link.tx_at == link.tx.size() or link.tx_at > SENT_MAX:
        _forget_sent(link)
    if not link_unsent(link) and not link.later.empty() and not link.closing:
        link_send_owned(link, link.later.front().iov_base, link.later.front().iov_len)
        link.later.erase(link.later.begin())


cdef void _forget_sent(Link* link) noexcept nogil:
    """A busy link may never run dry: what has left must not pile up."""
    link.tx.erase(link.tx.begin(), link.tx.begin() + link.tx_at)
    link.owned.erase(link.owned.begin(), link.owned.begin() + link.tx_at)
    link.tx_at = 0
