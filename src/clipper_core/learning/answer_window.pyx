"""Answers that feedback may still come for, in memory that the collector does not walk."""
cimport cython
from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem, PyDict_Next
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.object cimport PyObject, PyObject_RichCompareBool, Py_EQ
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.math cimport NAN
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from numpy import ndarray

from clipper_core.learning.feedback_update cimport CONTEXT_MAX
from clipper_core.runtime.dtype cimport BOOL, F64, I64
from clipper_core.runtime.machine cimport aligned_new
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.runtime.spin_lock cimport spin_lock, spin_unlock
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, raise_for
from clipper_core.wire.comparison cimport (
    BYTES_KEY, FLOAT_KEY, LARGE_KEY, STR_KEY, ValueKey, key_of_output, keys_are_equal, text_key,
    value_key, whole_key,
)
from clipper_core.wire.prediction cimport (
    TAG_BLOB, TAG_ROW, Blob, blob_of, object_value, value_confidence, value_drop,
    value_hold, value_object, word_confidence, word_data,
)

cdef extern from "Python.h":
    PyObject* PyTuple_GET_ITEM(object items, Py_ssize_t at)     # borrowed
    tuple PyTuple_New(Py_ssize_t n)
    void PyTuple_SET_ITEM(object items, Py_ssize_t at, object item)     # takes a reference
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)

cdef ObjectMember OUTPUT, CONFIDENCE, QUALIFIERS            # of a prediction
OUTPUT.name = b"output"
CONFIDENCE.name = b"confidence"
QUALIFIERS.name = b"qualifiers"
cdef ObjectMember MODELS, PROBABILITIES, OBSERVERS, FEATURES   # of a plan
MODELS.name, PROBABILITIES.name = b"models", b"probabilities"
OBSERVERS.name, FEATURES.name = b"observers", b"features"

cdef enum:
    SIZE_MAX = 1 << 30          # answers of a window
    IS_OBJECT = 8               # it is a Joined, in the place of the owner
    IS_OWNED = 16               # it has references to its owner and its user
    HAS_USER = 32
    HAS_PROBABILITY = 64        # of the one model that was chosen
    NAMES_USER = 128            # its user is there as text: how many bytes, and the bytes
    HAS_FEATURES = 256          # of the query: how many, and their values
    KEPT = HAS_FEEDBACK | IS_WRITTEN | IS_CLAIMED
    TAG_OBJECT = 0x90           # the word is a PyObject*, with a reference
    APART = 255                 # the answer is no model's output: it follows those
    FLAGS_SHIFT = 48            # of the second word, above the microseconds
    HEAD_WORDS = 4
    OBJECTS_MAX = OUTPUTS_MAX + 3
    GROUP_BITS = 4              # numbers in a row that share a group of places
    GROUP = 1 << GROUP_BITS
    FIRST_PLACES = 4 * GROUP
    OBJECT_BYTES = 1024         # of an answer kept as an object, besides its outputs
    QUALIFIER_BYTES = 200       # of a qualifier with its name, about
    RECENT_OWNERS = 8
    OWNERS_MAX = 256

cdef u64 SPREAD = 0x9E3779B97F4A7C15
cdef u64 ADDRESS = (<u64> 1 << 48) - 1
cdef u64 NO_PLACE = ~<u64> 0


cdef struct Shape:              # where the parts of an entry lie, in words
    u32 n                       # outputs, with the answer if it is apart
    u32 user
    u32 probability
    u32 features
    u32 outputs
    u32 confidences             # 0: none
    u32 tags
    u32 words                   # of the whole


# -- entries: [number][microseconds, flags][owner][n, answer, arrived, sure], then what the flags
#    say, the outputs, confidences, and the types of the outputs, a byte each

cdef inline u64 _given_us(const u64* entry) noexcept nogil:
    return entry[1] & ADDRESS


cdef inline u64 _numbers(u32 n, u32 answer, u32 arrived, u32 sure) noexcept nogil:
    return n | <u64> answer << 8 | <u64> arrived << 16 | <u64> sure << 32


cdef inline u32 _text_words(u32 nbytes) noexcept nogil:
    """Return the words of a user's name, with that of its length."""
    return 1 + (nbytes + 7) // 8


cdef void _shape(const u64* entry, Shape* s) noexcept nogil:
    cdef u16 flags = entry_flags(entry)
    cdef u32 at = HEAD_WORDS
    if flags & IS_OBJECT:
        s.n = s.confidences = 0
        s.user = HEAD_WORDS
        s.probability = HEAD_WORDS
        s.features = HEAD_WORDS
        s.outputs = HEAD_WORDS
        s.tags = HEAD_WORDS
        s.words = HEAD_WORDS
        return
    s.user = at
    if flags & NAMES_USER:
        at += _text_words(<u32> entry[at])
    s.probability = at + ((flags & HAS_USER) != 0)
    at = s.probability + ((flags & HAS_PROBABILITY) != 0)
    s.features = at
    if flags & HAS_FEATURES:
        at += 1 + <u32> entry[at]
    s.n = <u32> (entry[3] & 0xFF) + ((entry[3] >> 8 & 0xFF) == APART)
    s.outputs = at
    at += s.n
    s.confidences = 0
    if entry[3] >> 32 & 0xFFFF:
        s.confidences = at
        at += <u32> (entry[3] & 0xFF)
    s.tags = at
    s.words = at + (s.n + 7) // 8


cdef u64 _blob_bytes(const u64* entry, const Shape* s) noexcept nogil:
    cdef const u8* tags = <const u8*> (entry + s.tags)
    cdef u64 total = 0
    cdef u32 i
    for i in range(s.n):
        if tags[i] == TAG_BLOB:
            total += blob_of(entry[s.outputs + i]).nbytes + sizeof(Blob)
    return total


# -- the index: groups of places. Numbers that differ in their last bits only have the same group,
#    so that queries in a row use the same lines of memory. In a group, a number has one place;
#    where that is taken, the same place of the next groups.

cdef inline u64 _tag(u64 number) noexcept nogil:
    """Return the part of a number that its place in the index has, above the address."""
    return number << 48


cdef inline u64* _entry(u64 place) noexcept nogil:
    return <u64*> (place & ADDRESS)


cdef inline u64 _home(u64 number, u32 shift) noexcept nogil:
    """Return the first place at which an entry is looked for."""
    cdef u64 hash = (number >> GROUP_BITS) * SPREAD
    return hash >> shift << GROUP_BITS | ((number ^ hash >> 32) & (GROUP - 1))


