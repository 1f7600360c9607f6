"""LZ4 blocks (the format: Yann Collet, lz4_Block_format.md), written in one pass and read with
every length checked.

How hard the writer searches is its caller's choice, because it depends on the road. Searching every
position (THOROUGH) made words 2.4 times smaller in forty times the time of gathering them, so on
one host strings are not searched at all. Between hosts QUICK starts with leaps of 8 and widens them
while nothing is found, as LZ4's own `acceleration` does: text that does not compress costs little
more than a copy.

The search is LZ4's: a table of 4096 positions by the hash of the five bytes there, one candidate
each, no chains. It lives on the stack, so a block costs no allocation; it begins as zeros, which
mean position 0, where the search never stands. A position more than 64 KiB back is out of a match's
reach and counts as not found.

The writer checks no room, for it needs none beyond lz4_bound(n): a match of m >= 4 bytes is written
in 3 bytes, and one more for every 255 of it, and so pays for the first extra byte that its
literals' length may take; what longer literals take, one byte in 255, is in the bound.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memcpy, memset

from clipper_core.runtime.status cimport BAD_FRAME, BAD_INPUT, OK, TOO_LARGE, raise_for

cdef extern from *:
    """
    static inline unsigned clipper_zeros_below(unsigned long long x) {
            return (unsigned) __builtin_ctzll(x); }
    static inline unsigned long long clipper_u64_at(const unsigned char* p) {
        unsigned long long x; __builtin_memcpy(&x, p, 8); return x;
    }
    """
    u32 zeros_below "clipper_zeros_below"(u64 x) noexcept nogil
    u64 u64_at "clipper_u64_at"(const u8* bytes) noexcept nogil

cdef enum:
    MATCH_MIN = 4
    DISTANCE_MAX = 65535
    LITERALS_LAST = 5                 # a block's last bytes are literals,
    SEARCH_LAST = 12                  # and no match begins among these
    TABLE_BITS = 12
    SEARCH_MAX = 65536
    WIDEN_BITS = 6                    # the leap widens by one after 64 misses

cdef u64 PRIME = 889523592379         # LZ4's, for five bytes


# -- out
# --------------------------------------------------------------------------------------------------

cdef u64 lz4_bound(u64 n) noexcept nogil:
    return 1 + n + ((n - 15) // 255 + 1 if n >= 15 else 0)


cdef u8* _more(u64 n, u8* out) noexcept nogil:
    """The rest of a length of which 15 are in the token."""
    memset(out, 255, n // 255)
    out += n // 255
    out[0] = <u8> (n % 255)
    return out + 1


cdef u8* lz4_literals(u64 n, u8* out) noexcept nogil:
    if n < 15:
        out[0] = <u8> (n << 4)
        return out + 1
    out[0] = 0xF0
    return _more(n - 15, out + 1)


cdef u8* _copy(u8* out, const void* bytes, u64 n) noexcept nogil:
    if n:
        memcpy(out, bytes, n)
    return out + n


cdef u8* _sequence(u8* out, const u8* literals, u64 n, u64 distance, u64 match) noexcept nogil:
    """Write n literals, then a match of `match` bytes."""
    cdef u8* token = out
    out = _copy(lz4_literals(n, out), literals, n)
    out[0] = <u8> distance
    out[1] = <u8> (distance >> 8)
    match -= MATCH_MIN
    if match < 15:
        token[0] |= <u8> match
        return out + 2
    token[0] |= 15
    return _more(match - 15, out + 2)


cdef inline u32 _hash(const u8* at) noexcept nogil:
    return <u32> (((u64_at(at) << 24) * PRIME) >> (64 - TABLE_BITS))


cdef inline bint _is_match(const u8* match, const u8* at) noexcept nogil:
    return at - match <= DISTANCE_MAX and <u32> u64_at(match) == <u32> u64_at(at)


cdef u64 _equal_bytes(const u8* match, const u8* at, const u8* end) noexcept nogil:
    cdef const u8* start = at
    cdef u64 differ
    while at + 8 <= end:
        differ = u64_at(match) ^ u64_at(at)
        if differ:
            return at - start + (zeros_below(differ) >> 3)
        at += 8
        match += 8
    while at < end and match[0] == at[0]:
        at += 1
        match += 1
    return at - start


cdef u64 lz4_encode(const u8* data, u64 n, u32 search, u8* out) noexcept nogil:
    cdef u32[1 << TABLE_BITS] table
    cdef const u8* literals = data
    cdef const u8* at = data + 1
    cdef const u8* match = data
    cdef const u8* end = data + n
    cdef u8* start = out
    cdef u32 slot, tries = search << WIDEN_BITS
    cdef u64 length
    if search != LITERALS and n > SEARCH_LAST:
        memset(table, 0, sizeof(table))
        while at <= end - SEARCH_LAST:
            slot = _hash(at)
            match = data + table[slot]
            table[slot] = <u32> (at - data)
            if not _is_match(match, at):
                at += tries >> WIDEN_BITS
                tries += 1
                continue
            while at > literals and match > data and (at - 1)[0] == (match - 1)[0]:
                at -= 1
                match -= 1
            length = MATCH_MIN + _equal_bytes(match + MATCH_MIN, at + MATCH_MIN,
                                              end - LITERALS_LAST)
            out = _sequence(out, literals, at - literals, at - match, length)
            at += length
            literals = at
            tries = search << WIDEN_BITS
            if at <= end - SEARCH_LAST:         # else the search is over, and eight bytes there may
                                                # reach beyond the end
                table[_hash(at - 2)] = <u32> (at - 2 - data)
    return _copy(lz4_literals(end - literals, out), literals, end - literals) - start


# -- in
# --------------------------------------------------------------------------------------------------

cdef bint _lz4_length(Cursor* block, u64* length) noexcept nogil:
    """Adds the bytes that continue a length of 15. A block of n bytes cannot encode more than 255
    n, so there is no overflow."""
    cdef u8 more
    while True:
        if block.left == 0:
            return False
        more = block.at[0]
        block.at += 1
        block.left -= 1
        length[0] += more
        if more != 255:
            return True


cdef void _lz4_repeat(u8* out, u64 distance, u64 n) noexcept nogil:
    """Write n bytes that repeat those `distance` before. The source stays, so what may be copied at
    once doubles."""
    cdef const u8* source = out - distance
    cdef u64 some
    while n:
        some = min(n, <u64> (out - source))
        memcpy(out, source, some)
        out += some
        n -= some


cdef Status lz4_decode(const u8* block, u64 n, u8* out, u64 out_bytes) noexcept nogil:
    cdef Cursor cursor
    cdef u64 length, distance, token, made = 0
    cursor.at = block
    cursor.left = n
    while cursor.left:
        token = cursor.at[0]
        cursor.at += 1
        cursor.left -= 1
        length = token >> 4
        if length == 15 and not _lz4_length(&cursor, &length):
            return BAD_FRAME
        if length > cursor.left or length > out_bytes - made:
            return BAD_FRAME
        _copy(out + made, cursor.at, length)
        made += length
        cursor.at += length
        cursor.left -= length
        if cursor.left == 0:          # a block ends with literals, and only there is the match
                                      # missing
            return OK if made == out_bytes else BAD_FRAME
        if cursor.left < 2:
            return BAD_FRAME
        distance = cursor.at[0] | <u64> cursor.at[1] << 8
        cursor.at += 2
        cursor.left -= 2
        length = token & 15
        if length == 15 and not _lz4_length(&cursor, &length):
            return BAD_FRAME
        length += MATCH_MIN
        if distance == 0 or distance > made or length > out_bytes - made:
            return BAD_FRAME
        _lz4_repeat(out + made, distance, length)
        made += length
    return BAD_FRAME


# -- the Python interface
# --------------------------------------------------------------------------------------------------

def bound_lz4(u64 n):
    """Return the bytes that a block of n bytes takes at most. Threads: any."""
    return lz4_bound(n)


def encode_lz4(data, u32 search=LITERALS):
    """Return `data` as one LZ4 block. Threads: any.

    search: see Search; LITERALS copies, THOROUGH makes it smallest, larger numbers leap over
    positions and are faster. Raises TOO_LARGE: more than LZ4_BYTES_MAX bytes; BAD_INPUT: a search
    beyond 65536.
    """
    cdef bytes raw = bytes(data)
    cdef u64 n = PyBytes_GET_SIZE(raw), size
    if n > LZ4_BYTES_MAX:
        raise_for(TOO_LARGE, f"an LZ4 block holds at most {LZ4_BYTES_MAX} bytes, not {n}")
    if search > SEARCH_MAX:
        raise_for(BAD_INPUT, f"a search leaps at most {SEARCH_MAX} positions, not {search}")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> lz4_bound(n))
    cdef const u8* source = <const u8*> PyBytes_AS_STRING(raw)
    cdef u8* target = <u8*> PyBytes_AS_STRING(out)
    with nogil:
        size = lz4_encode(source, n, search, target)
    return out if size == lz4_bound(n) else out[:size]


def decode_lz4(block, u64 size):
    """The `size` bytes that an LZ4 block holds. Threads: any.

    Nothing is reserved for a size that no block of this length can hold, so a block cannot claim
    more than 255 times its own bytes; a limit of your own is yours to check before. Raises
    BAD_FRAME: damaged, or it holds another number of bytes; TOO_LARGE: more than LZ4_BYTES_MAX.
    """
    cdef bytes raw = bytes(block)
    cdef u64 n = PyBytes_GET_SIZE(raw)
    cdef Status status
    if size > LZ4_BYTES_MAX:
        raise_for(TOO_LARGE, f"an LZ4 block holds at most {LZ4_BYTES_MAX} bytes, not {size}")
    if size // LZ4_GROWTH_MAX > n:
        raise_for(BAD_FRAME, f"an LZ4 block of {n} bytes cannot hold {size}")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> size)
    cdef const u8* source = <const u8*> PyBytes_AS_STRING(raw)
    cdef u8* target = <u8*> PyBytes_AS_STRING(out)
    with nogil:
        status = lz4_decode(source, n, target, size)
    raise_for(status, f"damaged LZ4 block of {n} bytes, announced as {size}")
    return out
