"""Feedback with labels, read directly from the objects of queries: its record in the journal, the
update of the states, and how often each model was right."""
cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem, PyDict_GetItemWithError, PyDict_Next
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.object cimport PyObject, PyObject_RichCompareBool, Py_EQ
from libc.math cimport NAN
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

from clipper_core.learning.answer_window cimport (
    HAS_FEEDBACK, IS_WRITTEN, AnswerWindow, Joined,
)
from clipper_core.learning.bandit cimport (
    HEDGE, LOGODDS, MIXTURE, MODELS_MAX, STACKING, rule_weights,
)
from clipper_core.learning.class_evidence cimport (
    ClassEvidence, class_evidence_read, reports_classes,
)
from clipper_core.learning.feedback_update cimport (
    FeedbackUpdate, Learner, Observation, OpenState, Votes, feedback_update_classes,
    feedback_update_raw, is_label, kept, reads_classes,
)
from clipper_core.learning.mixture cimport mixture_is_untouched, mixture_shape, mixture_weights
from clipper_core.learning.policy_states cimport Held
from clipper_core.runtime.machine cimport i32, u32
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.runtime.status cimport BAD_INPUT, raise_for
from clipper_core.wire.codec cimport crc32
from clipper_core.wire.comparison cimport label_hash, label_of_key

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
        mixture_weights(learner.rows, learner.shape, learner.k, weights)
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
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
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


cdef ObjectMember MODELS, PROBABILITIES, FEATURES   # of a plan
cdef ObjectMember STEPS, SHARED, WATCHER  # of a learner
MODELS.name, PROBABILITIES.name, FEATURES.name = b"models", b"probabilities", b"features"
STEPS.name = b"steps"
SHARED.name, WATCHER.name = b"shared", b"watcher"


cdef struct Bytes:
    u8* at
    u8* end
    bint full


cdef i64 _now_us() noexcept:
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


cdef void _put_int(Bytes* out, i64 value) noexcept:
    if 0 <= value < 128 and out.at < out.end:
        out.at[0] = <u8> value
        out.at += 1
    elif value >= 0:
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
    cdef object kind = type(value)
    cdef Py_ssize_t n
    cdef const char* text
    cdef int overflow = 0
    cdef i64 number
    if kind is int:
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            return False
        _put_int(out, number)
    elif kind is bool:
        _put_tag(out, 0xc3 if value else 0xc2, 0, 0)
    elif kind is str:
        text = PyUnicode_AsUTF8AndSize(value, &n)
        if n < 32:
            _put_tag(out, <u8> (0xa0 + n), 0, 0)
        elif n < 1 << 8:
            _put_tag(out, 0xd9, <u64> n, 1)
        elif n < 1 << 16:
            _put_tag(out, 0xda, <u64> n, 2)
        else:
            return False
        _put(out, text, <u64> n)
    elif kind is bytes:
        n = PyBytes_GET_SIZE(value)
        if n < 1 << 8:
            _put_tag(out, 0xc4, <u64> n, 1)
        elif n < 1 << 16:
            _put_tag(out, 0xc5, <u64> n, 2)
        else:
            return False
        _put(out, PyBytes_AS_STRING(value), <u64> n)
    else:
        return False
    return True


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


cdef bint _gather_joined(Arrived* arrived, Joined joined, tuple models, dict place) except -1:
    """Read the predictions of an answer, as `_gather` does."""
    cdef PyObject* model
    cdef PyObject* found
    cdef u32 i, n
    if joined.models is None:
        return _gather(arrived, joined.by_model, models, place)
    n = <u32> len(joined.models)
    if n > MODELS_MAX:
        return False
    for i in range(n):
        model = PyTuple_GET_ITEM(joined.models, i)
        arrived.model[i] = model
        arrived.prediction[i] = NULL
        arrived.output[i] = PyTuple_GET_ITEM(joined.outputs, i)
        arrived.confidence[i] = <PyObject*> None
        if joined.confidences is not None:
            arrived.confidence[i] = PyTuple_GET_ITEM(joined.confidences, i)
        if i < <u32> len(models) and PyTuple_GET_ITEM(models, i) is model:
            arrived.place[i] = <i32> i
        else:
            found = PyDict_GetItemWithError(place, <object> model)
            arrived.place[i] = -1 if found == NULL else <i32> <object> found
    arrived.n, arrived.qualified = n, False
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
    return _is_plain(label)