cdef u64 _place_of(const u64* index, u64 mask, u32 shift, u64 number) noexcept nogil:
    """Return the place of an entry in an index, or the free one where it would be; NO_PLACE: there
    is none."""
    cdef u64 home = _home(number, shift), i = home
    while index[i]:
        if (index[i] & ~ADDRESS) == _tag(number) and _entry(index[i])[0] == number:
            return i
        i = (i + GROUP) & mask
        if i == home:
            return NO_PLACE
    return i


cdef bint _move(const u64* before, u64 old, u64* index, u64 mask, u32 shift) noexcept nogil:
    """Copy the places of an index to a larger one. False: one has no place there."""
    cdef u64 i, at
    for i in range(old):
        if before[i]:
            at = _place_of(index, mask, shift, _entry(before[i])[0])
            if at == NO_PLACE:
                return False
            index[at] = before[i]
    return True


cdef bint _grow(Ring* r) noexcept nogil:
    """Replace the index by one of at least twice the size. False: there is no memory."""
    cdef u64 places = FIRST_PLACES // 2 if r.index == NULL else r.mask + 1
    cdef u64 old = 0 if r.index == NULL else r.mask + 1
    cdef u64* index
    cdef u32 shift
    while True:
        places *= 2
        index = <u64*> calloc(places, sizeof(u64))
        if index == NULL:
            return False
        shift = 64
        while places >> GROUP_BITS >> (64 - shift) > 1:
            shift -= 1
        if _move(r.index, old, index, places - 1, shift):
            break
        free(index)
    free(r.index)
    r.index = index
    r.mask = places - 1
    r.shift = shift
    return True


cdef u64 _place_for(Ring* r, u64 number) noexcept nogil:
    """Return the place of an entry, or a free one for it; NO_PLACE: there is no memory."""
    cdef u64 at
    if r.index == NULL or (r.count + 1) * 3 > (r.mask + 1) * 2:
        # without memory the index is filled further
        if not _grow(r) and r.index == NULL:
            return NO_PLACE
    while True:
        at = _place_of(r.index, r.mask, r.shift, number)
        if at != NO_PLACE or not _grow(r):
            return at


cdef void _forget_place(Ring* r, u64 at) noexcept nogil:
    """Free a place; those behind it that would be looked for there move up."""
    cdef u64 next = at, begin = at, home
    while True:
        next = (next + GROUP) & r.mask
        if r.index[next] == 0 or next == begin:
            break
        home = _home(_entry(r.index[next])[0], r.shift)
        if (next - home) & r.mask >= (next - at) & r.mask:
            r.index[at] = r.index[next]
            at = next
    r.index[at] = 0


# -- rings

cdef u64* _room(Ring* r, u32 words) noexcept nogil:
    """Return room for an entry behind the newest; NULL: there is no memory."""
    cdef Chunk* chunk = r.last
    if chunk == NULL or chunk.used + words > CHUNK_WORDS:
        chunk = r.spare if r.spare != NULL else <Chunk*> malloc(sizeof(Chunk))
        if chunk == NULL:
            return NULL
        r.spare = NULL
        chunk.next = NULL
        chunk.used = 0
        if r.last == NULL:
            r.first, r.begin = chunk, 0
        else:
            r.last.next = chunk
        r.last = chunk
    return chunk.words + chunk.used


cdef void _keep(Ring* r, u64 place, u64* entry, u32 words, u64 nbytes) noexcept nogil:
    """Have the entry that was written to the room count. place: of it in the index."""
    r.index[place] = <u64> entry | _tag(entry[0])
    r.last.used += words
    r.count += 1
    r.bytes += nbytes


cdef bint _is_over(const Ring* r, u64 now_us) noexcept nogil:
    """Return whether the oldest entry must go."""
    cdef const u64* entry
    if r.count == 0:
        return False
    if r.count > r.count_max or r.bytes > r.bytes_max:
        return True
    entry = _oldest(r)
    return _given_us(entry) + r.window_us < now_us


cdef const u64* _oldest(const Ring* r) noexcept nogil:
    cdef const Chunk* chunk = r.first
    cdef u64 begin = r.begin
    if begin == chunk.used and chunk.next != NULL:
        chunk, begin = chunk.next, 0
    return chunk.words + begin


cdef u32 _forget_oldest(Ring* r, void** objects) noexcept nogil:
    """Remove the oldest entry. Return how many references it had to objects, which the caller gives
    up when it has given the lock back."""
    cdef Shape s
    cdef Value value
    cdef Chunk* gone
    cdef u64* entry
    cdef const u8* tags
    cdef u32 i, n = 0
    if r.begin == r.first.used and r.first.next != NULL:
        gone = r.first
        r.first, r.begin = gone.next, 0
        free(r.spare)
        r.spare = gone
    entry = r.first.words + r.begin
    _shape(entry, &s)
    r.bytes -= s.words * sizeof(u64) + _blob_bytes(entry, &s)
    r.count -= 1
    _forget_place(r, _place_of(r.index, r.mask, r.shift, entry[0]))
    if entry_flags(entry) & (IS_OBJECT | IS_OWNED):
        objects[n] = <void*> entry[2]
        n += 1
        if entry_flags(entry) & HAS_USER:
            objects[n] = <void*> entry[s.user]
            n += 1
    tags = <const u8*> (entry + s.tags)
    for i in range(s.n):
        if tags[i] == TAG_OBJECT:
            objects[n] = <void*> entry[s.outputs + i]
            n += 1
        elif tags[i] == TAG_BLOB or tags[i] == TAG_ROW:
            value.word, value.tag = entry[s.outputs + i], tags[i]
            value_drop(&value)
    r.begin += s.words
    return n


