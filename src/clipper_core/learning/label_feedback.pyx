"""Feedback with labels, read directly from the objects of queries: its record in the journal, the
update of the states, and how often each model was right."""
cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem, PyDict_GetItemWithError, PyDict_Next, PyDict_SetItem
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.object cimport PyObject, PyObject_RichCompareBool, Py_EQ
from libc.math cimport NAN
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

from clipper_core.learning.answer_window cimport (
    ENTRY_WORDS_MAX, HAS_FEEDBACK, IS_WRITTEN, AnswerOwner, AnswerWindow, Joined, entry_flags,
    entry_given_s, entry_object, entry_owner, entry_read, entry_release, entry_user,
)
from clipper_core.learning.bandit cimport (
    HEDGE, LOGODDS, MIXTURE, MODELS_MAX, STACKING, rule_weights,
)
from clipper_core.learning.class_evidence cimport (
    ClassEvidence, class_evidence_read, reports_classes,
)
from clipper_core.learning.feedback_update cimport (
    CONTEXT_MAX, FeedbackUpdate, Learner, Observation, OpenState, Reported, Votes,
    feedback_update_classes, feedback_update_learn, feedback_update_raw, is_label, kept,
    reads_classes,
)
from clipper_core.learning.mixture cimport mixture_is_untouched, mixture_shape, mixture_weights
from clipper_core.learning.policy_states cimport (
    Held, StateNumbers, StateParts, numbers_copied, numbers_dropped,
)
from clipper_core.learning.state_lock cimport StateLock
from clipper_core.runtime.machine cimport i32, u32
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.runtime.status cimport BAD_INPUT, raise_for
from clipper_core.wire.codec cimport crc32
from clipper_core.wire.comparison cimport (
    BOOL_KEY, FLOAT_KEY, STR_KEY, WHOLE_KEY, ValueKey, key_of_label, key_of_output,
    keys_are_equal, label_hash, label_of_key, whole_key,
)

cnp.import_array()

# -- Answers of policies that query all models and vote on labels, from the objects of a query.

cdef ObjectMember OUTPUT, CONFIDENCE, QUALIFIERS    # of a prediction
OUTPUT.name, CONFIDENCE.name, QUALIFIERS.name = b"output", b"confidence", b"qualifiers"


@cython.final
cdef class LabelVotes:
    """Combines labels by the weights of one rule. Threads: any.

    rule: of a policy that queries all models.  doubt: observations in a bin from which on they
    outweigh the raw confidence.
    """

    def __cinit__(self, Rule rule not None, double doubt):
        if rule.state.kind not in (HEDGE, LOGODDS, STACKING, MIXTURE):
            raise_for(BAD_INPUT, f"rule {rule.state.kind} queries one model")
        self.rule, self.doubt = rule, doubt

    @cython.binding(False)
    def answer(self, tuple models, cnp.ndarray rows, cnp.ndarray sure, u64 labels, predictions,
               Py_ssize_t missing):
        """Return (output, confidence, models used, agreement) of the predictions that arrived.
        None if an output is no label, their types differ, or a model is not of the state.

        rows, sure, labels: the state.  predictions: by model, objects with `output`, `confidence`
        and `qualifiers`.  missing: number of queried models without a prediction; together these
        are all of `models`.
        """
        cdef i64[MODELS_MAX] values
        cdef u8[MODELS_MAX] arrived
        cdef u8[MODELS_MAX] cells
        cdef double[MODELS_MAX] confidence
        cdef PyObject* said[MODELS_MAX]
        cdef PyObject* qualifiers[MODELS_MAX]
        cdef ClassEvidence named
        cdef list outputs = []
        cdef list used = []
        cdef list computed = []
        cdef PyObject* found
        cdef object kind = None, output, own
        cdef Observation observation
        cdef Learner learner
        cdef u32 i, j, winner = 0, k = <u32> len(models)
        cdef bint mixed = self.rule.state.kind == MIXTURE
        cdef bint reads = reads_classes(self.rule.state.kind), reported = False
        cdef double raw, share
        cdef double* bin
        if type(predictions) is not dict or not 2 <= k <= MODELS_MAX:
            return None
        if (len(<dict> predictions) + missing != k or rows.shape[0] != k + mixed
                or not used_bins(sure)):
            return None
        for i in range(k):
            found = PyDict_GetItem(<dict> predictions, models[i])
            arrived[i] = found != NULL
            values[i], cells[i], confidence[i] = 0, 0, NAN
            said[i] = NULL
            if found == NULL:
                outputs.append(None)
                continue
            output = read_member(&OUTPUT, <object> found)
            own = read_member(&CONFIDENCE, <object> found)
            if kind is None:
                kind = type(output)
                if kind is not int and kind is not str and kind is not bytes and kind is not bool:
                    return None
            elif type(output) is not kind:
                return None
            values[i] = i
            for j in range(i):
                if arrived[j] and values[j] == j and outputs[j] == output:
                    values[i], cells[i] = j, cells[j]
                    break
            else:
                if mixed:
                    cells[i] = <u8> label_hash(output, kind)
            outputs.append(output)
            used.append(models[i])
            said[i] = <PyObject*> output
            if reads:
                output = read_member(&QUALIFIERS, <object> found)
                qualifiers[i] = kept(output, computed)
                reported = reported or reports_classes(output)
            if own is not None:
                confidence[i] = own
                if confidence[i] != confidence[i]:
                    confidence[i] = 0.0
        if len(used) != len(<dict> predictions):
            return None
        learner.rule, learner.k, learner.labels = &self.rule.state, k, labels
        if mixed:
            learner.shape = mixture_shape(rows)
        else:
            self.rule.checked(rows)
        learner.rows, learner.sure = (<double*> cnp.PyArray_DATA(rows),
                                      <double*> cnp.PyArray_DATA(sure))
        learner.bins = <u32> sure.shape[0]
        observation.values, observation.arrived, observation.cells = values, arrived, cells
        observation.confidence, observation.label, observation.chosen = confidence, -1, k
        observation.context = NULL
        observation.named = NULL
        observation.queried = NULL
        observation.features = observation.right = 0
        if reported:
            if not class_evidence_read(&named, k, said, qualifiers, kind):
                return None
            observation.named = &named
        raw = feedback_update_raw(&learner, &observation, &winner)
        if raw < 0.0:
            return None
        share = _agreement(&learner, values, arrived, winner)
        if not mixed or not mixture_is_untouched(learner.rows, learner.shape, k):
            bin = learner.sure + 2 * min(<u32> (raw * learner.bins + 1e-9), learner.bins - 1)
            raw = (bin[0] + self.doubt * raw) / (bin[1] + self.doubt)
        else:
            share = raw
        output = outputs[winner] if winner < k else label_of_key(&named.label[winner - k], kind)
        return output, raw, tuple(used), share


