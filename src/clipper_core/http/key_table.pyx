"""Keys by their hashes, looked up by the value of `Authorization`, and their limits.

The scheme is `Bearer`, in any case; blanks around the key are no part of it. The management token
is accepted exactly as `Bearer TOKEN`.
"""
cimport cython
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

from clipper_core.runtime.allocation cimport make
from clipper_core.runtime.machine cimport acq_rel, acquire, monotonic_us, relaxed
from clipper_core.runtime.status cimport NO_MEMORY, raise_for

from array import array

cdef extern from "http/sha256.hpp" namespace "clipper" nogil:
    void sha256(const u8* text, u64 n, u8* digest) noexcept
    bint equal_in_constant_time(const u8* a, const u8* b, u64 n) noexcept

cdef enum:
    SCHEME_BYTES = 7            # of `Bearer `
    SECOND_NS = 1_000_000_000

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


# -- the application of a path
# -------------------------------------------------------------------------------------------------

cdef inline bint _begins(const u8* path, u64 n, const char* with_, u64 with_bytes) noexcept nogil:
    return n >= with_bytes and memcmp(path, with_, with_bytes) == 0


cdef u64 _name_at(const u8* path, u64 n, u64* start) noexcept nogil:
    """Return the length of the name of the application, or model, that a path is about, and where
    it begins; 0 if it is about none.

    /api/NAME/..., /v2/models/NAME/..., and the routes of the original, /NAME/...
    """
    cdef u64 at = 1, end
    cdef bint is_own = True     # a path that ends with the name is about it, too
    if _begins(path, n, "/api/", 5):
        at = 5
    elif _begins(path, n, "/v2/models/", 11):
        at = 11
    elif _begins(path, n, "/v2/", 4):
        return 0
    else:
        is_own = False
    end = at
    while end < n and path[end] != 47:
        end += 1
    if at >= n or (end == n and not is_own):
        return 0
    start[0] = at
    return end - at


cdef u64 _hash(const u8* name, u64 n) noexcept nogil:
    """Hash a name by FNV-1a; 0 for none."""
    cdef u64 h = 14695981039346656037u, i
    if n == 0:
        return 0
    for i in range(n):
        h = (h ^ name[i]) * 1099511628211u
    return h if h else 1


cdef u64 _application_of(const u8* path, u64 n) noexcept nogil:
    cdef u64 start = 0
    cdef u64 length = _name_at(path, n, &start)
    return _hash(path + start, length)


# -- shares and priorities
# -------------------------------------------------------------------------------------------------

cdef Standing key_standing(const KeyState* keys, i64 number) noexcept nogil:
    cdef Standing found
    found.share = found.priority = 0
    found.is_free = keys == NULL or keys.limits[number].use == NULL     # the management token
    if not found.is_free:
        found.share, found.priority = keys.limits[number].share, keys.limits[number].priority
    return found


# -- rates
# -------------------------------------------------------------------------------------------------

cdef Rate* _rate_of(KeyUseState* use, u64 application) noexcept nogil:
    """Return the rate of a key's requests to an application."""
    cdef u64 i = application % RATES_MAX, _tried, found
    if application == 0:
        return &use.rates[RATES_MAX]
    for _tried in range(RATES_MAX):
        found = use.rates[i].application.load(acquire)
        if found == 0 and use.rates[i].application.compare_exchange_strong(
                found, application, acq_rel):
            return &use.rates[i]
        if found == application:
            return &use.rates[i]
        i = (i + 1) % RATES_MAX
    return &use.rates[RATES_MAX]


cdef u64 _take(Rate* rate, u64 interval_ns, u64 ahead_ns, u64 now_ns) noexcept nogil:
    """Take a request; return 0, or how long it is until there is one."""
    cdef u64 due_ns = rate.due_ns.load(relaxed), from_ns
    while True:
        from_ns = due_ns if due_ns > now_ns else now_ns
        if from_ns - now_ns > ahead_ns:
            return from_ns - now_ns - ahead_ns
        if rate.due_ns.compare_exchange_strong(due_ns, from_ns + interval_ns, acq_rel):
            return 0


cdef bint _permits(const KeyLimits* limits, u64 application) noexcept nogil:
    cdef u32 i
    if limits.applications_count == 0 or application == 0:
        return True
    for i in range(limits.applications_count):
        if limits.applications[i] == application:
            return True
    return False