cdef bint ring_add(Ring* r, u64 number, void* owner, const u8* user, u32 user_bytes,
                   const Value* value, u64 now_us) noexcept nogil:
    cdef u64* entry
    cdef u64 place
    cdef Value kept = value[0]
    cdef void* objects[OBJECTS_MAX]
    cdef u32 at = HEAD_WORDS + (_text_words(user_bytes) if user_bytes else 0)
    cdef u64 nbytes = (at + 2) * sizeof(u64)
    if value.tag == TAG_BLOB:
        nbytes += blob_of(value.word).nbytes + sizeof(Blob)
    if nbytes > r.bytes_max or number == 0:
        return False
    spin_lock(r.lock)
    place = _place_for(r, number)
    entry = _room(r, at + 2) if place != NO_PLACE and r.index[place] == 0 else NULL
    if entry == NULL:
        spin_unlock(r.lock)
        return False
    entry[0] = number
    entry[1] = now_us & ADDRESS
    entry[2] = <u64> owner
    entry[3] = _numbers(1, 0, 1, 0)
    if user_bytes:
        entry[1] |= <u64> NAMES_USER << FLAGS_SHIFT
        entry[HEAD_WORDS] = user_bytes
        memcpy(entry + HEAD_WORDS + 1, user, user_bytes)
    entry[at] = value.word
    entry[at + 1] = value.tag
    value_hold(&kept)
    _keep(r, place, entry, at + 2, nbytes)
    while _is_over(r, now_us):
        _forget_oldest(r, objects)
    spin_unlock(r.lock)
    return True


cdef u64* _lookup(Ring* r, u64 number) noexcept nogil:
    """Return the entry of that number; NULL: it is not there."""
    cdef u64 place
    if r.index == NULL:
        return NULL
    place = _place_of(r.index, r.mask, r.shift, number)
    if place == NO_PLACE:
        return NULL
    return _entry(r.index[place])


# -- the objects that Python sees

@cython.final
cdef class AnswerOwner:
    """The learner whose models gave an answer, and the models that were queried. Threads: any; it
    never changes."""

    def __init__(self, learner, tuple models not None, plan):
        self.learner = learner
        self.models = models
        self.plan = plan


@cython.final
@cython.no_gc           # nothing that it refers to refers to it
@cython.freelist(64)
cdef class Joined:
    """An answered query for which feedback may still arrive.

    arrived: predictions by model.  late: futures of observers only.  until_s: end of the wait for
    feedback, on the window's clock.  has_feedback: whether its feedback has come.  is_written:
    whether it is in the store, or is about to be written.  is_claimed: whether this server has
    claimed it in the store.  These three belong to the entry of the window, for as long as it is
    there.
    """

    def __init__(self, learner, str user, plan, dict arrived not None, answer, tuple late,
                 double until_s, bint has_feedback=False):
        self.learner = learner
        self.user = user
        self.selected = plan
        self.by_model = arrived
        self.answer = answer
        self.late = late
        self.until_s, self.flags = until_s, HAS_FEEDBACK if has_feedback else 0
        self.nbytes = OBJECT_BYTES + _bytes_of(answer)
        for prediction in arrived.values():
            self.nbytes += (_bytes_of(prediction.output)
                            + QUALIFIER_BYTES * <i64> len(prediction.qualifiers))

    @property
    def plan(self):
        """The plan of the query."""
        return self.plan_of()

    @property
    def arrived(self):
        """The predictions by model."""
        return self.predictions()

    cdef object plan_of(self):
        if self.selected is None:
            odds = (self.probability,) if self.probability == self.probability else ()
            if self.features is None:
                self.selected = self.window.plan_type(self.owner.models, odds)
            else:
                self.selected = self.window.plan_type(self.owner.models, odds, (), self.features)
        return self.selected

    cdef dict predictions(self):
        cdef dict found
        cdef Py_ssize_t i
        if self.by_model is None:
            found = {}
            for i in range(len(self.models)):
                found[self.models[i]] = self.window.prediction_type(
                    self.outputs[i],
                    None if self.confidences is None else self.confidences[i])
            self.by_model = found
        return self.by_model

    cdef bint is_set(self, u16 flag) noexcept:
        return _put(self, flag, 0, 0)

    cdef bint put(self, u16 flag, bint value) noexcept:
        return _put(self, flag, flag, flag if value else 0)

    def claim(self):
        """Set `has_feedback`. Return True if it was not set before."""
        return not self.put(HAS_FEEDBACK, True)

    @property
    def has_feedback(self):
        """Return whether its feedback has come."""
        return self.is_set(HAS_FEEDBACK)

    @has_feedback.setter
    def has_feedback(self, bint value):
        self.put(HAS_FEEDBACK, value)

    @property
    def is_written(self):
        """Return whether it is in the store, or is about to be written."""
        return self.is_set(IS_WRITTEN)

    @is_written.setter
    def is_written(self, bint value):
        self.put(IS_WRITTEN, value)

    @property
    def is_claimed(self):
        """Return whether this server has claimed it in the store."""
        return self.is_set(IS_CLAIMED)

    @is_claimed.setter
    def is_claimed(self, bint value):
        self.put(IS_CLAIMED, value)


cdef bint _put(Joined joined, u16 flag, u16 mask, u16 value) noexcept:
    """Change the masked flags of an answer, in its entry if that is still there. Return whether
    `flag` was set."""
    cdef Ring* r
    cdef u64* entry
    cdef u16 before = joined.flags
    cdef int i
    if joined.window is not None:
        for i in range(2):
            r = &joined.window.rings[i]
            spin_lock(r.lock)
            entry = _lookup(r, joined.number)
            if entry != NULL:
                before = entry_flags(entry)
                entry[1] = (_given_us(entry)
                            | <u64> (<u16> ((before & ~mask) | value)) << FLAGS_SHIFT)
            spin_unlock(r.lock)
            if entry != NULL:
                break
    joined.flags = <u16> (((before & ~mask) | value) & KEPT)
    return (before & flag) != 0


cdef i64 _bytes_of(object output) except -1:
    if isinstance(output, ndarray):
        return output.nbytes
    return len(output) if isinstance(output, (str, bytes)) else 0


cdef i64 _object_bytes(object value) noexcept:
    """Return the bytes of an object that an entry holds, about."""
    if type(value) is Joined:
        return (<Joined> value).nbytes
    if type(value) is AnswerOwner:
        return 0
    if type(value) is str:
        return 64 + PyUnicode_GET_LENGTH(value)
    try:
        return 64 + _bytes_of(value)
    except Exception:
        return 64