cdef bint used_bins(cnp.ndarray sure):
    return (cnp.PyArray_TYPE(sure) == cnp.NPY_DOUBLE and sure.ndim == 2
            and cnp.PyArray_IS_C_CONTIGUOUS(sure) and sure.shape[0] > 0 and sure.shape[1] == 2)


cdef double _agreement(const Learner* learner, const i64* values, const u8* arrived,
                       u32 winner) noexcept nogil:
    """Return the weight of the models that agree with the winner, as a share of all weight."""
    cdef double[MODELS_MAX] weights
    cdef double total = 0.0, behind = 0.0
    cdef u32 i
    if winner >= learner.k:
        return 0.0
    if learner.rule.kind == MIXTURE:
        mixture_weights(learner.rows, learner.shape, learner.k, NULL, weights)
    else:
        rule_weights(learner.rule, learner.rows, learner.k, feedback_update_classes(learner.labels),
                     weights)
    for i in range(learner.k):
        total += weights[i]
        if arrived[i] and values[i] == values[winner]:
            behind += weights[i]
    return min(behind / total, 1.0) if total > 0.0 else 0.0


# -- The end of the journal's last segment, in memory.

cdef extern from "<sys/mman.h>" nogil:
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED
    void* MAP_FAILED
    void* mmap(void* addr, size_t length, int prot, int flags, int fd, long offset) noexcept
    int munmap(void* addr, size_t length) noexcept

cdef extern from "<errno.h>" nogil:
    int errno


cdef void head_of(u8* at, const u8* record, u64 nbytes) noexcept nogil:
    """The salt, all ones, makes sure that zeros are not a valid record."""
    cdef u32[2] head
    head[0] = <u32> nbytes
    head[1] = crc32(<u32> 0xFFFFFFFF ^ <u32> nbytes, record, nbytes)
    memcpy(at, head, HEAD_BYTES)


@cython.final
cdef class JournalEnd:
    """The pages at the end of a journal's last segment. Threads: any.

    keeps: False numbers records and keeps nothing.  at: offset of the next record.  room: offset
    that no append passes; 0 refuses all.  next: number of the next record.
    """

    def __cinit__(self, bint keeps):
        self.keeps = keeps
        self.next = 1

    def __dealloc__(self):
        if self.base != NULL:
            munmap(self.base, self.mapped)

    cdef u64 put(self, const u8* framed, u64 nbytes, u64 count) noexcept:
        if self.keeps:
            if self.at + nbytes > self.room or self.base == NULL:
                return 0
            memcpy(self.base + self.at, framed, nbytes)
            self.at += nbytes
        self.next += count
        return self.next - 1

    def append(self, bytes record not None):
        """Append a record. Return its number; 0, and nothing has changed, if there is no room."""
        cdef u64 n = <u64> PyBytes_GET_SIZE(record), end = self.at + HEAD_BYTES + n
        cdef const u8* data = <const u8*> PyBytes_AS_STRING(record)
        if self.keeps:
            if end > self.room or self.base == NULL:
                return 0
            memcpy(self.base + self.at + HEAD_BYTES, data, n)
            head_of(self.base + self.at, data, n)
            self.at = end
        self.next += 1
        return self.next - 1

    def append_framed(self, bytes framed not None, u64 count):
        """Append `count` records that have their heads. Return the number of the last; 0, and
        nothing has changed, if there is no room."""
        return self.put(<const u8*> PyBytes_AS_STRING(framed), <u64> PyBytes_GET_SIZE(framed),
                        count)

    def map(self, int fd, u64 nbytes):
        """Map the first bytes of a file, instead of what is mapped. Raises OSError."""
        cdef void* base
        self.unmap()
        base = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        if base == MAP_FAILED:
            raise OSError(errno, "mmap")
        self.base, self.mapped = <u8*> base, nbytes

    def unmap(self):
        """Unmap the pages; the kernel writes them. Afterwards no append succeeds."""
        self.room = 0
        if self.base != NULL:
            munmap(self.base, self.mapped)
        self.base = NULL
        self.mapped = 0


def framed(records):
    """Return records with their heads, one after another."""
    cdef bytes record
    cdef u64 total = 0, n
    for record in records:
        total += HEAD_BYTES + <u64> PyBytes_GET_SIZE(record)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> total)
    cdef u8* at = <u8*> PyBytes_AS_STRING(out)
    for record in records:
        n = <u64> PyBytes_GET_SIZE(record)
        memcpy(at + HEAD_BYTES, PyBytes_AS_STRING(record), n)
        head_of(at, at + HEAD_BYTES, n)
        at += HEAD_BYTES + n
    return out


# -- The update by one label: losses, calibration, the step of the rule.
cdef extern from "Python.h":
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    PyObject* PyTuple_GET_ITEM(object items, Py_ssize_t at)     # borrowed

cdef extern from *:
    u64 big_endian "__builtin_bswap64"(u64 value) noexcept nogil

cdef enum:
    DONE = 0                    # a list was written to the journal and applied
    ALONE = 1                   # each label must be learned by itself
    GENERAL = 2                 # the general path must learn it
    RECORD_MAX = 2048           # bytes of a record that is made here
    LABEL_MAX = 1024            # characters or bytes of a plain label
    UNWANTED_MAX = 4096         # users that are known not to be counted


cdef ObjectMember MODELS, PROBABILITIES, FEATURES   # of a plan
cdef ObjectMember STEPS, SHARED, WATCHER, CONTEXTS  # of a learner
cdef ObjectMember FEEDBACK                          # of the counts of a model
cdef ObjectMember DIFFERENCES                       # of a state
MODELS.name, PROBABILITIES.name, FEATURES.name = b"models", b"probabilities", b"features"
STEPS.name = b"steps"
SHARED.name = b"shared"
WATCHER.name = b"watcher"
CONTEXTS.name = b"contexts"
FEEDBACK.name, DIFFERENCES.name = b"feedback", b"differences"


cdef struct Bytes:
    u8* at
    u8* end
    bint full


cdef i64 _now_us() noexcept:
    """Return the Unix time."""
    cdef timespec now
    clock_gettime(CLOCK_REALTIME, &now)
    return <i64> now.tv_sec * 1000000 + now.tv_nsec // 1000


# -- MessagePack, each value in its shortest form

cdef inline void _put(Bytes* out, const void* data, u64 n) noexcept:
    if <u64> (out.end - out.at) < n:
        out.full = True
        return
    memcpy(out.at, data, n)
    out.at += n


cdef inline void _put_tag(Bytes* out, u8 tag, u64 value, u32 nbytes) noexcept:
    """A tag and a big-endian number of so many bytes, at most 8."""
    cdef u8[9] data
    cdef u8* at = out.at if out.end - out.at >= 9 else data
    at[0] = tag
    if nbytes:
        value = big_endian(value << (64 - 8 * nbytes))
        memcpy(at + 1, &value, 8)
    if at is out.at:
        out.at += nbytes + 1
    else:
        _put(out, data, nbytes + 1)