cdef bint _is_plain(object label) except -1:
    cdef object kind = type(label)
    cdef int overflow = 0
    if kind is int:
        PyLong_AsLongLongAndOverflow(label, &overflow)
        return overflow == 0
    if kind is str:
        return PyUnicode_IS_COMPACT_ASCII(label) and len(<str> label) <= LABEL_MAX
    if kind is bytes:
        return PyBytes_GET_SIZE(label) <= LABEL_MAX
    return kind is bool


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

    cdef bint add(self, const Arrived* arrived, object answer, object label) except -1:
        """Count a label that was judged. Return False, and count nothing, if the answer has another
        type, or a model has no place."""
        cdef u32 i
        if type(answer) is not type(label):
            return False
        for i in range(arrived.n):
            if arrived.place[i] < 0:
                return False
        self.answers += 1
        self.right_answers += _equal(<PyObject*> answer, label)
        for i in range(arrived.n):
            self.outputs[arrived.place[i]] += 1
            self.right_outputs[arrived.place[i]] += arrived.right[i]
        return True


@cython.final
cdef class LabelCounts:
    """Counts of right labels, of the answer and of each model. Threads: any.

    models: by model, objects with a Mean `feedback`.  right: of the answer.
    """
    cdef readonly dict models
    cdef readonly Mean right

    def __init__(self, dict models not None, Mean right not None):
        self.models, self.right = models, right

    def count(self, predictions, label, answer, double weight):
        """Count a label. Return False, and count nothing, unless all are labels of one type.
        predictions: by model."""
        cdef Arrived arrived
        return (_gather(&arrived, predictions, (), {}) and _judge(&arrived, label)
                and self.add(&arrived, label, answer, weight))

    cdef bint add(self, const Arrived* arrived, object label, object answer,
                  double weight) except -1:
        """Count a label that was judged. Return False, and count nothing, if the answer has another
        type."""
        cdef PyObject* found
        cdef Mean mean
        cdef u32 i
        if type(answer) is not type(label):
            return False
        self.right.add_one(_equal(<PyObject*> answer, label), weight)
        for i in range(arrived.n):
            found = PyDict_GetItemWithError(self.models, <object> arrived.model[i])
            if found != NULL:
                mean = (<object> found).feedback
                mean.add_one(arrived.right[i], weight)
        return True

    cdef bint add_tally(self, tuple models, Tally tally) except -1:
        cdef PyObject* found
        cdef Mean mean
        cdef u32 i
        self.right.add_sum(tally.answers, tally.right_answers)
        for i in range(<u32> len(models)):
            found = PyDict_GetItemWithError(self.models, models[i])
            if found != NULL:
                mean = (<object> found).feedback
                mean.add_sum(tally.outputs[i], tally.right_outputs[i])
        return True