@cython.final
cdef class AnswerWindow:
    """The window of the last `size_max` answers that Python made, and as many of the HTTP threads,
    each for `window_s` seconds. Threads: any.

    bytes_max: of either, estimated; beyond it the oldest are dropped.  answer_type: objects of this
    type name an answer by their `id`.  prediction_type: makes a prediction of an output and a
    confidence.  plan_type: makes a plan of models and their probabilities.  clock: in seconds;
    None: the system's.  node: ids of this server are `node-number`, the number in hexadecimal.
    numbers: `NUMBER_OF` of the module of answers, by which their numbers are read; None: their
    ids are.
    """

    def __cinit__(self, u64 size_max, double window_s, u64 bytes_max, *args, **kwargs):
        if not 1 <= size_max <= SIZE_MAX:
            raise_for(BAD_INPUT, f"size_max={size_max}: it must lie between 1 and {SIZE_MAX}")
        self.rings = <Ring*> aligned_new(2 * sizeof(Ring))
        if self.rings == NULL:
            raise_for(NO_MEMORY, "no memory for a window of answers")
        for i in range(2):
            self.rings[i].count_max, self.rings[i].bytes_max = size_max, bytes_max
            self.rings[i].window_us = <u64> min(max(0.0, window_s * 1e6), 1e14)

    def __init__(self, u64 size_max, double window_s, u64 bytes_max, answer_type, prediction_type,
                 plan_type, clock=None, str node not None="", numbers=None):
        self.window_s = window_s
        self.clock = clock
        self.node = node
        if numbers is not None:
            self.number_of_answer = <NumberOf> PyCapsule_GetPointer(numbers, "clipper.number_of")
        self.answer_type, self.prediction_type = answer_type, prediction_type
        self.plan_type, self.prefix = plan_type, f"{node}-".encode()
        self.recent = [None] * RECENT_OWNERS
        self.owners = {}
        self.pinned = []

    def __dealloc__(self):
        cdef void* objects[OBJECTS_MAX]
        cdef Chunk* chunk
        cdef Ring* r
        cdef int i
        if self.rings == NULL:
            return
        for i in range(2):
            r = &self.rings[i]
            while r.count:
                _release(objects, _forget_oldest(r, objects))
            while r.first != NULL:
                chunk, r.first = r.first, r.first.next
                free(chunk)
            free(r.spare)
            free(r.index)
        free(self.rings)

    cdef double now_s(self) except -1:
        cdef timespec now
        if self.clock is not None:
            return self.clock()
        clock_gettime(CLOCK_MONOTONIC, &now)
        return <double> now.tv_sec + 1e-9 * <double> now.tv_nsec

    cdef u64 number_of(self, object id) noexcept:
        cdef Py_ssize_t size, first = PyBytes_GET_SIZE(self.prefix), i
        cdef const char* text
        cdef u64 number = 0
        if type(id) is not str or not PyUnicode_IS_COMPACT_ASCII(id):
            return 0
        try:
            text = PyUnicode_AsUTF8AndSize(id, &size)
        except MemoryError:
            return 0
        if not first < size <= first + 16 or memcmp(text, <const char*> self.prefix, first):
            return 0
        if text[first] == c"0":
            return 0                        # no number is written with a zero before it
        for i in range(first, size):
            if c"0" <= text[i] <= c"9":
                number = number << 4 | <u64> (text[i] - c"0")
            elif c"a" <= text[i] <= c"f":
                number = number << 4 | <u64> (text[i] - c"a" + 10)
            else:
                return 0
        return number

    cdef u64 number_in(self, object prediction) except? 0:
        cdef u64 number = 0
        if type(prediction) is not self.answer_type:
            return self.number_of(prediction)
        if self.number_of_answer != NULL:
            number = self.number_of_answer(<void*> prediction, <void*> self.node)
        return number if number else self.number_of(prediction.id)

    def __len__(self):
        return self.rings[0].count + self.rings[1].count

    @property
    def nbytes(self):
        """Bytes of the entries and of what they hold, estimated."""
        return self.rings[0].bytes + self.rings[1].bytes

    @property
    def index_bytes(self):
        """Bytes of the indices and of chunks that are not full."""
        cdef u64 total = 0
        cdef const Chunk* chunk
        cdef int i
        for i in range(2):
            total += 0 if self.rings[i].index == NULL else (self.rings[i].mask + 1) * sizeof(u64)
            chunk = self.rings[i].last
            total += 0 if chunk == NULL else sizeof(Chunk) - chunk.used * sizeof(u64)
        return total

    cdef AnswerOwner owner_of(self, object learner, tuple models):
        cdef AnswerOwner owner
        cdef PyObject* one
        cdef Py_ssize_t i
        for i in range(RECENT_OWNERS):
            owner = <AnswerOwner> self.recent[i]
            if owner is not None and owner.learner is learner and owner.models is models:
                return owner
        one = PyDict_GetItem(self.owners, (learner, models))
        if one == NULL:
            owner = AnswerOwner(learner, models, self.plan_type(models))
            if len(self.owners) >= OWNERS_MAX:      # entries keep their own
                self.owners.clear()
            self.owners[(learner, models)] = owner
        else:
            owner = <AnswerOwner> <object> one
        self.recent[self.turn] = owner
        self.turn = (self.turn + 1) % RECENT_OWNERS
        return owner

    def pinned_owner(self, learner, tuple models not None):
        """Return the owner of answers that the HTTP threads give; it lives as long as this."""
        cdef AnswerOwner owner
        for owner in self.pinned:
            if owner.learner is learner and owner.models == models:
                return owner
        owner = AnswerOwner(learner, models, self.plan_type(models))
        self.pinned.append(owner)
        return owner

    def add(self, u64 number, learner, str user, plan, dict arrived not None, answer,
            tuple late=()):
        """Remember an answer of Python's, by the number in its id, unless it is known. Raises
        MemoryError."""
        cdef u64[ENTRY_WORDS_MAX] entry
        cdef double now = self.now_s()
        cdef u64 extra = 0
        cdef Shape s
        cdef Joined joined
        if number == 0:
            return
        entry[0], entry[1] = number, <u64> max(0.0, now * 1e6) & ADDRESS
        if len(late) or not _write(self, entry, learner, user, plan, arrived, answer, &extra):
            joined = Joined(learner, user, plan, arrived, answer, late, now + self.window_s)
            entry[1] = (<u64> max(0.0, now * 1e6) & ADDRESS) | <u64> IS_OBJECT << FLAGS_SHIFT
            entry[2] = <u64> <PyObject*> joined
            entry[3] = 0
            extra = <u64> joined.nbytes
        _shape(entry, &s)
        _insert(&self.rings[0], entry, &s, extra)
        _trim(&self.rings[0], <u64> max(0.0, now * 1e6))

    def add_output(self, u64 number, AnswerOwner owner not None, output, str user not None=""):
        """Remember an answer of one output as the HTTP threads do. Raises TypeError for an output
        that cannot be a prediction, ValueError for a user whose name is too long for them."""
        cdef bytes name = user.encode()
        cdef Value value
        if len(name) > RING_USER_MAX:
            raise ValueError(f"the user's name has {len(name)} bytes: at most {RING_USER_MAX}")
        value = object_value(output)
        ring_add(&self.rings[1], number, <void*> owner, <const u8*> (<const char*> name),
                 <u32> len(name), &value, <u64> (self.now_s() * 1e6))
        value_drop(&value)

    def get(self, id):
        """Return the answer of an id; None if it is not of this server, not here, or its time is
        over."""
        cdef u64 number = self.number_of(id)
        cdef Joined joined = self.find(number) if number else None
        return None if joined is None or joined.until_s < self.now_s() else joined

    cdef Joined find(self, u64 number):
        cdef u64[ENTRY_WORDS_MAX] words
        cdef u64* entry
        cdef Shape s
        cdef Ring* r
        cdef int i
        for i in range(2):
            r = &self.rings[i]
            spin_lock(r.lock)
            entry = _lookup(r, number)
            if entry != NULL:
                _shape(entry, &s)
                memcpy(words, entry, s.words * sizeof(u64))
                _hold_values(words, &s)
            spin_unlock(r.lock)
            if entry != NULL:
                return _joined(self, words, &s)
        return None

    cdef u32 take(self, u64 number, u64* entry) noexcept:
        cdef u64* found
        cdef Joined joined
        cdef Shape s
        cdef Ring* r
        cdef int i
        for i in range(2):
            r = &self.rings[i]
            spin_lock(r.lock)
            found = _lookup(r, number)
            if found != NULL:
                _shape(found, &s)
                memcpy(entry, found, s.words * sizeof(u64))
                _hold_values(entry, &s)
                if not entry_flags(entry) & IS_OBJECT:
                    found[1] |= <u64> HAS_FEEDBACK << FLAGS_SHIFT
            spin_unlock(r.lock)
            if found != NULL:
                joined = entry_object(entry)
                if joined is not None:
                    entry[1] |= <u64> joined.flags << FLAGS_SHIFT
                    joined.flags |= HAS_FEEDBACK
                return s.words
        return 0

    cdef void untake(self, const u64* entry) noexcept:
        cdef Joined joined = entry_object(entry)
        cdef u64* found
        cdef Ring* r
        cdef int i
        if joined is not None:
            joined.flags &= ~HAS_FEEDBACK
            return
        for i in range(2):
            r = &self.rings[i]
            spin_lock(r.lock)
            found = _lookup(r, entry[0])
            if found != NULL:
                found[1] &= ~(<u64> HAS_FEEDBACK << FLAGS_SHIFT)
            spin_unlock(r.lock)

    cdef Joined view(self, const u64* entry):
        cdef u64[ENTRY_WORDS_MAX] words
        cdef Shape s
        _shape(entry, &s)
        memcpy(words, entry, s.words * sizeof(u64))
        _hold_values(words, &s)
        return _joined(self, words, &s)

    def close(self):
        """Forget all answers, and those to come: who gave them has ended."""
        cdef void* objects[OBJECTS_MAX]
        cdef Ring* r
        cdef u32 n
        cdef int i
        for i in range(2):
            r = &self.rings[i]
            while True:
                spin_lock(r.lock)
                r.count_max = 0
                if r.count == 0:
                    spin_unlock(r.lock)
                    break
                n = _forget_oldest(r, objects)
                spin_unlock(r.lock)
                _forget_bytes(r, objects, n)
                _release(objects, n)

    def items(self):
        """Return the ids and answers, oldest first: those of Python's, then the others."""
        cdef list numbers = []
        cdef list found = []
        cdef Joined joined
        cdef Shape s
        cdef Ring* r
        cdef Chunk* chunk
        cdef u64 at
        cdef u64 n
        cdef u64* copied
        cdef int i
        for i in range(2):
            r = &self.rings[i]
            spin_lock(r.lock)
            copied, n = <u64*> malloc((r.count + 1) * sizeof(u64)), 0
            chunk, at = r.first, r.begin
            while copied != NULL and chunk != NULL:
                while at < chunk.used:
                    copied[n] = chunk.words[at]
                    n += 1
                    _shape(chunk.words + at, &s)
                    at += s.words
                chunk, at = chunk.next, 0
            spin_unlock(r.lock)
            if copied == NULL:
                raise MemoryError()
            for at in range(n):
                numbers.append(copied[at])
            free(copied)
        for number in numbers:
            joined = self.find(number)
            if joined is not None:
                found.append((f"{self.prefix.decode()}{number:x}", joined))
        return found