cdef inline void _put_int(Bytes* out, i64 value) noexcept:
    if 0 <= value < 128 and out.at < out.end:
        out.at[0] = <u8> value
        out.at += 1
    else:
        _put_any_int(out, value)


cdef void _put_any_int(Bytes* out, i64 value) noexcept:
    if value >= 0:
        if value < 128:
            _put_tag(out, <u8> value, 0, 0)
        elif value < 1 << 8:
            _put_tag(out, 0xcc, <u64> value, 1)
        elif value < 1 << 16:
            _put_tag(out, 0xcd, <u64> value, 2)
        elif value < <i64> 1 << 32:
            _put_tag(out, 0xce, <u64> value, 4)
        else:
            _put_tag(out, 0xcf, <u64> value, 8)
    elif value >= -32:
        _put_tag(out, <u8> (256 + value), 0, 0)
    elif value >= -(1 << 7):
        _put_tag(out, 0xd0, <u64> value, 1)
    elif value >= -(1 << 15):
        _put_tag(out, 0xd1, <u64> value, 2)
    elif value >= -(<i64> 1 << 31):
        _put_tag(out, 0xd2, <u64> value, 4)
    else:
        _put_tag(out, 0xd3, <u64> value, 8)


cdef inline void _put_double(Bytes* out, double value) noexcept:
    cdef u64 bits
    memcpy(&bits, &value, 8)
    _put_tag(out, 0xcb, bits, 8)


cdef inline void _put_array(Bytes* out, Py_ssize_t n) noexcept:
    if n < 16:
        _put_tag(out, <u8> (0x90 + n), 0, 0)
    else:
        _put_tag(out, 0xdc, <u64> n, 2)


cdef inline bint _put_value(Bytes* out, object value) except -1:
    """Write a None, bool, int, float, str or bytes. Return False for other types."""
    if value is None:
        _put_tag(out, 0xc0, 0, 0)
        return True
    if type(value) is float:
        _put_double(out, PyFloat_AS_DOUBLE(value))
        return True
    return _put_label(out, value)


cdef bint _put_label(Bytes* out, object value) except -1:
    """Write a bool, int, str or bytes. Return False for other types."""
    cdef ValueKey key
    if not is_label(type(value)) or not key_of_output(value, &key):
        return False
    _put_key(out, &key)
    return True


cdef inline void _put_key(Bytes* out, const ValueKey* key) noexcept:
    """Write a label or a float by its key; None if it has no kind."""
    if key.kind == WHOLE_KEY:
        _put_int(out, <i64> key.bits)
    else:
        _put_other_key(out, key)


cdef void _put_other_key(Bytes* out, const ValueKey* key) noexcept:
    cdef u64 n = key.bits
    if key.kind == FLOAT_KEY:
        _put_tag(out, 0xcb, n, 8)
        return
    if key.kind == BOOL_KEY:
        _put_tag(out, 0xc3 if n else 0xc2, 0, 0)
        return
    if key.kind == 0:
        _put_tag(out, 0xc0, 0, 0)
        return
    if key.kind == STR_KEY and n < 32:
        _put_tag(out, <u8> (0xa0 + n), 0, 0)
    elif n < 1 << 8:
        _put_tag(out, 0xd9 if key.kind == STR_KEY else 0xc4, n, 1)
    elif n < 1 << 16:
        _put_tag(out, 0xda if key.kind == STR_KEY else 0xc5, n, 2)
    else:
        out.full = True
        return
    _put(out, key.data, n)


cdef bint _put_values(Bytes* out, tuple values) except -1:
    cdef object value
    _put_array(out, len(values))
    for value in values:
        if not _put_value(out, value):
            return False
    return True


cdef bint _put_qualifiers(Bytes* out, object qualifiers) except -1:
    if type(qualifiers) is not dict:
        return False
    if len(<dict> qualifiers) < 16:
        _put_tag(out, <u8> (0x80 + len(<dict> qualifiers)), 0, 0)
    else:
        _put_tag(out, 0xde, <u64> len(<dict> qualifiers), 2)
    for name, value in (<dict> qualifiers).items():
        if not (_put_value(out, name) and _put_value(out, value)):
            return False
    return True


cdef struct Arrived:            # predictions of one query; the objects belong to them
    PyObject* prediction[MODELS_MAX]
    PyObject* model[MODELS_MAX]
    PyObject* output[MODELS_MAX]
    PyObject* confidence[MODELS_MAX]
    i32 place[MODELS_MAX]           # of the model among the learner's; below 0: none
    u8 right[MODELS_MAX]            # whether the output is the label
    u32 n
    bint qualified                  # whether any has qualifiers


cdef bint _gather(Arrived* arrived, object predictions, tuple models, dict place) except -1:
    """Read a dict of predictions. Return False if it is no dict, or too large.

    models, place: the learner's, and the position by model. A dict in their order, which is the
    usual one, is read without a lookup.
    """
    cdef PyObject* model
    cdef PyObject* prediction
    cdef PyObject* found
    cdef Py_ssize_t at = 0
    cdef object value
    cdef bint qualified = False
    cdef u32 n = 0
    if type(predictions) is not dict or len(<dict> predictions) > MODELS_MAX:
        return False
    while PyDict_Next(predictions, &at, &model, &prediction):
        value = read_member(&OUTPUT, <object> prediction)
        arrived.output[n] = <PyObject*> value
        value = read_member(&CONFIDENCE, <object> prediction)
        arrived.confidence[n] = <PyObject*> value
        arrived.model[n], arrived.prediction[n] = model, prediction
        value = read_member(&QUALIFIERS, <object> prediction)
        qualified |= value is not None and (type(value) is not dict or len(<dict> value) > 0)
        if n < <u32> len(models) and PyTuple_GET_ITEM(models, n) is model:
            arrived.place[n] = <i32> n
        else:
            found = PyDict_GetItemWithError(place, <object> model)
            arrived.place[n] = -1 if found == NULL else <i32> <object> found
        n += 1
    arrived.n, arrived.qualified = n, qualified
    return True


cdef inline bint _equal(PyObject* output, object label) except -1:
    return output is <PyObject*> label or PyObject_RichCompareBool(<object> output, label, Py_EQ)


cdef bint _judge(Arrived* arrived, object label) except -1:
    """Compare the outputs with a label. Return False unless all are labels of one type."""
    cdef u32 i
    if not is_label(type(label)):
        return False
    for i in range(arrived.n):
        if type(<object> arrived.output[i]) is not type(label):
            return False
        arrived.right[i] = _equal(arrived.output[i], label)
    return True


