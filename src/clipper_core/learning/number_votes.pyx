"""Means of the numbers that several models predict."""
cimport cython
from cpython.dict cimport PyDict_GetItemWithError
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.object cimport PyObject
from libc.math cimport fabs, fmax, isfinite, sqrt

from clipper_core.runtime.object_member cimport ObjectMember, read_member

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1

cdef ObjectMember OUTPUT        # of a prediction
OUTPUT.name = b"output"


cdef WeightedMean weighted_mean(const double* numbers, const double* weights,
                                u32 n) noexcept nogil:
    cdef WeightedMean found
    cdef double largest = 0.0
    cdef double size = 0.0
    cdef double spread = 0.0
    cdef double share, unit
    cdef u32 i
    found.mean, found.arrived = 0.0, 0.0
    for i in range(n):
        found.arrived += weights[i]
        largest = fmax(largest, fabs(numbers[i]))
    if largest == 0.0:
        largest = 1.0
    # in units of the largest, so that squares neither overflow nor vanish
    for i in range(n):
        share = weights[i] / found.arrived if found.arrived > 0.0 else 1.0 / n
        unit = numbers[i] / largest
        found.mean += share * unit
        size += share * fabs(unit)
    for i in range(n):
        share = weights[i] / found.arrived if found.arrived > 0.0 else 1.0 / n
        unit = numbers[i] / largest - found.mean
        spread += share * unit * unit
    found.agreement = size / (size + sqrt(spread)) if size > 0.0 else 1.0
    found.mean *= largest
    return found


cdef u32 numbers_read(tuple models, dict predictions, double* values, u8* arrived) except? 0:
    cdef PyObject* prediction
    cdef object output
    cdef bint has_float = False
    cdef int overflow = 0
    cdef u32 i, n = 0
    if not 0 < len(models) <= MODELS_MAX:
        return 0
    for i in range(<u32> len(models)):
        prediction = PyDict_GetItemWithError(predictions, models[i])
        arrived[i] = prediction != NULL
        if prediction == NULL:
            continue
        output = read_member(&OUTPUT, <object> prediction)
        if type(output) is float:
            values[i] = PyFloat_AS_DOUBLE(output)
            has_float = True
        elif type(output) is int:
            values[i] = <double> PyLong_AsLongLongAndOverflow(output, &overflow)
        else:
            return 0
        if overflow or not isfinite(values[i]):
            return 0
        n += 1
    return n if has_float and n == <u32> len(predictions) else 0


@cython.binding(False)
def mean_of_numbers(tuple models not None, predictions, weights, double selected):
    """Return (mean, confidence, models used, agreement) of numbers. None if the predictions are
    not all finite numbers of these models, with a float among them.

    predictions: by model, objects with `output`.  weights: by model; None weighs all alike, by 1.
    selected: total weight, missing models included.
    """
    cdef double[MODELS_MAX] values
    cdef double[MODELS_MAX] share
    cdef u8[MODELS_MAX] arrived
    cdef WeightedMean found
    cdef PyObject* weight
    cdef double confidence
    cdef u32 i, n = 0
    if type(predictions) is not dict or (weights is not None and type(weights) is not dict):
        return None
    if not numbers_read(models, <dict> predictions, values, arrived):
        return None
    for i in range(<u32> len(models)):
        if not arrived[i]:
            continue
        values[n] = values[i]
        share[n] = 1.0
        if weights is not None:
            weight = PyDict_GetItemWithError(<dict> weights, models[i])
            if weight == NULL:
                return None
            share[n] = <object> weight
        n += 1
    found = weighted_mean(values, share, n)
    confidence = min(found.arrived / selected * found.agreement, 1.0) if selected > 0.0 else 0.0
    return found.mean, confidence, models_used(models, arrived, n), found.agreement


cdef tuple models_used(tuple models, const u8* arrived, u32 n):
    cdef list used = []
    cdef u32 i
    if n == <u32> len(models):
        return models
    for i in range(<u32> len(models)):
        if arrived[i]:
            used.append(models[i])
    return tuple(used)