# -- copies of entries

cdef Joined entry_object(const u64* entry):
    if entry_flags(entry) & IS_OBJECT:
        return <Joined> <object> <PyObject*> entry[2]
    return None


cdef AnswerOwner entry_owner(const u64* entry):
    return <AnswerOwner> <object> <PyObject*> entry[2]


cdef str entry_user(const u64* entry):
    cdef Shape s
    cdef u16 flags = entry_flags(entry)
    if not flags & (HAS_USER | NAMES_USER):
        return ""
    _shape(entry, &s)
    if flags & HAS_USER:
        return <str> <object> <PyObject*> entry[s.user]
    if flags & NAMES_USER:
        return _text(entry, &s)[:entry[s.user]].decode()
    return ""


cdef inline const char* _text(const u64* entry, const Shape* s) noexcept nogil:
    """Return the name of the user of an entry that has it as text."""
    return <const char*> (entry + s.user + 1)


cdef double entry_given_s(const u64* entry) noexcept nogil:
    return <double> _given_us(entry) * 1e-6


cdef void entry_release(u64* entry) noexcept:
    cdef const u8* tags
    cdef Shape s
    cdef u32 i
    _shape(entry, &s)
    tags = <const u8*> (entry + s.tags)
    for i in range(s.n):
        if tags[i] == TAG_OBJECT:
            Py_DECREF(<object> <PyObject*> entry[s.outputs + i])
        else:
            _give_back(entry[s.outputs + i], tags[i])
    if entry_flags(entry) & HAS_USER:
        Py_DECREF(<object> <PyObject*> entry[s.user])
    Py_DECREF(<object> <PyObject*> entry[2])