cdef bint _put_predictions(Bytes* out, const Arrived* arrived) except -1:
    """Write (place, output, confidence) of each model that has a place, and the qualifiers if
    there are any."""
    cdef object qualifiers = None
    cdef u32 i
    cdef Py_ssize_t n = 0
    for i in range(arrived.n):
        n += arrived.place[i] >= 0
    _put_array(out, n)
    for i in range(arrived.n):
        if arrived.place[i] < 0:
            continue
        if arrived.qualified:
            qualifiers = read_member(&QUALIFIERS, <object> arrived.prediction[i]) or None
        _put_array(out, 3 + (qualifiers is not None))
        _put_int(out, arrived.place[i])
        if not (_put_value(out, <object> arrived.output[i])
                and _put_value(out, <object> arrived.confidence[i])):
            return False
        if qualifiers is not None and not _put_qualifiers(out, qualifiers):
            return False
    return True


def record_of(bytes head, str user, dict place, tuple queried, tuple odds, seen, i64 time_us):
    """Return the record of an observation in MessagePack, the same bytes as the general encoder's.
    None if it is longer than 2048 bytes or holds arrays: the general encoder must write it.

    head: the fields before `user`, with the header of the array.  place: position by model.
    queried: positions of the queried models, with the probabilities `odds` of their choice.
    seen: an observation.
    """
    cdef object truth = seen.truth
    cdef u8[RECORD_MAX] buffer
    cdef Bytes out
    cdef Arrived arrived
    out.at, out.end, out.full = buffer, buffer + RECORD_MAX, False
    if len(queried) > MODELS_MAX or not _gather(&arrived, seen.predictions, (), place):
        return None
    _put_bytes(&out, head)
    if not (_put_value(&out, user) and _put_values(&out, queried) and _put_values(&out, odds)
            and _put_rest(&out, &arrived, truth.label, truth.score, seen.answer, seen.weight,
                          seen.plan.features, time_us)):
        return None
    return PyBytes_FromStringAndSize(<char*> buffer, out.at - buffer)


cdef inline void _put_bytes(Bytes* out, bytes encoded) noexcept:
    _put(out, PyBytes_AS_STRING(encoded), <u64> PyBytes_GET_SIZE(encoded))


cdef bytes _encoded(tuple values):
    """Return a tuple as a record holds it; empty if it is too long for one."""
    cdef u8[RECORD_MAX] buffer
    cdef Bytes out
    out.at, out.end, out.full = buffer, buffer + RECORD_MAX, False
    _put_values(&out, values)
    return b"" if out.full else PyBytes_FromStringAndSize(<char*> buffer, out.at - buffer)


cdef bint _put_rest(Bytes* out, const Arrived* arrived, object label, object score, object answer,
                    object weight, tuple features, i64 time_us) except -1:
    """Write the fields of a record after the models that were queried."""
    if len(features) > MODELS_MAX:
        return False
    if not (_put_predictions(out, arrived) and _put_value(out, label) and _put_value(out, score)
            and _put_value(out, answer) and _put_value(out, weight)
            and _put_values(out, features)):
        return False
    _put_int(out, time_us)
    return not out.full


# -- labels

@cython.binding(False)
def is_plain(label):
    """Return whether a label is a bool, an int of 64 bits, or a short ASCII str or bytes: then it
    needs no further check."""
    cdef ValueKey key
    return _plain_key(label, &key)


cdef bint _plain_key(object label, ValueKey* key) except -1:
    """Set the key of a plain label. Return False for another one."""
    cdef object kind = type(label)
    if kind is str:
        if not PyUnicode_IS_COMPACT_ASCII(label) or len(<str> label) > LABEL_MAX:
            return False
    elif kind is bytes:
        if PyBytes_GET_SIZE(label) > LABEL_MAX:
            return False
    elif kind is not int and kind is not bool:
        return False
    return key_of_label(label, kind, key)


@cython.binding(False)
def alike(label, predictions):
    """Return whether a label and all outputs of a dict of predictions are labels of one type."""
    cdef PyObject* model
    cdef PyObject* prediction
    cdef Py_ssize_t at = 0
    cdef object kind = type(label)
    if type(predictions) is not dict or not is_label(kind):
        return False
    while PyDict_Next(predictions, &at, &model, &prediction):
        if type(read_member(&OUTPUT, <object> prediction)) is not kind:
            return False
    return True


@cython.final
cdef class Mean:
    """A mean: a sum of values and their count. Threads: any."""

    def add(self, double value, double weight=1.0):
        """Add a value."""
        self.add_one(value, weight)

    cdef void add_one(self, double value, double weight) noexcept:
        self.add_sum(weight, value * weight)

    cdef void add_sum(self, double n, double total) noexcept:
        self.n += n
        self.total += total

    def stats(self):
        """Return the count and the mean."""
        return {"n": self.n, "mean": self.total / self.n} if self.n else {"n": 0.0}


@cython.final
cdef class Tally:
    """Counts of a list of labels, by the model's place."""
    cdef double[MODELS_MAX] outputs, right_outputs
    cdef double answers, right_answers

    cdef bint add(self, const Reported* reported, const ValueKey* right) noexcept:
        """Count a label. Return False, and count nothing, if the answer has another type."""
        cdef u32 i
        if reported.answer.kind != right.kind:
            return False
        self.answers += 1
        self.right_answers += keys_are_equal(&reported.answer, right)
        for i in range(reported.n):
            self.outputs[reported.place[i]] += 1
            self.right_outputs[reported.place[i]] += reported.right[i]
        return True