cdef Admission _admit(const KeyState* keys, i64 number, u64 application,
                      u64 now_ns) noexcept nogil:
    cdef Admission found
    cdef KeyLimits* limits
    found.number = number
    found.outcome = ADMITTED
    found.wait_ns = 0
    found.rate = NULL
    limits = &keys.limits[number]
    if limits.use == NULL:      # the management token
        return found
    if not _permits(limits, application):
        found.outcome = NOT_PERMITTED
        limits.use.not_permitted.fetch_add(1, relaxed)
        return found
    if limits.interval_ns:
        found.rate = _rate_of(limits.use, application)
        found.wait_ns = _take(found.rate, limits.interval_ns, limits.ahead_ns, now_ns)
        if found.wait_ns:
            found.outcome = TOO_MANY
            limits.use.too_many.fetch_add(1, relaxed)
            return found
    limits.use.admitted.fetch_add(1, relaxed)
    return found


cdef Admission key_admit(const KeyState* keys, i64 number, const u8* path, u64 path_bytes,
                         u64 now_ns) noexcept nogil:
    return _admit(keys, number, _application_of(path, path_bytes), now_ns)


cdef Admission key_admit_name(const KeyState* keys, i64 number, const u8* name, u64 n,
                              u64 now_ns) noexcept nogil:
    return _admit(keys, number, _hash(name, n), now_ns)


cdef void key_take_back(const KeyState* keys, const Admission* admission) noexcept nogil:
    cdef KeyLimits* limits = &keys.limits[admission.number]
    if limits.use == NULL:
        return
    if admission.outcome == NOT_PERMITTED:
        limits.use.not_permitted.fetch_sub(1, relaxed)
    elif admission.outcome == TOO_MANY:
        limits.use.too_many.fetch_sub(1, relaxed)
    else:
        limits.use.admitted.fetch_sub(1, relaxed)
        if admission.rate != NULL:
            admission.rate.due_ns.fetch_sub(limits.interval_ns, acq_rel)


cdef void key_refusal(const KeyState* keys, const Admission* admission, const u8* path,
                      u64 path_bytes, const char* date, const u8* id, u64 id_bytes, bint close,
                      Bytes* out) noexcept nogil:
    cdef KeyLimits* limits = &keys.limits[admission.number]
    cdef bint is_limited = admission.outcome == TOO_MANY
    cdef const u8* body = limits.limited if is_limited else limits.forbidden
    cdef u64 body_bytes = limits.limited_bytes if is_limited else limits.forbidden_bytes
    cdef u64 wait_s = (admission.wait_ns + SECOND_NS - 1) / SECOND_NS
    if is_limited:
        out.put_text("HTTP/1.1 429 Too Many Requests\r\ndate: ")
    else:
        out.put_text("HTTP/1.1 403 Forbidden\r\ndate: ")
    out.put(date, 29)
    if _begins(path, path_bytes, "/v2", 3):
        out.put_text("\r\ncontent-type: application/json\r\ncontent-length: ")
    else:
        out.put_text("\r\ncontent-type: application/problem+json\r\ncontent-length: ")
    out.put_decimal(body_bytes + id_bytes + 2)
    if is_limited:
        out.put_text("\r\nratelimit-policy: ")
        out.put(limits.policy, limits.policy_bytes)
        out.put_text("\r\nratelimit: \"key\";r=0;t=")
        out.put_decimal(wait_s)
        out.put_text("\r\nretry-after: ")
        out.put_decimal(wait_s)
    out.put_text("\r\nx-request-id: ")
    out.put(id, id_bytes)
    if close:
        out.put_text("\r\nconnection: close")
    out.put_text("\r\n\r\n")
    out.put(body, body_bytes)
    out.put(id, id_bytes)
    out.put_text("\"}")


# -- Python
# -------------------------------------------------------------------------------------------------

cdef u64 _hash_of(str name):
    cdef bytes text = name.encode()
    return _hash(<const u8*> (<const char*> text), <u64> len(text))


def application_of(bytes path not None):
    """Return the name of the application, or model, that a path without %-codes is about; empty if
    it is about none."""
    cdef u64 start = 0
    cdef u64 n = _name_at(<const u8*> (<const char*> path), <u64> len(path), &start)
    return path[start:start + n].decode("utf-8", "replace")


