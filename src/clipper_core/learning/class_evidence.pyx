"""Computes how much each model is for each label, from the class probabilities that it reports.

The evidence is 1 + ln(p) / ln(100) for a probability p of 0.01 to 1; a smaller one counts as 0.01.
A model that reports none is certain of its vote.
"""
cimport numpy as cnp
from cpython.dict cimport PyDict_GetItemWithError, PyDict_Next
from cpython.object cimport PyObject
from libc.math cimport log
from libc.string cimport memset

import numpy as np

from clipper_core.runtime.machine cimport i64, u64
from clipper_core.runtime.status cimport BAD_INPUT, raise_for
from clipper_core.wire.comparison cimport (
    BYTES_KEY, STR_KEY, key_hash, key_of_label, keys_are_equal, text_key, whole_key,
)

cnp.import_array()

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL
    bint PyUnicode_IS_COMPACT_ASCII(object text)

cdef double P_MIN = 0.01                # a smaller class probability counts as this one
cdef double P_SCALE = -log(P_MIN)

cdef enum Reading:
    NO_LABEL = 0
    IS_LABEL = 1
    TOO_LARGE = 2               # an int of more than 64 bits


# -- the labels of a query, without an object each

cdef bint reports_classes(object qualifiers) except -1:
    cdef PyObject* name
    cdef PyObject* p
    cdef Py_ssize_t at = 0
    if type(qualifiers) is dict:
        while PyDict_Next(qualifiers, &at, &name, &p):
            if _is_class(<object> name) and _is_sound(<object> p):
                return True
    return False


cdef bint class_evidence_read(ClassEvidence* found, u32 k, PyObject** outputs,
                              PyObject** qualifiers, object kind) except -1:
    cdef ValueKey label
    cdef u32 i
    found.labels, found.k = 0, k
    for i in range(k):
        found.codes[i] = 0
        if outputs[i] == NULL:
            continue
        if not key_of_label(<object> outputs[i], kind, &label):
            return False
        found.codes[i] = _number_of(found, &label, 0)
        if not found.codes[i]:
            return False
    for i in range(k):
        if outputs[i] != NULL and not _read_model(found, i, <object> qualifiers[i], kind):
            return False
    return True


cdef bint _read_model(ClassEvidence* found, u32 i, object qualifiers, object kind) except -1:
    """Read the class probabilities of model i. Return False if this module cannot read them."""
    cdef PyObject* name
    cdef PyObject* p
    cdef Py_ssize_t at = 0
    cdef ValueKey label
    cdef Reading reading
    cdef u32 code, last = 0
    cdef bint empty = True
    if type(qualifiers) is not dict:
        return False
    while PyDict_Next(qualifiers, &at, &name, &p):
        if not _is_class(<object> name) or not _is_sound(<object> p):
            continue
        reading = _read_name(<str> <object> name, kind, &label)
        if reading == NO_LABEL:
            continue
        code = _number_of(found, &label, last) if reading == IS_LABEL else 0
        if not code:
            return False
        last = max(last, code)
        found.of[(code - 1) * found.k + i] = _evidence_of(<object> p)
        empty = False
    if empty:
        found.of[(found.codes[i] - 1) * found.k + i] = 1.0
    return True


cdef u32 _number_of(ClassEvidence* found, const ValueKey* label, u32 last) noexcept:
    """Return the number of a label, which is added if it is new; 0 if there is no room.

    last: number of the label that was read before: models often name labels in the same order.
    """
    cdef u32 i, n = found.labels
    if last < n and keys_are_equal(&found.label[last], label):
        return last + 1
    for i in range(n):
        if keys_are_equal(&found.label[i], label):
            return i + 1
    if n == LABELS_READ or (n + 2) * found.k > EVIDENCE_READ:
        return 0
    _add(found, label)
    found.labels = n + 1
    return n + 1


cdef void _add(ClassEvidence* found, const ValueKey* label) noexcept:
    """Put a label into the row after the last."""
    cdef u32 n = found.labels
    found.label[n] = label[0]
    found.cells[n] = <u8> key_hash(label)
    memset(found.of + n * found.k, 0, found.k * sizeof(double))


cdef u32 class_evidence_code(ClassEvidence* found, object label, object kind) except? 0:
    cdef ValueKey right
    cdef u32 i
    if not key_of_label(label, kind, &right):
        return 0
    for i in range(found.labels):
        if keys_are_equal(&found.label[i], &right):
            return i + 1
    _add(found, &right)
    return found.labels + 1