@cython.final
cdef class LabelCounts:
    """Counts of right labels, of the answer and of each model. Threads: any.

    models: by model, objects with a Mean `feedback`. Who removes one calls `forget`.  right: of the
    answer.
    """
    cdef readonly dict models
    cdef readonly Mean right
    cdef tuple looked_up        # models, all of which are counted
    cdef list means             # of these

    def __init__(self, dict models not None, Mean right not None):
        self.models, self.right = models, right

    def forget(self):
        """Look models up again, since some are no longer counted."""
        self.looked_up = None

    def count(self, predictions, label, answer, double weight):
        """Count a label. Return False, and count nothing, unless all are labels of one type.
        predictions: by model."""
        cdef Arrived arrived
        cdef PyObject* found
        cdef Mean mean
        cdef u32 i
        if (not _gather(&arrived, predictions, (), {}) or not _judge(&arrived, label)
                or type(answer) is not type(label)):
            return False
        self.right.add_one(_equal(<PyObject*> answer, label), weight)
        for i in range(arrived.n):
            found = PyDict_GetItemWithError(self.models, <object> arrived.model[i])
            if found != NULL:
                mean = read_member(&FEEDBACK, <object> found)
                mean.add_one(arrived.right[i], weight)
        return True

    cdef list means_of(self, tuple models):
        """Return the means of models, in their order; None for one that is not counted."""
        cdef list found
        cdef PyObject* one
        if models is self.looked_up:
            return self.means
        found = []
        for model in models:
            one = PyDict_GetItemWithError(self.models, model)
            found.append(None if one == NULL else <Mean?> read_member(&FEEDBACK, <object> one))
        if None not in found:
            self.looked_up, self.means = models, found
        return found

    cdef bint add(self, tuple models, const Reported* reported, const ValueKey* right) except -1:
        """Count a label of these models. Return False, and count nothing, if the answer has another
        type."""
        cdef list means
        cdef object mean
        cdef u32 i
        if reported.answer.kind != right.kind:
            return False
        means = self.means_of(models)
        self.right.add_one(keys_are_equal(&reported.answer, right), 1.0)
        for i in range(reported.n):
            mean = means[reported.place[i]]
            if mean is not None:
                (<Mean> mean).add_one(reported.right[i], 1.0)
        return True

    cdef bint add_tally(self, tuple models, Tally tally) except -1:
        cdef list means = self.means_of(models)
        cdef object mean
        cdef u32 i
        self.right.add_sum(tally.answers, tally.right_answers)
        for i in range(<u32> len(models)):
            mean = means[i]
            if mean is not None:
                (<Mean> mean).add_sum(tally.outputs[i], tally.right_outputs[i])
        return True


# -- labels of answers: each is read from the entry of the window, or from the objects of an answer
#    that is kept as such

cdef struct TakenLabel:
    u64 at                      # where the copy of the entry begins, in words
    ValueKey right              # the label
    Py_ssize_t row              # of the list
    bint is_new                 # whether its feedback had not come


@cython.final
cdef class TakenLabels:
    """Copies of the entries that a list of labels is about. Threads: any, one at a time."""
    cdef AnswerWindow table
    cdef u64* words
    cdef u64 used, size
    cdef TakenLabel* items
    cdef Py_ssize_t n

    def __cinit__(self, AnswerWindow table not None, Py_ssize_t n):
        self.table = table
        self.items = <TakenLabel*> malloc((n + 1) * sizeof(TakenLabel))
        if self.items == NULL:
            raise MemoryError()

    def __dealloc__(self):
        while self.n:
            self.pop()
        free(self.items)
        free(self.words)

    cdef u64* entry(self, Py_ssize_t i) noexcept:
        return self.words + self.items[i].at

    cdef bint take(self, u64 number, const ValueKey* right, Py_ssize_t row) except -1:
        """Take an answer. Return False, and keep nothing, if it is not here."""
        cdef u64* grown
        cdef u64 size = self.size + self.size // 2 + (1 << 12)
        cdef TakenLabel* item = &self.items[self.n]
        cdef u32 words
        if self.used + ENTRY_WORDS_MAX > self.size:
            grown = <u64*> realloc(self.words, size * sizeof(u64))
            if grown == NULL:
                raise MemoryError()
            self.words, self.size = grown, size
        words = self.table.take(number, self.words + self.used)
        if not words:
            return False
        item.at = self.used
        item.right = right[0]
        item.row = row
        item.is_new = not entry_flags(self.words + self.used) & HAS_FEEDBACK
        self.used += words
        self.n += 1
        return True

    cdef void pop(self) noexcept:
        """Forget the last answer."""
        self.n -= 1
        self.used = self.items[self.n].at
        entry_release(self.words + self.used)

    cdef void untake(self, Py_ssize_t first) noexcept:
        """Allow feedback about the answers from `first` on again."""
        cdef Py_ssize_t i
        for i in range(first, self.n):
            if self.items[i].is_new:
                self.table.untake(self.entry(i))


@cython.final
cdef class OpenContext:
    """A context's state, open, and the last row of a list that it has learned."""
    cdef Held held
    cdef OpenState state
    cdef Py_ssize_t row

    cdef bint learn(self, Votes* votes, Py_ssize_t row) except -1:
        self.state.learn(votes)
        self.row = row
        return True