@cython.final
cdef class KeyUse:
    """The requests of the keys with one name: their counts and rates. Threads: any."""

    def __init__(self):
        self.state = make[KeyUseState]()
        if self.state == NULL:
            raise_for(NO_MEMORY, "no memory for the counts of a key")

    def __dealloc__(self):
        del self.state

    @property
    def requests(self):
        """The number of requests: admitted, to other applications than the key's, and too many."""
        return (self.state.admitted.load(relaxed), self.state.not_permitted.load(relaxed),
                self.state.too_many.load(relaxed))


@cython.final
cdef class KeyTable:
    """The keys that a server accepts. Threads: any; it never changes.

    digests: the SHA-256 of each key, 32 bytes; of equal ones the last counts. token: the management
    token, which is accepted too and has no limits; empty for none. limits: for each digest
    (use, interval_ns, ahead_ns, applications, policy, forbidden, limited, share, priority): the
    KeyUse of its name, the nanoseconds between requests (0: no limit), how far ahead one may be,
    names of applications (none: all), the value of RateLimit-Policy, the bodies of 403 and 429, up
    to the request's id, the number of its share, and its priority (0: none).
    Raises ValueError for a digest of another length, MemoryError.
    """

    def __init__(self, digests, bytes token=b"", limits=None):
        cdef u64 size = 4, i
        cdef i64 number
        cdef bytes digest
        cdef list each = list(digests)
        while size < 2 * <u64> len(each) + 2:
            size *= 2
        self.kept = []
        self.token = b"Bearer " + token if token else b""
        self.state = make[KeyState]()
        if self.state != NULL:
            self.state.places = <KeyPlace*> calloc(size, sizeof(KeyPlace))
            self.state.limits = <KeyLimits*> calloc(len(each) + 1, sizeof(KeyLimits))
        if self.state == NULL or self.state.places == NULL or self.state.limits == NULL:
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
        for number, (use, interval_ns, ahead_ns, applications, policy, forbidden, limited, share,
                     priority) in enumerate(limits or ()):
            self._limit(&self.state.limits[number], use, interval_ns, ahead_ns, applications,
                        policy, forbidden, limited, share, priority)

    def _place(self, bytes digest, i64 number):
        cdef const u8* text = <const u8*> (<const char*> digest)
        cdef u64 i = _home(text) & self.state.mask
        while self.state.places[i].number != NO_KEY:
            if equal_in_constant_time(self.state.places[i].digest, text, DIGEST_BYTES):
                break
            i = (i + 1) & self.state.mask
        memcpy(self.state.places[i].digest, text, DIGEST_BYTES)
        self.state.places[i].number = number

    cdef int _limit(self, KeyLimits* limits, KeyUse use, u64 interval_ns, u64 ahead_ns,
                    applications, bytes policy, bytes forbidden, bytes limited, u32 share,
                    u32 priority) except -1:
        cdef bytes hashes
        hashes = array("Q", [_hash_of(name) for name in applications]).tobytes()
        limits.use = use.state
        limits.interval_ns = interval_ns
        limits.ahead_ns = ahead_ns
        limits.applications = <const u64*> <const void*> (<const char*> hashes)
        limits.applications_count = <u32> len(applications)
        limits.policy = <const u8*> (<const char*> policy)
        limits.policy_bytes = <u32> len(policy)
        limits.forbidden = <const u8*> (<const char*> forbidden)
        limits.forbidden_bytes = <u32> len(forbidden)
        limits.limited = <const u8*> (<const char*> limited)
        limits.limited_bytes = <u32> len(limited)
        limits.share = share
        limits.priority = priority
        self.kept.append((use, hashes, policy, forbidden, limited))
        return 0

    def __dealloc__(self):
        if self.state != NULL:
            free(self.state.places)
            free(self.state.limits)
            del self.state

    def find(self, bytes authorization not None):
        """Return the position of the key among the digests, by the value of `Authorization`; for
        the management token their count, for no key of the table None."""
        cdef const u8* value = <const u8*> (<const char*> authorization)
        cdef i64 number = key_find(self.state, value, <u64> len(authorization))
        return None if number == NO_KEY else number

    def admit(self, i64 number, str application not None):
        """Say whether a request of a key to an application may be made, and use the key's rate;
        return 0 if so, 1 if the key is for others, and 2 if it has made too many; and then how
        many nanoseconds it is until one is admitted.

        number: of the key. application: its name; empty: the request is about none.
        Raises IndexError for a number that the table does not have.
        """
        cdef Admission found
        if not 0 <= number <= self.state.token_number:
            raise IndexError(f"key {number}")
        found = _admit(self.state, number, _hash_of(application), monotonic_us() * 1000)
        return <int> found.outcome, found.wait_ns
