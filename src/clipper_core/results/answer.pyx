"""The class `clipper.types.Answer`: made by its constructor from parts, or by `answer_of` from what
a query has at its end.

Attributes that are asked for in few queries are made when they are read. Compared with making them
in each query this saves a text and a dict each.
"""
cimport cython
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport PyTypeObject

import dataclasses

from clipper_core.runtime.object_member cimport ObjectMember, read_member

cdef extern from *:
    """
    static void clipper_rename_type(PyTypeObject* type, const char* name) {
        type->tp_name = name;
    }
    """
    void rename_type "clipper_rename_type"(PyTypeObject* type, const char* name) noexcept

cdef ObjectMember CONFIDENCE, USED, AGREEMENT, SET      # of what a policy combined
cdef ObjectMember QUALIFIERS                            # of a prediction
CONFIDENCE.name, USED.name = b"confidence", b"used"
AGREEMENT.name, SET.name = b"agreement", b"set"
QUALIFIERS.name = b"qualifiers"

cdef tuple FIELDS = (
    "output",
    "confidence",
    "is_default",
    "reason",
    "models",
    "missing",
    "latency_us",
    "id",
    "agreement",
    "decided_by",
    "set",
    "request_id",
    "qualifiers",
)


@cython.final
@cython.freelist(256)
cdef class Answer:
    """Answer to one query.

    output: the combined output, or the application's default. confidence: 0 to 1; calibrated, if
    the policy learns. agreement: how far the models agree, 0 to 1. is_default: no model answered
    in time, or not with enough confidence; `reason` is the cause. models: those whose predictions
    were used. missing: queried, without an answer in time; models that were no longer needed are
    not missing. decided_by: the step of the decider that decided, such as `majority` or
    `floor(fast)`; empty without any prediction. set: labels, the answer first, or (low, high),
    that contain the truth with the share `coverage`. id: for feedback. request_id: the
    caller's own `id`. qualifiers: values that models returned beside their outputs before the
    decision.

    Immutable, and equal only to itself. `dataclasses.replace` and `asdict` take it. Threads: any.
    """

    __match_args__ = FIELDS
    __dataclass_fields__ = dataclasses.make_dataclass("Answer", FIELDS).__dataclass_fields__

    def __init__(self, output, confidence=1.0, is_default=False, reason="", models=(), missing=(),
                 latency_us=0, id="", agreement=1.0, decided_by="all", set=(), request_id="",
                 qualifiers=None):
        self.output = output
        self.confidence = confidence
        self.is_default = is_default
        self.reason = reason
        self.models = models
        self.missing = missing
        self.latency_us = latency_us
        self.node = None
        self.text = id
        self.agreement = agreement
        self.decided_by = decided_by
        self.set = set
        self.request_id = request_id
        self.beside = qualifiers

    @property
    def id(self):
        """The id of the query, which feedback names: `node-number`, the number in hexadecimal."""
        if self.text is None:
            self.text = f"{self.node}-{self.number:x}"
        return self.text

    @property
    def qualifiers(self):
        """Values that models returned beside their outputs, by model."""
        if self.beside is None:
            self.beside = {}
        return self.beside

    def __reduce__(self):
        return Answer, self._parts()

    def __copy__(self):
        return Answer(*self._parts())

    def __replace__(self, **changes):
        return dataclasses.replace(self, **changes)

    def __repr__(self):
        output = repr(self.output)
        parts = [
            output if len(output) <= 60 else output[:57] + "...",
            f"confidence={self.confidence:.3g}",
        ]
        if self.is_default:
            parts.append(f"default: {self.reason}" if self.reason else "default")
        if self.models:
            parts.append("from " + ",".join(map(str, self.models)))
        if self.missing:
            parts.append("missing " + ",".join(map(str, self.missing)))
        parts.append(f"{self.latency_us / 1000:.3g} ms")
        return f"Answer({', '.join(parts)})"

    cdef tuple _parts(self):
        return tuple([getattr(self, name) for name in FIELDS])


# Its name and module are those under which users import it, and pickles refer to it.
rename_type(<PyTypeObject*> Answer, "clipper.types.Answer")


@cython.binding(False)
def answer_of(output, combined, str reason not None, missing, latency_us, str node not None,
              u64 number, decided_by, request_id, dict arrived not None):
    """Return the answer of a query.

    combined: what its policy made of the predictions. reason: of the default; empty: the output is
    the policy's. missing: models. number: the query's, in which its id ends. arrived: predictions
    by model, of which the qualifiers are kept.
    """
    cdef Answer answer = Answer.__new__(Answer)
    cdef dict beside = None
    answer.output = output
    answer.confidence = read_member(&CONFIDENCE, combined)
    answer.is_default = bool(reason)
    answer.reason = reason
    answer.models = read_member(&USED, combined)
    answer.missing = tuple(missing)
    answer.latency_us = latency_us
    answer.node = node
    answer.number = number
    answer.agreement = read_member(&AGREEMENT, combined)
    answer.decided_by = decided_by
    answer.set = read_member(&SET, combined)
    answer.request_id = request_id
    for model, prediction in arrived.items():
        qualifiers = read_member(&QUALIFIERS, prediction)
        if qualifiers:
            if beside is None:
                beside = {}
            beside[model] = qualifiers
    answer.beside = beside
    return answer


cdef u64 _number_of(PyObject* answer, PyObject* node) noexcept:
    """Return the number of an answer of a server of this name; 0: its id has to be read."""
    cdef object own = (<Answer> answer).node
    if own is not None and (own is <object> node or own == <object> node):
        return (<Answer> answer).number
    return 0


# For the window of answers, which imports nothing from here: u64 (*)(answer, node).
NUMBER_OF = PyCapsule_New(<void*> _number_of, "clipper.number_of", NULL)
