"""Feedback about labels, read from the objects of queries without others in between: its record in
the journal, the columns of a list of answers, and how often each model was right."""
cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem, PyDict_Next
from cpython.object cimport PyObject
from libc.math cimport NAN
from libc.string cimport memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

import numpy as np

from clipper_core.runtime.machine cimport i64, u8, u32, u64

cnp.import_array()

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    bint PyUnicode_IS_COMPACT_ASCII(object text)

cdef enum:
    RECORD_MAX = 2048           # bytes of a record that is made here
    LABEL_MAX = 1024            # characters or bytes of a plain label


cdef struct Bytes:
    u8* at
    u8* end
    bint full


# -- MessagePack, each value in its shortest form

cdef inline void _put(Bytes* out, const void* data, u64 n) noexcept:
    if <u64> (out.end - out.at) < n:
        out.full = True
        return
    memcpy(out.at, data, n)
    out.at += n


cdef inline void _put_tag(Bytes* out, u8 tag, u64 value, u32 nbytes) noexcept:
    """A tag and a big-endian number of so many bytes."""
    cdef u8[9] data
    cdef u32 i
    data[0] = tag
    for i in range(nbytes):
        data[nbytes - i] = <u8> (value >> (8 * i))
    _put(out, data, nbytes + 1)


cdef void _put_int(Bytes* out, i64 value) noexcept:
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


cdef bint _put_value(Bytes* out, object value) except -1:
    """False for what is no None, bool, int, float, str or bytes."""
    cdef object kind = type(value)
    cdef Py_ssize_t n
    cdef const char* text
    cdef int overflow = 0
    cdef i64 number
    if value is None:
        _put_tag(out, 0xc0, 0, 0)
    elif kind is int:
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            return False
        _put_int(out, number)
    elif kind is float:
        _put_double(out, value)
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


cdef bint _put_heard(Bytes* out, dict place, dict heard) except -1:
    """(place, output, confidence) of each model that has a place."""
    cdef PyObject* model
    cdef PyObject* prediction
    cdef PyObject* found
    cdef Py_ssize_t at = 0, n = 0
    while PyDict_Next(heard, &at, &model, &prediction):
        n += PyDict_GetItem(place, <object> model) != NULL
    _put_array(out, n)
    at = 0
    while PyDict_Next(heard, &at, &model, &prediction):
        found = PyDict_GetItem(place, <object> model)
        if found == NULL:
            continue
        _put_array(out, 3)
        if not (_put_value(out, <object> found)
                and _put_value(out, (<object> prediction).output)
                and _put_value(out, (<object> prediction).confidence)):
            return False
    return True


def record_of(bytes head, str user, dict place, tuple asked, tuple odds, seen, i64 time_us):
    """The record of an observation in MessagePack, or None if it is longer than 2048 bytes or holds
    arrays: then it is for the general encoder, whose bytes these are.

    head: the fields before `user`, with the header of the array.  place: position by model.
    asked: positions of the models that were asked, with the probabilities `odds`.  seen: an
    observation.
    """
    cdef object truth = seen.truth
    return _record(head, user, place, asked, odds, seen.predictions, truth.label, truth.score,
                   seen.answer, seen.weight, seen.plan.features, time_us)


cdef object _record(bytes head, object user, dict place, tuple asked, tuple odds, object heard,
                    object label, object score, object answer, object weight, tuple features,
                    i64 time_us):
    cdef u8[RECORD_MAX] buffer
    cdef Bytes out
    if type(heard) is not dict or len(<dict> heard) > 1000 or len(asked) > 1000:
        return None
    out.at, out.end, out.full = buffer, buffer + RECORD_MAX, False
    _put(&out, PyBytes_AS_STRING(head), <u64> PyBytes_GET_SIZE(head))
    if not (_put_value(&out, user) and _put_values(&out, asked) and _put_values(&out, odds)
            and _put_heard(&out, place, <dict> heard) and _put_value(&out, label)
            and _put_value(&out, score) and _put_value(&out, answer)
            and _put_value(&out, weight) and _put_values(&out, features)):
        return None
    _put_int(&out, time_us)
    if out.full:
        return None
    return PyBytes_FromStringAndSize(<char*> buffer, out.at - buffer)


# -- what is told, beside what was said

@cython.binding(False)
def is_plain(label):
    """Return whether a label is a bool, an int of 64 bits, or a short ASCII str or bytes: then it
    needs no further check."""
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


cdef inline bint _is_label(object kind) noexcept:
    return kind is int or kind is str or kind is bool or kind is bytes