cdef bint entry_read(const u64* entry, Reported* reported) except -1:
    cdef const u8* tags
    cdef Shape s
    cdef u32 n = <u32> (entry[3] & 0xFF), said = <u32> (entry[3] >> 8 & 0xFF)
    cdef u32 i, model = 0
    _shape(entry, &s)
    tags = <const u8*> (entry + s.tags)
    reported.n = n
    reported.features = 0
    if entry_flags(entry) & HAS_FEATURES:
        reported.features = <u32> entry[s.features]
        memcpy(reported.context, entry + s.features + 1, reported.features * sizeof(double))
    reported.qualified = False
    for i in range(n):
        while not entry[3] >> (16 + model) & 1:
            model += 1
        reported.place[i] = model
        if not _read_key(entry[s.outputs + i], tags[i], &reported.key[i]):
            return False
        if s.confidences:
            reported.sure[i] = entry[3] >> (32 + model) & 1
            memcpy(&reported.confidence[i], entry + s.confidences + i, sizeof(double))
        else:
            reported.sure[i] = 0
            if n == 1 and _is_core(tags[i]) and blob_of(entry[s.outputs + i]).has_confidence:
                reported.sure[i] = 1
                reported.confidence[i] = word_confidence(entry[s.outputs + i])
        model += 1
    reported.by_chance, reported.p = (entry_flags(entry) & HAS_PROBABILITY) != 0, 1.0
    if reported.by_chance:
        memcpy(&reported.p, entry + s.probability, sizeof(double))
    reported.user = text_key(STR_KEY, b"", 0)
    if entry_flags(entry) & HAS_USER:
        if not key_of_output(<object> <PyObject*> entry[s.user], &reported.user):
            return False
    elif entry_flags(entry) & NAMES_USER:
        reported.user = text_key(STR_KEY, _text(entry, &s), entry[s.user])
    if said != APART:
        reported.answer = reported.key[said]
        return True
    return _read_answer(entry[s.outputs + n], tags[n], &reported.answer)


cdef bint _read_key(u64 word, u8 tag, ValueKey* key) except -1:
    """Read an output. False: Python has to compare it."""
    cdef u64 i
    if tag == I64:
        key[0] = whole_key(word)
        return True
    if tag == TAG_OBJECT:
        return key_of_output(<object> <PyObject*> word, key)
    key[0] = value_key(word, tag, NULL)
    if key.kind == STR_KEY:
        for i in range(key.bits):       # bytes that are no UTF-8 are replaced in the text
            if key.data[i] & 0x80:
                return False
    return True


cdef bint _read_answer(u64 word, u8 tag, ValueKey* key) except -1:
    """Read an answer that no model gave. False: Python has to read it."""
    if tag == F64:
        key[0] = whole_key(word)        # a zero keeps its sign
        key.kind = FLOAT_KEY
        return True
    if tag == TAG_OBJECT and <object> <PyObject*> word is None:
        key.kind = 0
        return True
    if not _read_key(word, tag, key):
        return False
    return key.kind <= BYTES_KEY and key.kind != FLOAT_KEY and key.kind != LARGE_KEY


cdef int _insert(Ring* r, const u64* entry, const Shape* s, u64 extra) except -1:
    """Copy an entry of Python's to its ring, unless its number is known."""
    cdef u64* room = NULL
    cdef u64 place
    spin_lock(r.lock)
    place = _place_for(r, entry[0])
    if place != NO_PLACE:
        room = _room(r, s.words)
    if room != NULL and r.index[place] == 0:
        memcpy(room, entry, s.words * sizeof(u64))
        _keep(r, place, room, s.words, s.words * sizeof(u64) + extra)
        _hold_values(room, s)
    spin_unlock(r.lock)
    if room == NULL:
        raise MemoryError("no memory for an answer that feedback may come for")
    return 0


cdef int _trim(Ring* r, u64 now_us) except -1:
    """Remove the oldest answers of Python's that are too many, or whose time is over."""
    cdef void* objects[OBJECTS_MAX]
    cdef u32 n
    while True:
        spin_lock(r.lock)
        if not _is_over(r, now_us):
            spin_unlock(r.lock)
            return 0
        n = _forget_oldest(r, objects)
        spin_unlock(r.lock)
        _forget_bytes(r, objects, n)
        _release(objects, n)


