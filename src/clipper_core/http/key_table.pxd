# The keys that a server accepts, as hashes: what the value of `Authorization` is looked up in, by
# the HTTP threads of the core and by Python.
#
# A table is immutable and is replaced as a whole. It has hashes alone: only a caller has a key. A
# lookup is by the hash of what was sent, so its time tells a caller nothing about the keys.
#
# Threads: any. KeyState is freed with its KeyTable, under the GIL.
from clipper_core.runtime.machine cimport i64, u64, u8

cdef enum:
    DIGEST_BYTES = 32           # of SHA-256
    NO_KEY = -1                 # of key_find: the value names no key of the table

cdef struct KeyPlace:
    u8[DIGEST_BYTES] digest
    i64 number                  # NO_KEY: free

cdef cppclass KeyState:
    KeyPlace* places            # by the first bytes of the digest
    u64 mask                    # places, less one
    u8* token                   # the value with the management token
    u64 token_bytes             # 0: there is none
    i64 token_number

# Return the number of the key in a value of `Authorization`, `Bearer KEY`; NO_KEY if there is none.
cdef i64 key_find(const KeyState* keys, const u8* value, u64 n) noexcept nogil

cdef class KeyTable:
    cdef KeyState* state
    cdef bytes token            # the memory of KeyState.token
