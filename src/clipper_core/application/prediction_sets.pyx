"""The set of labels, or the interval, around an answer."""
from libc.math cimport exp

from numpy import ndarray

from clipper_core.application.selection cimport LabelOdds, key_of_answer
from clipper_core.learning.class_evidence cimport LABELS_READ
from clipper_core.runtime.machine cimport u32
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.wire.comparison cimport (
    BOOL_KEY, BYTES_KEY, WHOLE_KEY, ValueKey, key_of_output, keys_are_equal, label_of_key,
)
from clipper_core.wire.prediction cimport Value, value_object

# of thresholds
cdef ObjectMember LABELS, NUMBERS, SCALE, COUNT, KNOWN
LABELS.name = b"labels"
NUMBERS.name = b"numbers"
SCALE.name = b"scale"
COUNT.name = b"count"
KNOWN.name = b"known"

cdef enum:
    KNOWN_MAX = 64              # labels that thresholds remember

# The largest radius of an interval, so that its ends stay finite.
cdef double WIDEST = 1e300


cdef tuple set_of(Selection selection, const StateView* state, const Outputs* outputs,
                  const Combination* found, object answer, object thresholds):
    cdef LabelOdds odds
    if type(answer) is float or type(answer) is ndarray:
        return _interval(thresholds, answer)
    selection.label_odds(state, outputs, found, &odds)
    return _labels(outputs, found, &odds, answer, thresholds)


cdef tuple _interval(object thresholds, object answer):
    """Return the lowest and the highest value; nothing before the first labelled number."""
    cdef double numbers = read_member(&NUMBERS, thresholds), scale = read_member(&SCALE, thresholds)
    cdef double radius = min(exp(numbers) * scale, WIDEST)
    if read_member(&COUNT, thresholds) == 0:
        return ()
    return answer - radius, answer + radius


cdef tuple _labels(const Outputs* outputs, const Combination* found, const LabelOdds* odds,
                   object answer, object thresholds):
    """Return the answer, then the other labels that are probable enough, most probable first; of
    equals those that models gave or named, in their order, then those that feedback had."""
    cdef double threshold = read_member(&LABELS, thresholds)
    cdef tuple known = read_member(&KNOWN, thresholds)
    cdef double[LABELS_READ + 1 + KNOWN_MAX] p
    cdef ValueKey right = key_of_answer(outputs, found)
    cdef ValueKey key
    cdef list labels = []
    cdef u32 i
    for i in range(odds.n):
        key = _key(outputs, odds, i)
        if 1.0 - odds.p[i] <= threshold and not keys_are_equal(&key, &right):
            _insert(labels, p, odds.p[i], _label(outputs, odds, i))
    if 1.0 - odds.other <= threshold:
        for label in known[:KNOWN_MAX]:
            if not _is_among(outputs, odds, label):
                _insert(labels, p, odds.other, label)
    labels.insert(0, answer)
    return tuple(labels)


cdef bint _is_among(const Outputs* outputs, const LabelOdds* odds, object label) except -1:
    """Return whether a model gave or named a label."""
    cdef ValueKey key, other
    # an int above 63 bits has none
    cdef bint has_key = key_of_output(label, &key)
    cdef u32 i
    for i in range(odds.n):
        other = _key(outputs, odds, i)
        if keys_are_equal(&key, &other) if has_key else _label(outputs, odds, i) == label:
            return True
    return False


cdef int _insert(list labels, double* p, double probability, object label) except -1:
    """Insert a label behind those that are as probable."""
    cdef Py_ssize_t n = len(labels), at = n
    while at > 0 and p[at - 1] < probability:
        p[at] = p[at - 1]
        at -= 1
    p[at] = probability
    labels.insert(at, label)
    return 0


cdef inline ValueKey _key(const Outputs* outputs, const LabelOdds* odds, u32 i) noexcept:
    """Return the key of a label."""
    return outputs.key[odds.voter[i]] if outputs.named == NULL else outputs.named.label[i]


cdef object _label(const Outputs* outputs, const LabelOdds* odds, u32 i):
    """Return a label."""
    cdef Value value
    cdef ValueKey key = _key(outputs, odds, i)
    cdef object type_ = str
    if outputs.named == NULL:
        value = outputs.value[odds.voter[i]]
        return value_object(&value)
    if key.kind == BOOL_KEY:
        type_ = bool
    elif key.kind == WHOLE_KEY:
        type_ = int
    elif key.kind == BYTES_KEY:
        type_ = bytes
    return label_of_key(&key, type_)
