"""Keys by their hashes, looked up by the value of `Authorization`.

The scheme is `Bearer`, in any case; blanks around the key are no part of it. The management token
is accepted exactly as `Bearer TOKEN`.
"""
cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.status cimport NO_MEMORY, raise_for

cdef extern from "http/sha256.hpp" namespace "clipper" nogil:
    void sha256(const u8* text, u64 n, u8* digest) noexcept
    bint equal_in_constant_time(const u8* a, const u8* b, u64 n) noexcept

cdef enum:
    SCHEME_BYTES = 7            # of `Bearer `

cdef const char* SCHEME = "bearer "


cdef inline bint _is_blank(u8 c) noexcept nogil:
    return c == 32 or 9 <= c <= 13


cdef bint _is_bearer(const u8* value, u64 n) noexcept nogil:
    cdef u64 i
    cdef u8 c
    if n < SCHEME_BYTES:
        return False
    for i in range(SCHEME_BYTES):
        c = value[i]
        if 65 <= c <= 90:
            c += 32
        if c != <u8> SCHEME[i]:
            return False
    return True


cdef inline u64 _home(const u8* digest) noexcept nogil:
    """Return what decides the place of a digest."""
    cdef u64 first
    memcpy(&first, digest, sizeof(first))
    return first


cdef i64 _number_of(const KeyState* keys, const u8* digest) noexcept nogil:
    """Return the number of the key with this digest; NO_KEY if there is none."""
    cdef u64 i = _home(digest) & keys.mask
    while keys.places[i].number != NO_KEY:
        if equal_in_constant_time(keys.places[i].digest, digest, DIGEST_BYTES):
            return keys.places[i].number
        i = (i + 1) & keys.mask
    return NO_KEY


cdef i64 key_find(const KeyState* keys, const u8* value, u64 n) noexcept nogil:
    cdef const u8* at = value + SCHEME_BYTES
    cdef const u8* end = value + n
    cdef u8[DIGEST_BYTES] digest
    if (keys.token_bytes and keys.token_bytes == n
            and equal_in_constant_time(keys.token, value, n)):
        return keys.token_number
    if not _is_bearer(value, n):
        return NO_KEY
    while at < end and _is_blank(at[0]):
        at += 1
    while at < end and _is_blank((end - 1)[0]):
        end -= 1
    sha256(at, <u64> (end - at), digest)
    return _number_of(keys, digest)


@cython.final
cdef class KeyTable:
    """The keys that a server accepts. Threads: any; it never changes.

    digests: the SHA-256 of each key, 32 bytes; of equal ones the last counts. token: the management
    token, which is accepted too; empty for none. Raises ValueError for a digest of another length,
    MemoryError.
    """

    def __init__(self, digests, bytes token=b""):
        cdef u64 size = 4, i
        cdef i64 number
        cdef bytes digest
        cdef list each = list(digests)
        while size < 2 * <u64> len(each) + 2:
            size *= 2
        self.token = b"Bearer " + token if token else b""
        self.state = make[KeyState]()
        if self.state != NULL:
            self.state.places = <KeyPlace*> calloc(size, sizeof(KeyPlace))
        if self.state == NULL or self.state.places == NULL:
            raise_for(NO_MEMORY, f"no memory for {len(each)} keys")
        self.state.mask = size - 1
        self.state.token = <u8*> (<char*> self.token)
        self.state.token_bytes = <u64> len(self.token)
        self.state.token_number = <i64> len(each)
        for i in range(size):
            self.state.places[i].number = NO_KEY
        for number, digest in enumerate(each):
            if len(digest) != DIGEST_BYTES:
                raise ValueError(f"a digest has {len(digest)} bytes: {DIGEST_BYTES} are expected")
            self._place(digest, number)

    def _place(self, bytes digest, i64 number):
        cdef const u8* text = <const u8*> (<const char*> digest)
        cdef u64 i = _home(text) & self.state.mask
        while self.state.places[i].number != NO_KEY:
            if equal_in_constant_time(self.state.places[i].digest, text, DIGEST_BYTES):
                break
            i = (i + 1) & self.state.mask
        memcpy(self.state.places[i].digest, text, DIGEST_BYTES)
        self.state.places[i].number = number

    def __dealloc__(self):
        if self.state != NULL:
            free(self.state.places)
            del self.state

    def find(self, bytes authorization not None):
        """Return the position of the key among the digests, by the value of `Authorization`; for
        the management token their count, for no key of the table None."""
        cdef const u8* value = <const u8*> (<const char*> authorization)
        cdef i64 number = key_find(self.state, value, <u64> len(authorization))
        return None if number == NO_KEY else number
