# Answers that feedback may still come for, by the number of their query, oldest first: compact
# entries in memory of their own, which the collector of Python does not walk.
#
# A window has two rings of entries. One has the answers that Python made; its entries may hold
# Python objects. The other has those that the HTTP threads of the core made, without any. An entry
# is some words in a chunk: a head, what else the answer has, the outputs, their types. The oldest
# chunk is freed when its last entry goes. An index finds an entry by its number.
#
# Threads: any. A spin lock guards a ring, for some dozen instructions. The ring of Python is used
# with the GIL only; `ring_add` may be called without it, for the other one.
from cpython.object cimport PyObject

from clipper_core.learning.feedback_update cimport Reported
from clipper_core.runtime.machine cimport atomic, i64, u16, u32, u64, u8
from clipper_core.wire.comparison cimport ValueKey
from clipper_core.wire.prediction cimport Value

cdef enum:
    CHUNK_WORDS = 8190          # with its head 64 KiB
    OUTPUTS_MAX = 16            # of an entry; answers with more are kept as objects
    HAS_FEEDBACK = 1            # flags of an answer: its feedback has come
    IS_WRITTEN = 2              # it is in the store, or is about to be written
    IS_CLAIMED = 4              # this server has claimed it in the store
    ENTRY_WORDS_MAX = 75        # of an entry
    RING_USER_MAX = 64          # bytes of the user's name in an entry without objects

cdef struct Chunk:
    Chunk* next
    u64 used
    u64[CHUNK_WORDS] words

cdef cppclass Ring:
    atomic[u32] lock
    Chunk* first
    u64 begin                   # word of the first chunk where the oldest entry begins
    Chunk* last
    Chunk* spare
    u64* index                  # addresses of entries, with 16 bits of their hash above
    u64 mask                    # places of the index, less one
    u32 shift
    u64 count
    u64 bytes                   # of entries, and of what they hold
    u64 count_max
    u64 bytes_max
    u64 window_us

# Return the number of an answer of a server of this name; 0: it is another's, or its id is a text.
ctypedef u64 (*NumberOf)(void* answer, void* node) noexcept

# Remember an answer of one output; forget the oldest that are too many, or whose time is over.
# owner: an AnswerOwner that the caller keeps. user: in UTF-8, of at most RING_USER_MAX bytes; of
# none: nobody's. False: it is larger than all may be, or there is no memory; then nothing has
# changed.
cdef bint ring_add(Ring* r, u64 number, void* owner, const u8* user, u32 user_bytes,
                   const Value* value, u64 now_us) noexcept nogil

# -- The learner whose models gave an answer, and the models that were queried.
cdef class AnswerOwner:
    cdef readonly object learner
    cdef readonly tuple models
    cdef readonly object plan   # of these models, all of them certain
    cdef object steps           # what learns labels of such answers; None: not looked for yet
    cdef bint fits              # whether it learns from entries
    cdef u32 place              # of the model among the learner's, if it is the only one

# -- An answer with what feedback needs: read from an entry, or kept as it is.
cdef class Joined:
    cdef readonly object learner, answer
    cdef readonly str user
    cdef readonly tuple late            # (model, future) of observers
    cdef readonly double until_s
    cdef readonly i64 nbytes
    cdef tuple models                   # that arrived; None: `by_model` has the predictions
    cdef tuple outputs
    cdef tuple confidences              # None: no model gave one
    cdef object selected                # the plan; None: it is made when it is read
    cdef AnswerOwner owner
    cdef double probability             # of the choice; NaN: it was certain, or is not known
    cdef tuple features                 # of the query; None: it has none
    cdef dict by_model
    cdef AnswerWindow window            # None: it is in no window
    cdef u64 number
    cdef u16 flags                      # if it is in no window, or not any more

    cdef object plan_of(self)
    cdef dict predictions(self)
    cdef bint is_set(self, u16 flag) noexcept
    # Set or clear a flag. Return whether it was set.
    cdef bint put(self, u16 flag, bint value) noexcept

# -- Copies of entries. Threads: any, with the GIL.
cdef inline u16 entry_flags(const u64* entry) noexcept nogil:
    return <u16> (entry[1] >> 48)
cdef void entry_release(u64* entry) noexcept
# Return the answer that an entry keeps as an object; None: it is no such entry.
cdef Joined entry_object(const u64* entry)
cdef AnswerOwner entry_owner(const u64* entry)      # of an entry that is no object
cdef double entry_given_s(const u64* entry) noexcept nogil
# Read an entry that is no object; `place` is by the owner's models. Return False if an output or
# the answer cannot be read without an object of Python.
cdef bint entry_read(const u64* entry, Reported* reported) except -1
cdef str entry_user(const u64* entry)

cdef class AnswerWindow:
    cdef Ring* rings                    # two: of Python, and of the HTTP threads
    cdef readonly double window_s
    cdef object clock
    cdef object answer_type, prediction_type, plan_type
    cdef str node
    cdef bytes prefix                   # of ids of this server
    cdef NumberOf number_of_answer      # NULL: answers are read by their `id`
    cdef list recent                    # owners, the last ones
    cdef Py_ssize_t turn                # of the next one in `recent`
    cdef dict owners                    # by learner and models
    cdef list pinned                    # owners of answers of the HTTP threads

    cdef double now_s(self) except -1
    # Return the number of an id of this server; 0 if it is none.
    cdef u64 number_of(self, object id) noexcept
    # Return the number of an answer of this server, or of its id; 0 if it is none.
    cdef u64 number_in(self, object prediction) except? 0
    cdef Joined find(self, u64 number)
    # Set `HAS_FEEDBACK` of an answer, and copy its entry, with its flags of before and references
    # of its own, which `entry_release` gives up. Return its words; 0: it is not here.
    cdef u32 take(self, u64 number, u64* entry) noexcept
    # Clear `HAS_FEEDBACK` of an answer that was taken.
    cdef void untake(self, const u64* entry) noexcept
    # Return a copy of an entry as an object.
    cdef Joined view(self, const u64* entry)
    cdef AnswerOwner owner_of(self, object learner, tuple models)

# Remember an answer of the core: n outputs of models of `owner`. now_s: what the window's clock
# says. arrived: bit set of these models' places. user: "" for nobody's.
# winner: the model whose output is the answer; n or more: the answer is `mean`, or the object
# `other` if that is not NULL. probability: of the model that was chosen; NaN: it was certain.
# context: the features of the query, at most CONTEXT_MAX.
# Raises MemoryError. Threads: any, with the GIL.
cdef int window_keep(AnswerWindow window, double now_s, u64 number, AnswerOwner owner, str user,
                     u32 n, u32 arrived, const Value* values, const ValueKey* keys,
                     const double* confidences, const u8* is_sure, u32 winner, double mean,
                     PyObject* other, double probability, const double* context,
                     u32 features) except -1