@cython.binding(False)
def alike(label, heard):
    """Return whether a label and all outputs of a dict of predictions are labels of one type."""
    cdef PyObject* model
    cdef PyObject* prediction
    cdef Py_ssize_t at = 0
    cdef object kind = type(label)
    if type(heard) is not dict or not _is_label(kind):
        return False
    while PyDict_Next(heard, &at, &model, &prediction):
        if type((<object> prediction).output) is not kind:
            return False
    return True


@cython.final
cdef class Mean:
    """A sum and how many it is of. Threads: one at a time."""

    cdef public double n, total

    def add(self, double value, double weight=1.0):
        """Add a value."""
        self.n += weight
        self.total += value * weight

    def stats(self):
        """Return the count and the mean."""
        return {"n": self.n, "mean": self.total / self.n} if self.n else {"n": 0.0}


@cython.binding(False)
def count_right(heard, label, answer, double weight, dict counts, Mean right):
    """Count whether the answer and each model of `counts` gave a label.

    heard: predictions by model.  counts: by model, objects with a Mean `feedback`.  right: of the
    answer. -> False, and nothing is counted, unless all are labels of one type.
    """
    cdef PyObject* model
    cdef PyObject* prediction
    cdef PyObject* found
    cdef Py_ssize_t at = 0
    cdef Mean mean
    if type(answer) is not type(label) or not alike(label, heard):
        return False
    right.n += weight
    if answer == label:
        right.total += weight
    while PyDict_Next(<dict> heard, &at, &model, &prediction):
        found = PyDict_GetItem(counts, <object> model)
        if found != NULL:
            mean = (<object> found).feedback
            mean.n += weight
            if (<object> prediction).output == label:
                mean.total += weight
    return True


# -- one answer

