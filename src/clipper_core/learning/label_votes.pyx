"""The answer of a policy that asks all models and votes on labels, from the objects of a query."""
cimport cython
cimport numpy as cnp
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from libc.math cimport NAN

from clipper_core.learning.bandit cimport (
    HEDGE, LOGODDS, MIXTURE, MODELS_MAX, STACKING, Rule, rule_weights,
)
from clipper_core.learning.feedback_update cimport (
    Learner, Observation, feedback_update_classes, feedback_update_raw,
)
from clipper_core.learning.mixture cimport mixture_is_untouched, mixture_shape, mixture_weights
from clipper_core.runtime.machine cimport i64, u8, u32, u64
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

cnp.import_array()

cdef extern from *:
    int lowest_bit "__builtin_ctzll"(unsigned long long x) noexcept nogil

cdef ObjectMember OUTPUT, CONFIDENCE    # of a prediction
OUTPUT.name, CONFIDENCE.name = b"output", b"confidence"


@cython.final
cdef class LabelVotes:
    """Combines labels by the weights of one rule. Threads: any.

    rule: of a policy that asks all models.  bit_of: returns the bit of a label that is no number.
    doubt: observations in a bin from which on they outweigh the raw confidence.
    """

    def __cinit__(self, Rule rule not None, bit_of, double doubt):
        if rule.state.kind not in (HEDGE, LOGODDS, STACKING, MIXTURE):
            raise_for(BAD_INPUT, f"rule {rule.state.kind} asks one model")
        self.rule, self.bit_of, self.doubt = rule, bit_of, doubt

    @cython.binding(False)
    def answer(self, tuple models, cnp.ndarray rows, cnp.ndarray sure, u64 labels, arrived,
               Py_ssize_t missing):
        """Returns (output, confidence, models used, agreement) of the predictions that arrived;
        None if there is something else than labels of one type, or another model than those of the
        state.

        rows, sure, labels: the state.  arrived: by model, objects with `output` and `confidence`.
        missing: number of further models that were asked; with those that arrived all of `models`.
        """
        cdef i64[MODELS_MAX] values
        cdef u8[MODELS_MAX] heard
        cdef u8[MODELS_MAX] cells
        cdef double[MODELS_MAX] confidence
        cdef list said = []
        cdef list used = []
        cdef PyObject* found
        cdef object kind = None, output, own
        cdef Observation observation
        cdef Learner learner
        cdef u32 i, j, winner = 0, k = <u32> len(models)
        cdef bint mixed = self.rule.state.kind == MIXTURE
        cdef double raw, share
        cdef double* bin
        if type(arrived) is not dict or not 2 <= k <= MODELS_MAX:
            return None
        if len(<dict> arrived) + missing != k or rows.shape[0] != k + mixed or not used_bins(sure):
            return None
        for i in range(k):
            found = PyDict_GetItem(<dict> arrived, models[i])
            heard[i] = found != NULL
            values[i], cells[i], confidence[i] = 0, 0, NAN
            if found == NULL:
                said.append(None)
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
                if heard[j] and values[j] == j and said[j] == output:
                    values[i], cells[i] = j, cells[j]
                    break
            else:
                if mixed:
                    cells[i] = (<u8> (output & 63) if kind is int or kind is bool
                                else <u8> lowest_bit(<u64> self.bit_of(output)))
            said.append(output)
            used.append(models[i])
            if own is not None:
                confidence[i] = own
                if confidence[i] != confidence[i]:
                    confidence[i] = 0.0
        if len(used) != len(<dict> arrived):
            return None
        learner.rule, learner.k, learner.labels = &self.rule.state, k, labels
        if mixed:
            learner.shape = mixture_shape(rows)
        else:
            self.rule.checked(rows)
        learner.rows, learner.sure = (<double*> cnp.PyArray_DATA(rows),
                                      <double*> cnp.PyArray_DATA(sure))
        learner.bins = <u32> sure.shape[0]
        observation.values, observation.heard, observation.cells = values, heard, cells
        observation.confidence, observation.label, observation.chosen = confidence, -1, k
        observation.context = NULL
        observation.features = 0
        raw = feedback_update_raw(&learner, &observation, &winner)
        if raw < 0.0:
            return None
        share = _agreement(&learner, values, heard, winner)
        if not mixed or not mixture_is_untouched(learner.rows, learner.shape, k):
            bin = learner.sure + 2 * min(<u32> (raw * learner.bins + 1e-9), learner.bins - 1)
            raw = (bin[0] + self.doubt * raw) / (bin[1] + self.doubt)
        else:
            share = raw
        return said[winner], raw, tuple(used), share


cdef bint used_bins(cnp.ndarray sure):
    return (cnp.PyArray_TYPE(sure) == cnp.NPY_DOUBLE and sure.ndim == 2
            and cnp.PyArray_IS_C_CONTIGUOUS(sure) and sure.shape[0] > 0 and sure.shape[1] == 2)


cdef double _agreement(const Learner* learner, const i64* values, const u8* heard,
                       u32 winner) noexcept nogil:
    """The share of the weight of all models behind the winner."""
    cdef double[MODELS_MAX] weights
    cdef double total = 0.0, behind = 0.0
    cdef u32 i
    if learner.rule.kind == MIXTURE:
        mixture_weights(learner.rows, learner.shape, learner.k, weights)
    else:
        rule_weights(learner.rule, learner.rows, learner.k, feedback_update_classes(learner.labels),
                     weights)
    for i in range(learner.k):
        total += weights[i]
        if heard[i] and values[i] == values[winner]:
            behind += weights[i]
    return min(behind / total, 1.0) if total > 0.0 else 0.0