# -- labels of answers

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

    learner: with `application`, `head`, `models`, `place`, `shared`, `learns`, `watcher`,
    `known(user)`, `state(user)`, `admit(user)`, `ready(user)`, `apply(user, seen, number)`,
    `observe(user, seen, number)`, `wants(user)` and `count_user(user, seen)`.  lock: of the states.
    journal: with `end` and `append_framed(records, count)`.  update: what the core can learn of its
    policy, or None.  node: this server's name.  dirty: of (learner, user).  observation: makes one
    of a plan, predictions, a label and an answer.  commit: called with the number of a record;
    returns whether it is to be called for the next one too.
    """
    cdef object learner, lock, journal, node, observation, commit
    cdef readonly str application
    cdef FeedbackUpdate update
    cdef JournalEnd end
    cdef dict place, dirty
    cdef tuple models
    cdef bytes head, everyone   # fields of a record: the first ones; that all models were queried
    cdef bint learns, commits

    def __init__(self, learner, lock, journal, FeedbackUpdate update, str node, dict dirty,
                 observation, commit):
        self.learner, self.lock, self.journal, self.update = learner, lock, journal, update
        self.node, self.dirty, self.observation, self.commit = node, dirty, observation, commit
        self.application, self.place, self.models = (learner.application, learner.place,
                                                     learner.models)
        self.end, self.learns, self.commits = journal.end, learner.learns, True
        self.head, self.everyone = learner.head, _encoded(tuple(range(len(self.models))))

    cdef bint put(self, Bytes* out, Arrived* arrived, Votes* votes, Joined joined, object label,
                  i64 time_us) except -1:
        """Write the record of a label of weight 1, with its head, and read it for the core's update
        if there is one. False: the general path must learn it."""
        cdef object plan = joined.plan_of()
        cdef object queried = read_member(&MODELS, plan), odds = read_member(&PROBABILITIES, plan)
        cdef object features = read_member(&FEATURES, plan)
        cdef u8* start = out.at
        cdef PyObject* at
        cdef u32 k = <u32> len(self.models), chosen = k
        if (type(queried) is not tuple or type(odds) is not tuple or type(features) is not tuple
                or not self.head or not self.everyone or len(joined.late)):
            return False
        if len(<tuple> queried) == 1:
            at = PyDict_GetItemWithError(self.place, queried[0])
            if at == NULL:
                return False
            chosen = <object> at
        elif queried is not self.models and queried != self.models:
            return False
        if len(<tuple> odds) and len(<tuple> odds) != len(<tuple> queried):
            return False
        if (not _gather_joined(arrived, joined, self.models, self.place)
                or not _judge(arrived, label)):
            return False
        out.at += HEAD_BYTES
        _put_bytes(out, self.head)
        if not _put_value(out, joined.user):
            return False
        if chosen == k:
            _put_bytes(out, self.everyone)
        else:
            _put_array(out, 1)
            _put_int(out, chosen)
        if not (_put_values(out, odds)
                and _put_rest(out, arrived, label, None, joined.answer, 1.0, features, time_us)):
            return False
        head_of(start, start + HEAD_BYTES, <u64> (out.at - start) - HEAD_BYTES)
        if self.update is not None:
            return self.read(votes, arrived, chosen,
                             odds[0] if len(<tuple> odds) and chosen != k else 1.0, features, label)
        return True

    cdef bint read(self, Votes* votes, const Arrived* arrived, u32 chosen, double p,
                   tuple features, object label) except -1:
        cdef PyObject* outputs[MODELS_MAX]
        cdef PyObject* confidence[MODELS_MAX]
        cdef PyObject* qualifiers[MODELS_MAX]
        cdef u8 right[MODELS_MAX]
        cdef object value
        cdef bint named = False
        cdef bint reads = arrived.qualified and reads_classes(self.update.rule.state.kind)
        cdef u32 i, at, k = <u32> len(self.models)
        for i in range(k):
            outputs[i] = NULL
        for i in range(arrived.n):
            if arrived.place[i] >= 0:
                at = arrived.place[i]
                outputs[at], confidence[at] = arrived.output[i], arrived.confidence[i]
                right[at] = arrived.right[i]
                if reads:
                    value = read_member(&QUALIFIERS, <object> arrived.prediction[i])
                    qualifiers[at] = <PyObject*> value
                    named = named or reports_classes(value)
        return self.update.read(votes, k, outputs, confidence,
                                &qualifiers[0] if named else NULL, right, chosen, p,
                                features, label, 1.0)

    cdef u64 append(self, const u8* records, u64 nbytes, u64 count) except 0:
        cdef u64 number = self.end.put(records, nbytes, count)
        return number if number else <u64> self.journal.append_framed(
            PyBytes_FromStringAndSize(<const char*> records, <Py_ssize_t> nbytes), count)

    cdef u64 learn(self, Joined joined, object label) except? 0:
        """Write and learn a label. Return the number of the record; 0, and nothing has changed, if
        the general path must learn it."""
        cdef u8[HEAD_BYTES + RECORD_MAX] buffer
        cdef Bytes out
        cdef Arrived arrived
        cdef Votes votes
        cdef u64 number
        out.at, out.end, out.full = buffer, buffer + HEAD_BYTES + RECORD_MAX, False
        if not self.put(&out, &arrived, &votes, joined, label, _now_us()):
            return 0
        self.lock.acquire()
        try:
            if joined.user:
                self.learner.admit(joined.user)
            number = self.append(buffer, <u64> (out.at - buffer), 1)
            if self.update is None:
                if self.learns:
                    self.learner.observe(joined.user, self.seen(joined, label), number)
            else:
                if joined.user:
                    self.apply(self.learner.ready(joined.user), &votes, joined, label, joined.user,
                               number)
                self.apply(self.shared(), &votes, joined, label, "", number)
                self.count_user(joined, label)
        finally:
            self.lock.release()
        self.sync(number)
        self.notify(&arrived, joined, label)
        return number

    cdef Held shared(self):
        """Return the shared state, about to learn."""
        cdef Held held = read_member(&SHARED, self.learner)
        return held if held.prior is None else self.learner.ready("")

    cdef bint count_user(self, Joined joined, object label) except -1:
        """Count what the shared state has learned of a user."""
        if joined.user and self.learner.wants(joined.user):
            self.learner.count_user(joined.user, self.seen(joined, label))
        return True

    cdef object seen(self, Joined joined, object label):
        return self.observation(joined.plan_of(), joined.predictions(), label, joined.answer)

    cdef bint apply(self, Held held, Votes* votes, Joined joined, object label, str context,
                    u64 number) except -1:
        cdef OpenState opened
        cdef PyObject* at = PyDict_GetItem(held.applied, self.node)
        if at != NULL and <u64> <object> at >= number:
            return True
        opened = self.update.open(held.state, self.models)
        if opened is None:      # the policy repairs it, or logs the error
            self.learner.apply(context, self.seen(joined, label), number)
            return True
        opened.learn(votes)
        return self.close(held, opened, context, number)

    cdef bint close(self, Held held, OpenState opened, str context, u64 number) except -1:
        if opened.changed:
            held.publish(opened.closed())
        held.applied[self.node] = number
        if not held.since:
            held.since = number
        self.dirty[(self.learner, context)] = None
        return True

    cdef bint notify(self, Arrived* arrived, Joined joined, object label) except -1:
        """Notify the learner's observer, if it has one."""
        cdef object watcher = read_member(&WATCHER, self.learner)
        cdef object counts
        if watcher is None:
            return True
        counts = watcher.labels
        if counts is not None:
            if _judge(arrived, label) and (<LabelCounts?> counts).add(arrived, label,
                                                                      joined.answer, 1.0):
                return True
        elif watcher.on_label(joined.predictions(), label, joined.answer):
            return True
        return watcher.on_feedback(self.seen(joined, label))

    cdef bint sync(self, u64 number) except -1:
        if self.commits:
            self.commits = self.commit(number)
        return True

    cdef int learn_block(self, list found, list labels) except -1:
        """Write the records of labels together and apply them. Return DONE; or ALONE or GENERAL,
        and nothing has changed. The caller holds the lock."""
        cdef Py_ssize_t i, n = len(found)
        cdef u8* records = NULL
        cdef u8* grown
        cdef u64 size = 0, last = 0
        cdef i64 now = _now_us()
        cdef Bytes out
        cdef Arrived arrived
        cdef Votes votes
        cdef Joined joined
        cdef Tally tally = Tally.__new__(Tally)
        cdef list apart = []
        cdef dict contexts = {}
        cdef set wanted
        cdef bint together = not self.learns or self.open_all(contexts, found)
        cdef OpenContext shared = contexts.get("")
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
                joined = found[i]
                if not self.put(&out, &arrived, &votes, joined, labels[i], now):
                    return GENERAL
                if self.learns and together:
                    if joined.user:
                        (<OpenContext> contexts[joined.user]).learn(&votes, i)
                    shared.learn(&votes, i)
                if not tally.add(&arrived, joined.answer, labels[i]):
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
        wanted = {context for context in contexts if context and self.learner.wants(context)}
        for i in range(n if wanted else 0):
            if (<Joined> found[i]).user in wanted:
                self.count_user(found[i], labels[i])
        self.notify_tally(tally, found, labels, apart)
        return DONE

    cdef bint open_all(self, dict contexts, list found) except -1:
        """Open the states that these answers update. False if one is not in memory, or only its
        policy can update it."""
        cdef Joined joined
        cdef Py_ssize_t i
        if self.update is None or not self.open(contexts, ""):
            return False
        for i in range(len(found)):
            joined = found[i]
            if (joined.user and joined.user not in contexts
                    and not self.open(contexts, joined.user)):
                return False
        return True

    cdef bint open(self, dict contexts, str context) except -1:
        cdef OpenContext one = OpenContext.__new__(OpenContext)
        one.held = self.learner.known(context)
        if one.held is None or (one.held.prior is not None and context):
            return False
        if one.held.prior is not None:
            self.learner.state(None)    # follows what it begins from
        one.held.touched = True
        one.state = self.update.open(one.held.state, self.models)
        contexts[context] = one
        return one.state is not None

    cdef bint notify_tally(self, Tally tally, list found, list labels, list apart) except -1:
        """Notify the learner's observer of a list; apart: the rows that are not in the tally."""
        cdef object watcher = read_member(&WATCHER, self.learner)
        cdef object i
        cdef Arrived arrived
        cdef Joined joined
        if watcher is None:
            return True
        if watcher.labels is None:
            apart = list(range(len(found)))
        else:
            (<LabelCounts?> watcher.labels).add_tally(self.models, tally)
        for i in apart:
            joined = found[i]
            if (not _gather_joined(&arrived, joined, self.models, self.place)
                    or not self.notify(&arrived, joined, labels[i])):
                break
        return True