@cython.final
cdef class LabelSteps:
    """Writes down a label and learns it, for a learner whose policy the core learns.

    learner: with `head`, `models`, `place`, `shared`, `known(user)` and `apply(user, seen,
    number)`.  lock: of the states.  journal: with `append(record)`, -> its number.  one: of
    FeedbackUpdate.  node: this server's name.  dirty: of (learner, user).  observation: makes one
    of a plan, predictions, a label and an answer.  Threads: any.
    """
    cdef object learner, lock, journal, one, node, observation
    cdef dict place, dirty
    cdef tuple models, everyone

    def __init__(self, learner, lock, journal, one, str node, dirty, observation):
        self.learner, self.lock, self.journal, self.one = learner, lock, journal, one
        self.node, self.dirty, self.observation = node, dirty, observation
        self.place, self.models = learner.place, learner.models
        self.everyone = tuple(range(len(self.models)))

    @cython.binding(False)
    def learn(self, bytes head, str user, plan, heard, label, answer):
        """Write down and apply a label of weight 1. -> the number of its record; 0, and nothing has
        changed, if it is for the general path.
        """
        cdef timespec now
        cdef object asked = plan.models, own = None, shared, record, number
        cdef tuple odds = plan.probabilities
        cdef tuple positions
        cdef PyObject* at
        if asked is self.models or asked == self.models:
            positions = self.everyone
        elif len(asked) == 1:
            at = PyDict_GetItem(self.place, asked[0])
            if at == NULL:
                return 0
            positions = (<object> at,)
        else:
            return 0
        if plan.features or (len(odds) and len(odds) != len(positions)):
            return 0
        if not alike(label, heard):
            return 0
        clock_gettime(CLOCK_REALTIME, &now)
        record = _record(head, user, self.place, positions, odds, heard, label, None, answer, 1.0,
                         plan.features, <i64> now.tv_sec * 1000000 + now.tv_nsec // 1000)
        if record is None:
            return 0
        self.lock.acquire()
        try:
            shared = self.learner.shared
            if user:
                own = self.learner.known(user)
                if own is None or own.prior is not None:
                    return 0
            if shared.prior is not None:
                return 0
            number = self.journal.append(record)
            if own is not None:
                self._apply(own, user, plan, heard, label, answer, number)
            self._apply(shared, "", plan, heard, label, answer, number)
        finally:
            self.lock.release()
        return number

    cdef _apply(self, held, str context, plan, heard, label, answer, number):
        cdef object state, found = None
        cdef dict applied = held.applied
        if <u64> applied.get(self.node, 0) >= <u64> number:
            return
        state = held.state
        try:
            found = self.one(state.models, state.rows, state.sure, state.seen, state.labels,
                             state.tracked, plan.models, plan.probabilities, heard, label, 1.0)
        except Exception:
            found = None
        if found is None:       # for the policy itself, which says in the log what is wrong
            self.learner.apply(context, self.observation(plan, heard, label, answer), number)
            return
        held.touched = True
        if found is not False:
            held.state = found
        applied[self.node] = number
        if not held.since:
            held.since = number
        self.dirty[(self.learner, context)] = None


# -- lists of answers

def in_one_state(list found):
    """Return whether all answers are of one learner and one user."""
    cdef object first = found[0], learner = first.learner, user = first.user, joined
    for joined in found:
        if joined.learner is not learner or joined.user != user:
            return False
    return True


def label_columns(list found, tuple models, dict place):
    """Columns of what the models said of a list of answers, if all of it is whole numbers of 64
    bits: (outputs i64[n] by model, heard bool[n] or None, confidence f64[n] or None, asked i32[n],
    p f64[n]); else None.

    place: position by model.  asked: position of the only model that was asked, -1 if all of
    `models` were.
    """
    cdef Py_ssize_t n = len(found), k = len(models), i, j
    cdef cnp.ndarray values = np.zeros((k, n), np.int64)
    cdef cnp.ndarray heard = np.zeros((k, n), np.bool_)
    cdef cnp.ndarray sure = np.empty((k, n))
    cdef cnp.ndarray asked = np.full(n, -1, np.int32)
    cdef cnp.ndarray odds = np.ones(n)
    cdef i64* value = <i64*> cnp.PyArray_DATA(values)
    cdef u8* was_heard = <u8*> cnp.PyArray_DATA(heard)
    cdef double* own = <double*> cnp.PyArray_DATA(sure)
    cdef object joined, plan, chosen, said, output, confidence
    cdef tuple order = models
    cdef PyObject* prediction
    cdef PyObject* at
    cdef int overflow = 0
    cdef list absent = [False] * k
    cdef list reported = [False] * k
    for i in range(n):
        joined = found[i]
        plan, said = joined.plan, joined.arrived
        chosen = plan.models
        if joined.late or type(said) is not dict:
            return None
        if len(<tuple> chosen) == 1:
            at = PyDict_GetItem(place, (<tuple> chosen)[0])
            if at == NULL:
                return None
            (<int*> cnp.PyArray_DATA(asked))[i] = <int> <object> at
            if plan.probabilities:
                (<double*> cnp.PyArray_DATA(odds))[i] = plan.probabilities[0]
        elif chosen is not order and chosen != order:
            return None
        for j in range(k):
            own[j * n + i] = NAN
            prediction = PyDict_GetItem(<dict> said, order[j])
            if prediction == NULL:
                absent[j] = True
                continue
            output = (<object> prediction).output
            if type(output) is not int:
                return None
            value[j * n + i] = PyLong_AsLongLongAndOverflow(output, &overflow)
            if overflow:
                return None
            was_heard[j * n + i] = True
            confidence = (<object> prediction).confidence
            if confidence is not None:
                own[j * n + i] = confidence
                if own[j * n + i] != own[j * n + i]:
                    own[j * n + i] = 0.0
                reported[j] = True
    return (
        tuple([values[j] for j in range(k)]),
        tuple([heard[j] if absent[j] else None for j in range(k)]),
        tuple([sure[j] if reported[j] else None for j in range(k)]),
        asked,
        odds,
    )


def take_listed(list ids, known, find, double now_s, str application):
    """Take the answers of an application whose feedback has not come, each once: set `told`.

    known: answers by id.  find: returns the answer of an id that is not there, or None.
    -> (positions in `ids`, the answers, positions of unknown ids). The caller holds the lock of
    `known`.
    """
    cdef list places = []
    cdef list found = []
    cdef list unknown = []
    cdef Py_ssize_t i
    cdef PyObject* at
    cdef object joined, learner = None
    cdef bint ours = False
    if not isinstance(known, dict):
        raise TypeError("known must be a dict")
    for i in range(len(ids)):
        at = PyDict_GetItem(<dict> known, ids[i])
        joined = find(ids[i]) if at == NULL else <object> at
        if joined is None:
            unknown.append(i)
            continue
        if joined.learner is not learner:
            learner = joined.learner
            ours = learner.application == application
        if not ours or <double> joined.until_s < now_s:
            unknown.append(i)
        elif not joined.told:
            joined.told = True
            places.append(i)
            found.append(joined)
    return places, found, unknown