@cython.final
cdef class LabelSteps:
    """Writes labels to the journal and learns them, for one learner. Threads: any.

    learner: with `application`, `head`, `models`, `place`, `shared`, `contexts`, `learns`,
    `watcher`, whose `labels` are always the same, `state(user)`, `admit(user)`, `ready(user)`,
    `apply(user, seen, number)`, `observe(user, seen, number)`, `wants(user)` and
    `count_user(user, seen)`.  lock: of the states.  journal: with `end` and
    `append_framed(records, count)`.  update: what the core can learn of its policy, or None.  node:
    this server's name.  dirty: of (learner, user).  observation: makes one of a plan, predictions,
    a label and an answer.  commit: called with the number of a record; returns whether it is to be
    called for the next one too.
    """
    cdef object learner, journal, observation, commit
    cdef readonly str application
    cdef str node
    cdef StateLock lock
    cdef FeedbackUpdate update
    cdef JournalEnd end
    cdef dict place, dirty
    cdef tuple models
    cdef bytes head, everyone   # fields of a record: the first ones; that all models were queried
    cdef tuple shared_key       # in `dirty`
    cdef StateParts parts       # of users' states
    cdef object state_models    # the last models of a state that are equal to `models`
    cdef object watched         # the last observer
    cdef LabelCounts counts     # its own; None: it has none
    cdef object asked           # the differences between users for which these are not counted:
    cdef set unwanted
    cdef bint learns, commits

    def __init__(self, learner, StateLock lock not None, journal, FeedbackUpdate update,
                 str node not None, dict dirty not None, observation, commit):
        self.learner, self.lock, self.journal, self.update = learner, lock, journal, update
        self.node, self.dirty, self.observation, self.commit = node, dirty, observation, commit
        self.application, self.place, self.models = (learner.application, learner.place,
                                                     learner.models)
        self.end, self.learns, self.commits = journal.end, learner.learns, True
        self.head, self.everyone = learner.head, _encoded(tuple(range(len(self.models))))
        self.shared_key = (learner, "")
        self.unwanted = set()

    # -- reading and writing

    cdef bint place_of(self, tuple queried, u32* place) except -1:
        """Find out which models were queried: `place` is of the only one, or k if all were. Return
        False for any others."""
        cdef PyObject* found
        place[0] = <u32> len(self.models)
        if not self.head or not self.everyone or place[0] > MODELS_MAX:
            return False
        if len(queried) != 1:
            return queried is self.models or queried == self.models
        found = PyDict_GetItemWithError(self.place, queried[0])
        if found == NULL:
            return False
        place[0] = <object> found
        return True

    cdef bint read(self, const u64* entry, Reported* reported, const ValueKey* right) except -1:
        """Read an answer, and compare it with a label. False: the general path must learn it."""
        cdef Joined joined = entry_object(entry)
        cdef AnswerOwner owner
        cdef u32 i
        if joined is not None:
            if not self.read_object(joined, reported):
                return False
        else:
            owner = entry_owner(entry)
            if not owner.fits or not entry_read(entry, reported):
                return False
            reported.chosen = owner.place
            if reported.n == 1 and len(owner.models) == 1:
                reported.place[0] = owner.place
        for i in range(reported.n):
            if reported.key[i].kind != right.kind:
                return False
            reported.right[i] = keys_are_equal(&reported.key[i], right)
        return True

    cdef bint read_object(self, Joined joined, Reported* reported) except -1:
        """Read an answer that is kept as an object. False: the general path must learn it."""
        cdef object plan = joined.plan_of()
        cdef object queried = read_member(&MODELS, plan), odds = read_member(&PROBABILITIES, plan)
        cdef object features = read_member(&FEATURES, plan)
        cdef object value
        cdef Arrived arrived
        cdef u32 i
        if (type(queried) is not tuple or type(odds) is not tuple or type(features) is not tuple
                or len(joined.late) or len(<tuple> features) > CONTEXT_MAX
                or not self.place_of(queried, &reported.chosen)):
            return False
        if len(<tuple> odds) and (len(<tuple> odds) != len(<tuple> queried)
                                  or len(<tuple> odds) != 1 or type(odds[0]) is not float):
            return False
        if not _gather(&arrived, joined.predictions(), self.models, self.place):
            return False
        reported.by_chance, reported.p = len(<tuple> odds) > 0, 1.0
        if reported.by_chance:
            reported.p = odds[0]
        reported.features = <u32> len(<tuple> features)
        for i in range(reported.features):
            if type(features[i]) is not float:
                return False
            reported.context[i] = features[i]
        reported.n, reported.qualified = arrived.n, arrived.qualified
        for i in range(arrived.n):
            if arrived.place[i] < 0 or not key_of_output(<object> arrived.output[i],
                                                         &reported.key[i]):
                return False
            reported.place[i] = <u32> arrived.place[i]
            value = <object> arrived.confidence[i]
            reported.sure[i] = value is not None
            if value is not None:
                if type(value) is not float:
                    return False
                reported.confidence[i] = PyFloat_AS_DOUBLE(value)
            reported.output[i] = arrived.output[i]
            if arrived.qualified:
                value = read_member(&QUALIFIERS, <object> arrived.prediction[i])
                reported.qualifiers[i] = <PyObject*> value
        if not key_of_output(joined.user, &reported.user):
            return False
        return _read_answer(joined.answer, &reported.answer)

    cdef bint write(self, Bytes* out, const Reported* reported, const ValueKey* right,
                    i64 time_us) except -1:
        """Write the record of a label of weight 1, with its head. False: the general path must
        learn it."""
        cdef u8* start = out.at
        cdef object qualifiers = None
        cdef u32 i
        out.at += HEAD_BYTES
        _put_bytes(out, self.head)
        _put_key(out, &reported.user)
        if reported.chosen == <u32> len(self.models):
            _put_bytes(out, self.everyone)
        else:
            _put_array(out, 1)
            _put_int(out, reported.chosen)
        _put_array(out, reported.by_chance)
        if reported.by_chance:
            _put_double(out, reported.p)
        _put_array(out, reported.n)
        for i in range(reported.n):
            if reported.qualified:
                qualifiers = <object> reported.qualifiers[i] or None
            _put_array(out, 3 + (qualifiers is not None))
            _put_int(out, reported.place[i])
            _put_key(out, &reported.key[i])
            if reported.sure[i]:
                _put_double(out, reported.confidence[i])
            else:
                _put_tag(out, 0xc0, 0, 0)
            if qualifiers is not None and not _put_qualifiers(out, qualifiers):
                return False
        _put_key(out, right)
        _put_tag(out, 0xc0, 0, 0)               # no score
        _put_key(out, &reported.answer)
        _put_double(out, 1.0)                   # the weight
        _put_array(out, reported.features)
        for i in range(reported.features):
            _put_double(out, reported.context[i])
        _put_int(out, time_us)
        head_of(start, start + HEAD_BYTES, <u64> (out.at - start) - HEAD_BYTES)
        return not out.full

    cdef bint prepare(self, Bytes* out, const u64* entry, Reported* reported, Votes* votes,
                      object label, const ValueKey* right, i64 time_us) except -1:
        """Write the record of a label, and read its votes if the core learns them. False: the
        general path must learn it."""
        if not self.read(entry, reported, right):
            return False
        if not self.write(out, reported, right, time_us):
            return False
        return self.update is None or self.update.read(votes, <u32> len(self.models), reported,
                                                       right, label, 1.0)

    cdef u64 append(self, const u8* records, u64 nbytes, u64 count) except 0:
        cdef u64 number = self.end.put(records, nbytes, count)
        return number if number else <u64> self.journal.append_framed(
            PyBytes_FromStringAndSize(<const char*> records, <Py_ssize_t> nbytes), count)

    cdef object seen(self, AnswerWindow table, const u64* entry, object label):
        """Return an answer with its label, as an observation."""
        cdef Joined joined = table.view(entry)
        return self.observation(joined.plan_of(), joined.predictions(), label, joined.answer)

    # -- one label

    cdef u64 learn(self, AnswerWindow table, const u64* entry, object label,
                   const ValueKey* right) except? 0:
        """Write and learn a label. Return the number of the record; 0, and nothing has changed, if
        the general path must learn it."""
        cdef u8[HEAD_BYTES + RECORD_MAX] buffer
        cdef Bytes out
        cdef Reported reported
        cdef Votes votes
        cdef Held own = None
        cdef u64 number
        cdef str user
        out.at, out.end, out.full = buffer, buffer + HEAD_BYTES + RECORD_MAX, False
        if not self.prepare(&out, entry, &reported, &votes, label, right, _now_us()):
            return 0
        user = _user_of(entry)
        self.lock.take()
        try:
            if user:
                own = self.known(user)
                if own is None:
                    self.learner.admit(user)
            number = self.append(buffer, <u64> (out.at - buffer), 1)
            if self.update is not None:
                if user:
                    self.step(self.ready(user, own), &votes, table, entry, label, user, number)
                self.step(self.shared(), &votes, table, entry, label, "", number)
                if user and self.wants(user):
                    self.learner.count_user(user, self.seen(table, entry, label))
            elif self.learns:
                self.learner.observe(user, self.seen(table, entry, label), number)
        finally:
            self.lock.give()
        self.sync(number)
        self.notify(table, entry, &reported, label, right)
        return number

    cdef Held known(self, str user):
        """Return the state of a user; None if it is not in memory."""
        cdef object held = read_member(&CONTEXTS, self.learner)
        cdef PyObject* found = PyDict_GetItem(<dict?> held, user)
        return None if found == NULL else <Held> <object> found

    cdef Held ready(self, str user, Held held):
        """Return the state of a user, about to learn; held: that state, None if it is not in
        memory."""
        if held is None or held.prior is not None:
            return self.learner.ready(user)
        held.touched = True
        return held

    cdef Held shared(self):
        """Return the shared state, about to learn."""
        cdef Held held = read_member(&SHARED, self.learner)
        return held if held.prior is None else self.learner.ready("")

    cdef bint wants(self, str user) except -1:
        """Return whether what the shared state has learned of this user is to be counted."""
        cdef Held held = read_member(&SHARED, self.learner)
        cdef object differences
        if held.known is None:
            differences = held.parts.differences
        else:
            differences = read_member(&DIFFERENCES, held.known)
        if differences is not self.asked or len(self.unwanted) >= UNWANTED_MAX:
            self.asked = differences
            self.unwanted.clear()
        if user in self.unwanted:
            return False
        if self.learner.wants(user):
            return True
        self.unwanted.add(user)
        return False

    cdef bint step(self, Held held, Votes* votes, AnswerWindow table, const u64* entry,
                   object label, str context, u64 number) except -1:
        """Have a state learn the observation of this number."""
        cdef OpenState opened
        if held.applied_to(self.node) >= number:
            return True
        if not votes.anyone or not self.step_block(held, votes, number):
            opened = self.update.open(held.state, self.models)
            if opened is None:      # the policy repairs it, or logs the error
                self.learner.apply(context, self.seen(table, entry, label), number)
                return True
            opened.learn(votes)
            return self.close(held, opened, context, number)
        if not held.since:
            held.since = number
        return self.list_to_write(held, context)

    cdef bint list_to_write(self, Held held, str context) except -1:
        """Note that a state is to be written to the store."""
        if held.is_listed:
            return True
        PyDict_SetItem(self.dirty, (self.learner, context) if context else self.shared_key, None)
        held.is_listed = True
        return True

    cdef bint step_block(self, Held held, Votes* votes, u64 number) except -1:
        """Have a copy of the newest block learn, and publish it. False, and nothing has changed: an
        OpenState has to learn."""
        cdef StateNumbers* newest = held.newest()
        cdef StateNumbers* numbers
        cdef StateParts parts
        cdef Learner learner
        cdef bint is_finite = False
        if newest == NULL:
            return False
        parts = held.beside(self.update.make, self.node, self.parts)
        if parts.models is not self.state_models:
            if parts.models != self.models:
                return False
            self.state_models = parts.models
        numbers = numbers_copied(newest, &is_finite)
        if numbers == NULL:
            raise MemoryError()
        if not is_finite or not self.update.begin(&learner, numbers, <u32> len(self.models), votes):
            numbers_dropped(numbers)
            return False
        feedback_update_learn(&learner, &votes.observation)
        numbers.seen, numbers.labels = learner.seen, learner.labels
        held.learned(numbers, parts, number)
        self.parts = parts
        return True

    cdef bint close(self, Held held, OpenState opened, str context, u64 number) except -1:
        if opened.changed:
            held.publish(opened.closed())
        held.applied[self.node] = number
        if not held.since:
            held.since = number
        return self.list_to_write(held, context)

    cdef bint notify(self, AnswerWindow table, const u64* entry, const Reported* reported,
                     object label, const ValueKey* right) except -1:
        """Notify the learner's observer, if it has one."""
        cdef object watcher = read_member(&WATCHER, self.learner)
        cdef LabelCounts counts
        cdef Joined joined
        if watcher is None:
            return True
        counts = self.counts_of(watcher)
        if counts is not None:
            if counts.add(self.models, reported, right):
                return True
        else:
            joined = table.view(entry)
            if watcher.on_label(joined.predictions(), label, joined.answer):
                return True
        return watcher.on_feedback(self.seen(table, entry, label))

    cdef LabelCounts counts_of(self, object watcher):
        """Return what counts labels for an observer; None: it has none."""
        if watcher is not self.watched:
            self.counts = watcher.labels
            self.watched = watcher
        return self.counts

    cdef bint sync(self, u64 number) except -1:
        if self.commits:
            self.commits = self.commit(number)
        return True

    # -- a list of labels

    cdef int learn_block(self, TakenLabels taken, list labels) except -1:
        """Write the records of labels together and apply them. Return DONE; or ALONE or GENERAL,
        and nothing has changed. The caller holds the lock."""
        cdef Py_ssize_t i, n = taken.n
        cdef TakenLabel* item
        cdef u8* records = NULL
        cdef u8* grown
        cdef u64 size = 0, last = 0
        cdef i64 now = _now_us()
        cdef Bytes out
        cdef Reported reported
        cdef Votes votes
        cdef Tally tally = Tally.__new__(Tally)
        cdef list apart = []
        cdef dict contexts = {}
        cdef OpenContext shared = None
        cdef OpenContext own
        cdef str user
        cdef set wanted
        cdef bint together = True
        if self.learns:
            shared = None if self.update is None else self.open(contexts, "")
            together = shared is not None
        out.at = NULL
        out.full = False
        try:
            for i in range(n):
                if size < <u64> (out.at - records) + HEAD_BYTES + RECORD_MAX:
                    size += size // 2 + (1 << 16)
                    grown = <u8*> realloc(records, size)
                    if grown == NULL:
                        raise MemoryError()
                    out.at, records = grown + (out.at - records), grown
                out.end = out.at + HEAD_BYTES + RECORD_MAX
                item = &taken.items[i]
                if not self.prepare(&out, taken.entry(i), &reported, &votes, labels[item.row],
                                    &item.right, now):
                    return GENERAL
                if self.learns and together:
                    user = _user_of(taken.entry(i))
                    if user:
                        own = self.open(contexts, user)
                        if own is None:
                            together = False
                            continue
                        own.learn(&votes, i)
                    shared.learn(&votes, i)
                if not tally.add(&reported, &item.right):
                    apart.append(i)
            if not together:
                return ALONE
            last = self.append(records, <u64> (out.at - records), <u64> n)
        finally:
            free(records)
        for context, one in contexts.items():
            if (<OpenContext> one).held.prior is not None:
                self.learner.ready(context)
            self.close((<OpenContext> one).held, (<OpenContext> one).state, context,
                       last - <u64> (n - 1 - (<OpenContext> one).row))
        wanted = {context for context in contexts if context and self.wants(context)}
        for i in range(n if wanted else 0):
            user = _user_of(taken.entry(i))
            if user in wanted and self.wants(user):
                self.learner.count_user(user, self.seen(taken.table, taken.entry(i),
                                                        labels[taken.items[i].row]))
        self.notify_tally(tally, taken, labels, apart)
        return DONE

    cdef OpenContext open(self, dict contexts, str context):
        """Return the open state of a context, which is opened at first use. None if it is not in
        memory, or only its policy can update it."""
        cdef PyObject* found = PyDict_GetItem(contexts, context)
        cdef OpenContext one
        if found != NULL:
            return <OpenContext> <object> found
        one = OpenContext.__new__(OpenContext)
        one.held = self.known(context)
        if one.held is None or (one.held.prior is not None and context):
            return None
        if one.held.prior is not None:
            self.learner.state(None)    # follows what it begins from
        one.held.touched = True
        one.state = self.update.open(one.held.state, self.models)
        if one.state is None:
            return None
        contexts[context] = one
        return one

    cdef bint notify_tally(self, Tally tally, TakenLabels taken, list labels,
                           list apart) except -1:
        """Notify the learner's observer of a list; apart: the places that are not in the tally."""
        cdef object watcher = read_member(&WATCHER, self.learner)
        cdef LabelCounts counts
        cdef object label
        cdef Py_ssize_t i
        cdef Joined joined
        if watcher is None:
            return True
        counts = self.counts_of(watcher)
        if counts is None:
            apart = list(range(taken.n))
        else:
            counts.add_tally(self.models, tally)
        for i in apart:
            label = labels[taken.items[i].row]
            joined = taken.table.view(taken.entry(i))
            if counts is None and watcher.on_label(joined.predictions(), label, joined.answer):
                continue
            if not watcher.on_feedback(self.seen(taken.table, taken.entry(i), label)):
                break
        return True