@cython.binding(False)
def learn_label(AnswerWindow table not None, prediction, str application, label):
    """Learn the label of an answer of this server. Return True if it counts, False if the answer
    has feedback already; None, and nothing has changed, if the general path must learn it.

    prediction: an answer or its id.
    """
    cdef Joined joined = _ready(table, prediction, application, label, table.now_s())
    cdef u64 number = 0
    if joined is None:
        return None
    if joined.put(HAS_FEEDBACK, True):
        return False
    try:
        number = (<LabelSteps> read_member(&STEPS, joined.learner)).learn(joined, label)
    finally:                    # what the journal refuses may be sent again
        if number == 0:
            joined.put(HAS_FEEDBACK, False)
    return True if number else None


cdef Joined _ready(AnswerWindow table, object prediction, str application, object label,
                   double now):
    """Return the answer, or None if the general path must handle it."""
    cdef object id = prediction.id if type(prediction) is table.answer_type else prediction
    cdef Joined joined = table.find(table.number_of(id))
    if (joined is None or joined.until_s < now or joined.is_set(IS_WRITTEN) or not _is_plain(label)
            or (<LabelSteps?> read_member(&STEPS, joined.learner)).application != application):
        return None
    return joined


def learn_labels(AnswerWindow table not None, list predictions not None, str application,
                 list labels not None):
    """Learn labels of answers of this server. Return how many count; the others have feedback
    already. Return None, and nothing has changed, if the general path must learn them.

    Raises what the journal raises: then all may be sent again, and what was written counts once.
    """
    cdef list found = []
    cdef list fresh_labels = []
    cdef double now = table.now_s()
    cdef Joined joined
    cdef LabelSteps steps = None
    cdef Py_ssize_t i, done = 0
    cdef int outcome = DONE
    try:
        for i in range(len(predictions)):
            joined = _ready(table, predictions[i], application, labels[i], now)
            if joined is None or (steps is not None and joined.learner is not steps.learner):
                outcome = GENERAL
                break
            steps = read_member(&STEPS, joined.learner)
            if not joined.put(HAS_FEEDBACK, True):
                found.append(joined)
                fresh_labels.append(labels[i])
        if outcome == DONE and found:
            with steps.lock:
                outcome = steps.learn_block(found, fresh_labels)
        if outcome == ALONE:
            while done < len(found) and steps.learn(found[done], fresh_labels[done]):
                done += 1
        elif outcome == DONE:
            done = len(found)
            if done:
                steps.sync(steps.end.next - 1)
    finally:                    # what the journal refuses may be sent again
        for i in range(done, len(found)):
            (<Joined> found[i]).put(HAS_FEEDBACK, False)
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
