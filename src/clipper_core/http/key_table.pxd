# The keys that a server accepts, as hashes: what the value of `Authorization` is looked up in, by
# the HTTP threads of the core and by Python. And what each of them may do: for which applications
# it is, and how many requests it may make.
#
# A table is immutable and is replaced as a whole. It has hashes alone: only a caller has a key. A
# lookup is by the hash of what was sent, so its time tells a caller nothing about the keys.
#
# The requests of a key to each application are counted by the time at which the next is due
# (GCRA, a token bucket in one word): a request moves it on by an interval, and is refused if that
# is too far ahead. These times and the counts are in a KeyUse, which a new table takes over.
#
# Threads: any. KeyState is freed with its KeyTable, KeyUseState with its KeyUse, under the GIL.
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport atomic, i64, u32, u64, u8

cdef enum:
    DIGEST_BYTES = 32           # of SHA-256
    NO_KEY = -1                 # of key_find: the value names no key of the table
    RATES_MAX = 64              # applications of a key with a rate of their own; others share one

cdef enum KeyOutcome:
    ADMITTED = 0
    NOT_PERMITTED = 1           # the key is for other applications
    TOO_MANY = 2                # it has made as many requests as it may

cdef struct KeyPlace:
    u8[DIGEST_BYTES] digest
    i64 number                  # NO_KEY: free

cdef cppclass Rate:             # of the requests of a key to an application
    atomic[u64] application     # the hash of its name; 0: free
    atomic[u64] due_ns          # when the next request is due

cdef cppclass KeyUseState:      # of all keys with one name
    atomic[u64] admitted        # requests, by KeyOutcome
    atomic[u64] not_permitted
    atomic[u64] too_many
    Rate[RATES_MAX + 1] rates   # the last: of the other applications, and of none

cdef cppclass KeyLimits:
    KeyUseState* use
    u64 interval_ns             # between requests; 0: there is no limit
    u64 ahead_ns                # how far ahead the next due request may be: a burst, less one
    const u64* applications     # hashes of their names
    u32 applications_count      # 0: all
    const u8* policy            # value of RateLimit-Policy
    u32 policy_bytes
    const u8* forbidden         # body of 403, up to the request's id
    const u8* limited           # of 429
    u32 forbidden_bytes
    u32 limited_bytes
    u32 share                   # its number (bands.pxd); 0: of the keys without one
    u32 priority                # 1 to 3; 0: the key has none

cdef cppclass KeyState:
    KeyPlace* places            # by the first bytes of the digest
    u64 mask                    # places, less one
    u8* token                   # the value with the management token
    u64 token_bytes             # 0: there is none
    i64 token_number
    KeyLimits* limits           # by number of the key

cdef struct Standing:           # of a request in a model's queue, by its key
    u32 share
    u32 priority                # 0: that of the application
    bint is_free                # it may ask for any priority

cdef struct Admission:
    KeyOutcome outcome
    i64 number                  # of the key
    u64 wait_ns                 # of TOO_MANY: until a request is admitted
    Rate* rate                  # that was moved on; NULL: none

# Return the number of the key in a value of `Authorization`, `Bearer KEY`; NO_KEY if there is none.
cdef i64 key_find(const KeyState* keys, const u8* value, u64 n) noexcept nogil
# Return the standing of a key's requests. keys NULL: none is needed.
cdef Standing key_standing(const KeyState* keys, i64 number) noexcept nogil
# Say whether a request of a key to a path may be made. Of one that may, the key's rate is used.
cdef Admission key_admit(const KeyState* keys, i64 number, const u8* path, u64 path_bytes,
                         u64 now_ns) noexcept nogil
# The same, for an application by its name.
cdef Admission key_admit_name(const KeyState* keys, i64 number, const u8* name, u64 n,
                              u64 now_ns) noexcept nogil
# Take back an outcome, also a refusal: Python will ask for the same request.
cdef void key_take_back(const KeyState* keys, const Admission* admission) noexcept nogil
# Append the response to a request that was not admitted. id: X-Request-Id
cdef void key_refusal(const KeyState* keys, const Admission* admission, const u8* path,
                      u64 path_bytes, const char* date, const u8* id, u64 id_bytes, bint close,
                      Bytes* out) noexcept nogil

cdef class KeyUse:
    cdef KeyUseState* state

cdef class KeyTable:
    cdef KeyState* state
    cdef bytes token            # the memory of KeyState.token
    cdef list kept              # the memory of KeyState.limits

    cdef int _limit(self, KeyLimits* limits, KeyUse use, u64 interval_ns, u64 ahead_ns,
                    applications, bytes policy, bytes forbidden, bytes limited, u32 share,
                    u32 priority) except -1