cdef Reading _read_name(str name, object kind, ValueKey* label) except *:
    """Read the label that the name of a class probability stands for."""
    cdef Py_ssize_t n = 0, i, begin
    cdef const char* text
    cdef i64 number = 0
    cdef object key
    if kind is str or kind is bytes:
        text = PyUnicode_AsUTF8AndSize(name, &n)
        label[0] = text_key(STR_KEY if kind is str else BYTES_KEY, text + 2, <u64> n - 2)
        return IS_LABEL
    if kind is int and PyUnicode_IS_COMPACT_ASCII(name):
        text = PyUnicode_AsUTF8AndSize(name, &n)
        begin = 3 if n > 2 and text[2] == c"-" else 2
        for i in range(begin, min(n, 20)):
            if not c"0" <= text[i] <= c"9":
                break
            number = 10 * number + text[i] - c"0"
        else:
            if begin < n <= 20:
                label[0] = whole_key(<u64> (-number if begin == 3 else number))
                return IS_LABEL
    key = _label_of(name, kind)         # other digits, and long numbers
    if key is None:
        return NO_LABEL
    return IS_LABEL if key_of_label(key[1] if kind is bool else key, kind, label) else TOO_LARGE


cdef inline bint _is_class(object name) except -1:
    return (<str?> name).startswith("p:")


cdef inline bint _is_sound(object p) except -1:
    return (isinstance(p, float) and <double> p == <double> p) or isinstance(p, int)


cdef inline double _evidence_of(object p) except -1.0:
    return 1.0 + log(min(max(<double> p, P_MIN), 1.0)) / P_SCALE


# -- for Python: labels of any types

def reports_probabilities(dict votes not None):
    """Return whether a prediction of a dict of them has a class probability."""
    return any(reports_classes(one.qualifiers) for one in votes.values())


def class_evidence(models, dict votes not None, dict numbers not None, kind, label_key,
                   Py_ssize_t labels_max):
    """Return f64[models, labels]: 1 + ln(p) / ln(100) for each class probability p, of 0.01 to 1; 1
    for the vote of a model that reports none.

    votes: by model, objects with `output` and `qualifiers`.  numbers: codes of the labels from 1,
    by label key, the key of each vote among them; labels that are only named are added, up to
    labels_max in all.  kind: int, bool, bytes or str, the type of the labels.  label_key: returns
    the key of an output.
    """
    cdef list rows = [votes.get(model) for model in models]
    cdef Py_ssize_t width = len(numbers), i = 0, at, code
    cdef PyObject* name
    cdef PyObject* found
    cdef PyObject* p
    cdef object qualifiers, key
    cdef double* row
    cdef bint empty
    for one in rows:
        width += len(one.qualifiers) if one is not None else 0
    cdef cnp.ndarray evidence = np.zeros((len(rows), min(width, labels_max)))
    for one in rows:
        row = <double*> cnp.PyArray_DATA(evidence) + i * evidence.shape[1]
        i += 1
        if one is None:
            continue
        at, empty, qualifiers = 0, True, one.qualifiers
        while PyDict_Next(<dict?> qualifiers, &at, &name, &p):
            if not _is_class(<object> name) or not _is_sound(<object> p):
                continue
            key = _label_of(<str> <object> name, kind)
            if key is None:
                continue
            found = PyDict_GetItemWithError(numbers, key)
            if found != NULL:
                code = <object> found
            elif len(numbers) < evidence.shape[1]:
                code = len(numbers) + 1
                numbers[key] = code
            else:
                continue
            row[_column(code, evidence)] = _evidence_of(<object> p)
            empty = False
        if empty:
            row[_column(numbers[label_key(one.output)], evidence)] = 1.0
    return np.ascontiguousarray(evidence[:, :len(numbers)])


cdef Py_ssize_t _column(Py_ssize_t code, cnp.ndarray evidence) except -1:
    """Return the column of a label."""
    if not 0 < code <= evidence.shape[1]:
        raise_for(BAD_INPUT, f"numbers must be 1 to {evidence.shape[1]}, not {code}")
    return code - 1


cdef object _label_of(str name, object kind):
    """Return the label key that the name of a class probability stands for; None if it stands for
    no label of this kind."""
    cdef Py_ssize_t n = len(name), i, begin
    cdef i64 number = 0
    cdef Py_UCS4 digit
    if kind is bool:
        return {"p:True": ("bool", True), "p:False": ("bool", False)}.get(name)
    if kind is not int:
        return name[2:].encode() if kind is bytes else name[2:]
    begin = 3 if n > 2 and name[2] == u"-" else 2
    if begin == n or n > 21:
        return None
    for i in range(begin, n):
        digit = name[i]
        if not 48 <= digit <= 57:
            return int(name[2:]) if name[begin:].isdecimal() else None
        if i < 20:
            number = 10 * number + <i64> digit - 48
    if n > 20:
        return int(name[2:])
    return -number if begin == 3 else number