cdef bint _read_answer(object answer, ValueKey* key) except -1:
    """Read an answer as a record writes it. False: the general encoder has to."""
    cdef double number
    if answer is None:
        key.kind = 0
        return True
    if type(answer) is not float:
        return is_label(type(answer)) and key_of_output(answer, key)
    key[0] = whole_key(0)
    key.kind = FLOAT_KEY
    number = answer                     # a zero keeps its sign
    memcpy(&key.bits, &number, sizeof(double))
    return True


cdef str _user_of(const u64* entry):
    cdef Joined joined = entry_object(entry)
    return entry_user(entry) if joined is None else joined.user


cdef LabelSteps _steps_of(AnswerWindow table, const u64* entry, str application, double now):
    """Return what learns labels of an answer; None if the general path must handle it."""
    cdef Joined joined = entry_object(entry)
    cdef AnswerOwner owner
    cdef LabelSteps steps
    cdef double until_s
    if joined is not None:
        until_s = joined.until_s
        steps = <LabelSteps?> read_member(&STEPS, joined.learner)
    else:
        until_s = entry_given_s(entry) + table.window_s
        owner = entry_owner(entry)
        if owner.steps is None:
            steps = <LabelSteps?> read_member(&STEPS, owner.learner)
            owner.fits = steps.place_of(owner.models, &owner.place)
            owner.steps = steps
        steps = <LabelSteps> owner.steps
    if until_s < now or entry_flags(entry) & IS_WRITTEN:
        return None
    if steps.application is not application and steps.application != application:
        return None
    return steps