cdef bint _write(AnswerWindow window, u64* entry, object learner, str user, object plan,
                 dict arrived, object answer, u64* extra) except -1:
    """Write an answer as an entry, without references of its own. False: it must be kept as an
    object."""
    cdef object models = read_member(&MODELS, plan), odds = read_member(&PROBABILITIES, plan)
    cdef object features = read_member(&FEATURES, plan), value, own
    cdef AnswerOwner owner
    cdef PyObject* outputs[OUTPUTS_MAX]
    cdef double confidences[OUTPUTS_MAX]
    cdef u8[OUTPUTS_MAX + 8] tags
    cdef PyObject* model
    cdef PyObject* prediction
    cdef Py_ssize_t at = 0, place = 0, k
    cdef u32 n = 0
    cdef u32 bits = 0
    cdef u32 sure = 0
    cdef u32 words = HEAD_WORDS
    cdef u32 said = APART
    cdef u32 i
    cdef u16 flags = IS_OWNED
    if type(models) is not tuple or type(odds) is not tuple:
        return False
    k = len(<tuple> models)
    if k > OUTPUTS_MAX or len(<tuple> odds) > 1 or (len(<tuple> odds) and k != 1):
        return False
    if len(read_member(&OBSERVERS, plan)) or not _are_features(features):
        return False
    if len(<tuple> odds):
        if type(odds[0]) is not float:
            return False
        flags |= HAS_PROBABILITY
    while PyDict_Next(arrived, &at, &model, &prediction):
        place = _place_in(models, model, place)
        if place < 0:
            return False                    # it is not of the plan
        value = read_member(&QUALIFIERS, <object> prediction)
        if value is not None and (type(value) is not dict or len(<dict> value) > 0):
            return False
        own = read_member(&CONFIDENCE, <object> prediction)
        if own is not None:
            if type(own) is not float:
                return False
            confidences[place] = PyFloat_AS_DOUBLE(own)
            sure |= <u32> 1 << place
        value = read_member(&OUTPUT, <object> prediction)
        outputs[place] = <PyObject*> value  # the prediction keeps it
        bits |= <u32> 1 << place
        place += 1
    for i in range(<u32> k):                # close up
        if bits >> i & 1:
            outputs[n], confidences[n] = outputs[i], confidences[i]
            n += 1
    for i in range(n):
        if _same(outputs[i], answer):
            said = i
            break
    if user:
        flags |= HAS_USER
        entry[words] = <u64> <PyObject*> user
        extra[0] += _object_bytes(user)
        words += 1
    if flags & HAS_PROBABILITY:
        _put_double(&entry[words], odds[0])
        words += 1
    if len(<tuple> features):
        flags |= HAS_FEATURES
        entry[words] = <u64> len(<tuple> features)
        words += 1
        for value in <tuple> features:
            _put_double(&entry[words], value)
            words += 1
    memset(tags, 0, sizeof(tags))
    for i in range(n):
        tags[i] = _put_output(&entry[words + i], outputs, i, extra)
    words += n
    if said == APART:
        outputs[0] = <PyObject*> answer
        tags[n] = _put_output(&entry[words], outputs, 0, extra)
        words += 1
    if sure:
        for i in range(n):
            _put_double(&entry[words + i], confidences[i])
        words += n
    memcpy(entry + words, tags, (n + (said == APART) + 7) // 8 * 8)
    entry[1] |= <u64> flags << FLAGS_SHIFT
    owner = window.owner_of(learner, models)
    entry[2] = <u64> <PyObject*> owner      # the window keeps it
    entry[3] = _numbers(n, said, bits, sure)
    return True


cdef inline bint _are_features(object features) except -1:
    """Return whether the features of a query have room in an entry."""
    if type(features) is not tuple or len(<tuple> features) > CONTEXT_MAX:
        return False
    for value in <tuple> features:
        if type(value) is not float:
            return False
    return True


cdef Py_ssize_t _place_in(tuple models, PyObject* model, Py_ssize_t first) except? -1:
    """Return the place of a model among those of a plan, looked for from `first` on; -1: none."""
    cdef Py_ssize_t k = len(models), i
    for i in range(first, k):
        if PyTuple_GET_ITEM(models, i) is model:
            return i
    for i in range(k):
        if PyObject_RichCompareBool(<object> PyTuple_GET_ITEM(models, i), <object> model, Py_EQ):
            return i
    return -1


cdef inline bint _same(PyObject* output, object answer) except -1:
    """Return whether an output is the answer, or its like."""
    cdef object kind = type(answer)
    if output is <PyObject*> answer:
        return True
    if type(<object> output) is not kind or not (kind is int or kind is str or kind is bytes):
        return False
    return PyObject_RichCompareBool(<object> output, answer, Py_EQ)


cdef inline void _put_double(u64* word, double value) noexcept:
    memcpy(word, &value, sizeof(double))


cdef u8 _put_output(u64* word, PyObject** outputs, u32 i, u64* extra) except 0:
    """Write an output: a number as it is, anything else as an object. Return its type."""
    cdef object output = <object> outputs[i]
    cdef object kind = type(output)
    cdef int overflow = 0
    cdef u32 j
    if kind is float:
        _put_double(word, PyFloat_AS_DOUBLE(output))
        return F64
    if kind is bool:
        word[0] = output is True
        return BOOL
    if kind is int:
        word[0] = <u64> PyLong_AsLongLongAndOverflow(output, &overflow)
        if not overflow:
            return I64
    if kind is str or kind is bytes:        # models often say the same: one object then
        for j in range(i):
            if _same(outputs[j], output):
                output = <object> outputs[j]
                break
    word[0] = <u64> <PyObject*> output
    extra[0] += _object_bytes(output)
    return TAG_OBJECT


cdef void _hold_objects(const u64* entry, const Shape* s) noexcept:
    """Take the references of an entry of Python's."""
    cdef const u8* tags = <const u8*> (entry + s.tags)
    cdef u32 i
    Py_INCREF(<object> <PyObject*> entry[2])
    if entry_flags(entry) & IS_OBJECT:
        return
    if entry_flags(entry) & HAS_USER:
        Py_INCREF(<object> <PyObject*> entry[s.user])
    for i in range(s.n):
        if tags[i] == TAG_OBJECT:
            Py_INCREF(<object> <PyObject*> entry[s.outputs + i])


cdef void _hold_values(const u64* entry, const Shape* s) noexcept:
    """Take the references of a copy of an entry, of either ring."""
    cdef const u8* tags = <const u8*> (entry + s.tags)
    cdef Value value
    cdef u32 i
    _hold_objects(entry, s)
    for i in range(s.n):
        if tags[i] == TAG_BLOB or tags[i] == TAG_ROW:
            value.word, value.tag = entry[s.outputs + i], tags[i]
            value_hold(&value)


cdef void _forget_bytes(Ring* r, void** objects, u32 n) noexcept:
    cdef u32 i
    for i in range(n):
        r.bytes -= _object_bytes(<object> <PyObject*> objects[i])


cdef void _release(void** objects, u32 n) noexcept:
    cdef u32 i
    for i in range(n):
        Py_DECREF(<object> <PyObject*> objects[i])


cdef Joined _joined(AnswerWindow window, u64* entry, const Shape* s):
    """Return an entry as an object. It gives up the references of the copy."""
    cdef object owner = <object> <PyObject*> entry[2]
    cdef Joined joined
    cdef const u8* tags = <const u8*> (entry + s.tags)
    cdef u16 flags = entry_flags(entry)
    cdef u32 n = <u32> (entry[3] & 0xFF), said = <u32> (entry[3] >> 8 & 0xFF), i
    Py_DECREF(owner)
    if flags & IS_OBJECT:
        return <Joined> owner
    joined = Joined.__new__(Joined)
    joined.owner = owner
    joined.window = window
    joined.number = entry[0]
    joined.learner = joined.owner.learner
    joined.late = ()
    joined.user = ""
    joined.flags = flags & KEPT
    joined.nbytes = s.words * sizeof(u64)
    joined.until_s = <double> _given_us(entry) * 1e-6 + window.window_s
    if flags & HAS_USER:
        joined.user = <str> <object> <PyObject*> entry[s.user]
        Py_DECREF(joined.user)
    elif flags & NAMES_USER:
        joined.user = entry_user(entry)
    if flags & HAS_PROBABILITY:
        memcpy(&joined.probability, entry + s.probability, sizeof(double))
    elif flags & HAS_FEATURES:
        joined.probability = NAN
    else:
        joined.selected = joined.owner.plan
    if flags & HAS_FEATURES:
        joined.features = _features(entry + s.features)
    joined.outputs = PyTuple_New(n)
    for i in range(n):
        value = _taken(joined, entry[s.outputs + i], tags[i])
        Py_INCREF(value)
        PyTuple_SET_ITEM(joined.outputs, i, value)
    if said == APART:
        joined.answer = _taken(joined, entry[s.outputs + n], tags[n])
    else:
        joined.answer = joined.outputs[said]
    joined.models = joined.owner.models
    if n != <u32> len(joined.models):
        joined.models = tuple([joined.models[i] for i in range(OUTPUTS_MAX)
                               if entry[3] >> (16 + i) & 1])
    if s.confidences:
        joined.confidences = _confidences(entry, s)
    elif n == 1 and _is_core(tags[0]):
        joined.confidences = _own_confidence(entry[s.outputs], tags[0])
    for i in range(s.n):
        _give_back(entry[s.outputs + i], tags[i])
    return joined


cdef tuple _features(const u64* at):
    """Return the features of a query: how many are there, and their values."""
    cdef tuple found = PyTuple_New(<Py_ssize_t> at[0])
    cdef object one
    cdef double value
    cdef u64 i
    for i in range(at[0]):
        memcpy(&value, at + 1 + i, sizeof(double))
        one = value
        Py_INCREF(one)
        PyTuple_SET_ITEM(found, <Py_ssize_t> i, one)
    return found


cdef tuple _confidences(const u64* entry, const Shape* s):
    cdef list found = []
    cdef double confidence
    cdef u32 i
    for i in range(OUTPUTS_MAX):
        if entry[3] >> (16 + i) & 1:
            memcpy(&confidence, entry + s.confidences + len(found), sizeof(double))
            found.append(confidence if entry[3] >> (32 + i) & 1 else None)
    return tuple(found)


cdef inline bint _is_core(u8 tag) noexcept nogil:
    """Return whether an output is a blob of the core."""
    return tag == TAG_BLOB or tag == TAG_ROW


cdef tuple _own_confidence(u64 word, u8 tag):
    """Return the confidence in the output of an HTTP thread; None if it has none."""
    cdef Value value
    value.word, value.tag = word, tag
    confidence = value_confidence(&value)
    return None if confidence is None else (confidence,)


cdef void _give_back(u64 word, u8 tag) noexcept:
    """Give up the reference of a copy to an output of the core."""
    cdef Value value
    if tag == TAG_BLOB or tag == TAG_ROW:
        value.word, value.tag = word, tag
        value_drop(&value)


cdef object _taken(Joined joined, u64 word, u8 tag):
    """Return an output of a copy of an entry, and give up its reference to an object."""
    cdef object found
    cdef Value value
    if tag == TAG_OBJECT:
        found = <object> <PyObject*> word
        Py_DECREF(found)
        joined.nbytes += _object_bytes(found)
        return found
    if tag == I64:
        return <i64> word
    value.word, value.tag = word, tag
    return value_object(&value)


# -- answers of the core, with the GIL

cdef int window_keep(AnswerWindow window, double now_s, u64 number, AnswerOwner owner, str user,
                     u32 n, u32 arrived, const Value* values, const ValueKey* keys,
                     const double* confidences, const u8* is_sure, u32 winner, double mean,
                     PyObject* other, double probability, const double* context,
                     u32 features) except -1:
    cdef u64[ENTRY_WORDS_MAX] entry
    cdef u8[OUTPUTS_MAX + 8] tags
    cdef u64 now_us = <u64> max(0.0, now_s * 1e6)
    cdef u64 extra = 0
    cdef u32 i, words = HEAD_WORDS, sure = 0, place = 0
    cdef u32 said = winner if winner < n else <u32> APART
    cdef u16 flags = IS_OWNED
    cdef Shape s
    if user:
        flags |= HAS_USER
        entry[words] = <u64> <PyObject*> user
        extra += _object_bytes(user)
        words += 1
    if probability == probability:
        flags |= HAS_PROBABILITY
        _put_double(&entry[words], probability)
        words += 1
    if features:
        flags |= HAS_FEATURES
        entry[words] = features
        memcpy(&entry[words + 1], context, features * sizeof(double))
        words += 1 + features
    memset(tags, 0, sizeof(tags))
    for i in range(n):
        tags[i] = _put_value(&entry[words + i], values, keys, i)
        while not arrived >> place & 1:
            place += 1
        sure |= <u32> (is_sure[i] != 0) << place
        place += 1
    words += n
    if said == APART:
        if other != NULL:
            tags[n] = _put_output(&entry[words], &other, 0, &extra)
        else:
            tags[n] = F64
            _put_double(&entry[words], mean)
        words += 1
    if sure:
        for i in range(n):
            _put_double(&entry[words + i], confidences[i])
        words += n
    memcpy(entry + words, tags, (n + (said == APART) + 7) // 8 * 8)
    entry[0] = number
    entry[1] = (now_us & ADDRESS) | <u64> flags << FLAGS_SHIFT
    entry[2] = <u64> <PyObject*> owner
    entry[3] = _numbers(n, said, arrived, sure)
    _shape(entry, &s)
    _insert(&window.rings[0], entry, &s, extra + _blob_bytes(entry, &s))
    return _trim(&window.rings[0], now_us)


cdef u8 _put_value(u64* word, const Value* values, const ValueKey* keys, u32 i) noexcept nogil:
    """Write an output: a number without its confidence, and a text like an earlier one as that.
    Return its type."""
    cdef u32 j
    cdef Blob* blob
    word[0] = values[i].word
    if values[i].tag != TAG_BLOB:
        return values[i].tag
    blob = blob_of(values[i].word)
    if blob.rank == 0 and blob.dtype <= F64:
        word[0] = 0
        memcpy(word, word_data(values[i].word), min(blob.nbytes, <u64> sizeof(u64)))
        return blob.dtype
    for j in range(i):
        if (values[j].tag == TAG_BLOB and keys[j].kind == keys[i].kind
                and keys_are_equal(&keys[j], &keys[i])):
            word[0] = values[j].word
            break
    return TAG_BLOB