cdef int label_learned(AnswerWindow table, object prediction, str application,
                       object label) except -1:
    cdef u64[ENTRY_WORDS_MAX] entry
    cdef ValueKey right
    cdef LabelSteps steps
    cdef u64 number = 0
    cdef bint is_new
    if not _plain_key(label, &right) or not table.take(table.number_in(prediction), entry):
        return LEFT
    is_new = not entry_flags(entry) & HAS_FEEDBACK
    try:
        steps = _steps_of(table, entry, application, table.now_s())
        if steps is not None and not is_new:
            return KNOWN_BEFORE
        if steps is not None:
            number = steps.learn(table, entry, label, &right)
    finally:                    # what the journal refuses may be sent again
        if is_new and not number:
            table.untake(entry)
        entry_release(entry)
    return LEARNED if number else LEFT


def learn_label(AnswerWindow table not None, prediction, str application, label):
    """Learn the label of an answer of this server. Return True if it counts, False if the answer
    has feedback already; None, and nothing has changed, if the general path must learn it.

    prediction: an answer or its id.
    """
    cdef int outcome = label_learned(table, prediction, application, label)
    return None if outcome == LEFT else outcome == LEARNED


def learn_labels(AnswerWindow table not None, list predictions not None, str application,
                 list labels not None):
    """Learn labels of answers of this server. Return how many count; the others have feedback
    already. Return None, and nothing has changed, if the general path must learn them.

    Raises what the journal raises: then all may be sent again, and what was written counts once.
    """
    cdef TakenLabels taken = TakenLabels(table, len(predictions))
    cdef double now = table.now_s()
    cdef ValueKey right
    cdef LabelSteps steps = None
    cdef LabelSteps one
    cdef Py_ssize_t i, done = 0
    cdef int outcome = DONE
    try:
        for i in range(len(predictions)):
            if (not _plain_key(labels[i], &right)
                    or not taken.take(table.number_in(predictions[i]), &right, i)):
                outcome = GENERAL
                break
            one = _steps_of(table, taken.entry(taken.n - 1), application, now)
            if one is None or (steps is not None and one is not steps):
                outcome = GENERAL
                break
            steps = one
            if not taken.items[taken.n - 1].is_new:
                taken.pop()
        if outcome == DONE and taken.n:
            steps.lock.take()
            try:
                outcome = steps.learn_block(taken, labels)
            finally:
                steps.lock.give()
        if outcome == ALONE:
            while done < taken.n and steps.learn(table, taken.entry(done),
                                                 labels[taken.items[done].row],
                                                 &taken.items[done].right):
                done += 1
        elif outcome == DONE:
            done = taken.n
            if done:
                steps.sync(steps.end.next - 1)
    finally:                    # what the journal refuses may be sent again
        taken.untake(done)
    return None if outcome == GENERAL else done


def take_listed(list ids not None, AnswerWindow table not None, str application):
    """Take the answers of an application that have no feedback yet, each once, and set their
    `has_feedback`.

    Returns (positions in `ids`, the answers, positions of unknown ids).
    """
    cdef list places = []
    cdef list found = []
    cdef list unknown = []
    cdef Py_ssize_t i
    cdef Joined joined
    cdef object learner = None
    cdef bint ours = False
    cdef double now = table.now_s()
    for i in range(len(ids)):
        joined = table.find(table.number_of(ids[i]))
        if joined is None:
            unknown.append(i)
            continue
        if joined.learner is not learner:
            learner = joined.learner
            ours = learner.application == application
        if not ours or joined.until_s < now:
            unknown.append(i)
        elif not joined.put(HAS_FEEDBACK, True):
            places.append(i)
            found.append(joined)
    return places, found, unknown
