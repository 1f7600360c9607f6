"""A mixture of six ways to weigh the votes of several models, learned online.

Each component is a logistic regression: the score of a label is a sum over the models that voted
for it, a label without a vote scores 0, and a softmax makes probabilities of the scores. The
components differ in their weights and steps:

1. one weight for all models: the equal vote, with a learned scale;
2. a weight for each model, with a constant small step;
3. a weight for each model and one for the logit of its confidence, with a constant larger step;
4. as 3, and a weight for each model and label, and one for each label, with small AdaGrad steps;
5. and 6. as 4, with steps three and nine times as large.

The weight of a model and label is a difference to the model's weight and starts at 0. So it stays
at the common weight until there is evidence.

The probability of a label is the mean of the components' probabilities, by their weights. After
each feedback a component's weight is multiplied by the probability that it gave to the right label
(Bayes' rule, or the aggregating algorithm at its rate for the logarithmic loss, Vovk 1990), and a
share of all weights is spread evenly (Herbster and Warmuth 1998, section 3). No rate is to be
chosen. The logarithmic loss of the mixture exceeds that of any sequence of components with m
changes over T observations by at most (m + 1) ln(6 / share) + 2 T share.
Steps: AdaGrad, Duchi, Hazan and Singer 2011, section 1.1; constant, Zinkevich 2003.

Columns of a model: 0 the weight of component 2; 1, 2 the weights of component 3, of a vote and of
the logit; 3 to 6 those of component 4 and their sums of squared gradients; 7 to 10 and 11 to 14 the
same of components 5 and 6; from 15, by component and bucket, a weight and its sum. Columns of the
last row: 0 to 5 the weights of the components; 6, 7 the weight of component 1 and its sum; from 15
the weights of the labels.
"""
cimport numpy as cnp
from libc.math cimport exp, isfinite, log, pow, sqrt
from libc.string cimport memcpy

import numpy as np

from clipper_core.runtime.status cimport BAD_INPUT, raise_for

cnp.import_array()

cdef double WEIGHT_MAX = 20.0           # of a vote, or of a label
cdef double LOGIT_WEIGHT_MAX = 10.0
cdef double CONFIDENCE_MIN = 0.01       # of a model, and 1 less it: the logit lies in -4.6 to 4.6
cdef double SHARE = 1e-3                # of the components' weights, spread evenly
cdef double P_MIN = 1e-6                # of the right label, for a component's weight
cdef double OBSERVATION_MAX = 100.0     # weight of an observation
cdef double SMALL = 0.02                # steps
cdef double LARGE = 0.1
cdef double TIED_STEP = 0.5             # AdaGrad steps; best: range of a weight / sqrt(2)
cdef double[BY_CLASS] CLASS_STEPS
CLASS_STEPS[0], CLASS_STEPS[1], CLASS_STEPS[2] = 0.1, 0.3, 0.9
cdef double FIRST_SUM = 0.01            # of squared gradients
cdef double SUM_MAX = 1000.0            # so that a long life does not stop the steps
cdef double TIED_MIN = 0.01             # the equal vote stays a vote

cdef enum:
    EQUAL = 0
    PLAIN = 1
    SURE = 2
    SLOW = 3                    # the first of those by label


cdef inline double _clip(double x, double low, double high) noexcept nogil:
    return low if x < low else high if x > high else x


cdef inline double _logit(double confidence) noexcept nogil:
    if confidence != confidence:
        return 0.0
    confidence = _clip(confidence, CONFIDENCE_MIN, 1.0 - CONFIDENCE_MIN)
    return log(confidence / (1.0 - confidence))


cdef inline u32 _width(u32 buckets) noexcept nogil:
    return FIXED + 2 * BY_CLASS * buckets


cdef inline u32 _class_column(u32 component, u32 buckets, u8 cell) noexcept nogil:
    return FIXED + 2 * ((component - SLOW) * buckets + cell)


cdef void _count(const Ballot* ballot, Tally* tally) noexcept nogil:
    cdef u32 i, at
    tally.labels = 0
    for i in range(ballot.k):
        if ballot.votes[i] == 0:
            continue
        for at in range(tally.labels):
            if ballot.votes[tally.first[at]] == ballot.votes[i]:
                tally.of[i] = at
                break
        else:
            tally.of[i] = tally.labels
            tally.first[tally.labels] = i
            tally.labels += 1


cdef double _probabilities(const double* rows, u32 buckets, u32 component, const Ballot* ballot,
                           const double* logits, const Tally* tally, double* p) noexcept nogil:
    """Of the labels with a vote, by one component. -> that of each other label."""
    cdef u32 width = _width(buckets), i, at, base
    cdef const double* row
    cdef const double* shared = rows + ballot.k * width
    cdef double score, other, high = 0.0, total
    cdef u8 cell
    for at in range(tally.labels):
        p[at] = 0.0
        if component >= SLOW:
            cell = ballot.cells[tally.first[at]]
            if cell < buckets:
                p[at] = shared[_class_column(component, buckets, cell)]
    for i in range(ballot.k):
        if ballot.votes[i] == 0:
            continue
        row = rows + i * width
        if component == EQUAL:
            score = shared[EQUAL_WEIGHT]
        elif component == PLAIN:
            score = row[0]
        elif component == SURE:
            score = row[1] + row[2] * logits[i]
        else:
            base = 3 + 4 * (component - SLOW)
            score = row[base] + row[base + 1] * logits[i]
            if ballot.cells[i] < buckets:
                score += row[_class_column(component, buckets, ballot.cells[i])]
        p[tally.of[i]] += score
    for at in range(tally.labels):
        high = max(high, p[at])
    other = exp(-high)
    total = max(ballot.classes - tally.labels, 0.0) * other
    for at in range(tally.labels):
        p[at] = exp(p[at] - high)
        total += p[at]
    for at in range(tally.labels):
        p[at] /= total
    return other / total


cdef void mixture_tally(const double* rows, u32 buckets, const Ballot* ballot,
                        Tally* tally) noexcept nogil:
    cdef double[VOTERS_MAX] logits
    cdef double[VOTERS_MAX] p
    cdef const double* shared = rows + ballot.k * _width(buckets)
    cdef u32 i, at, component
    cdef double other
    _count(ballot, tally)
    tally.other = 0.0
    for i in range(ballot.k):
        logits[i] = _logit(ballot.confidence[i])
    for at in range(tally.labels):
        tally.p[at] = 0.0
    for component in range(COMPONENTS):
        other = _probabilities(rows, buckets, component, ballot, logits, tally, p)
        tally.other += shared[component] * other
        for at in range(tally.labels):
            tally.p[at] += shared[component] * p[at]


cdef inline void _step(double* weight, double gradient, double step, double low,
                       double high) noexcept nogil:
    weight[0] = _clip(weight[0] - step * gradient, low, high)


cdef inline void _adaptive_step(double* weight, double* sum, double gradient, double step,
                                double low, double high) noexcept nogil:
    sum[0] = min(sum[0] + gradient * gradient, SUM_MAX)
    weight[0] = _clip(weight[0] - step * gradient / sqrt(FIRST_SUM + sum[0]), low, high)


cdef void _learn_by_class(double* rows, u32 buckets, u32 component, const Ballot* ballot,
                          const double* logits, const Tally* tally,
                          const double* slope) noexcept nogil:
    """slope: of the loss, by the score of each label with a vote."""
    cdef u32 width = _width(buckets), i, at, column, base = 3 + 4 * (component - SLOW)
    cdef double step = CLASS_STEPS[component - SLOW]
    cdef double* shared = rows + ballot.k * width
    cdef double* row
    cdef double g
    cdef u8 cell
    for at in range(tally.labels):
        cell = ballot.cells[tally.first[at]]
        if cell < buckets:
            column = _class_column(component, buckets, cell)
            _adaptive_step(shared + column, shared + column + 1, slope[at], step, -WEIGHT_MAX,
                           WEIGHT_MAX)
    for i in range(ballot.k):
        if ballot.votes[i] == 0:
            continue
        row, g = rows + i * width, slope[tally.of[i]]
        _adaptive_step(row + base, row + base + 2, g, step, -WEIGHT_MAX, WEIGHT_MAX)
        if logits[i] != 0.0:
            _adaptive_step(row + base + 1, row + base + 3, g * logits[i], step, -LOGIT_WEIGHT_MAX,
                           LOGIT_WEIGHT_MAX)
        if ballot.cells[i] < buckets:
            column = _class_column(component, buckets, ballot.cells[i])
            _adaptive_step(row + column, row + column + 1, g, step, -WEIGHT_MAX, WEIGHT_MAX)


cdef void _learn_common(double* rows, u32 buckets, u32 component, const Ballot* ballot,
                        const double* logits, const Tally* tally,
                        const double* slope) noexcept nogil:
    cdef u32 width = _width(buckets), i, heard = 0
    cdef double* shared = rows + ballot.k * width
    cdef double* row
    cdef double g, mean = 0.0
    for i in range(ballot.k):
        if ballot.votes[i] == 0:
            continue
        row, g = rows + i * width, slope[tally.of[i]]
        mean += g
        heard += 1
        if component == PLAIN:
            _step(row, g, SMALL, 0.0, WEIGHT_MAX)
        elif component == SURE:
            _step(row + 1, g, LARGE, -WEIGHT_MAX, WEIGHT_MAX)
            _step(row + 2, g * logits[i], LARGE, -LOGIT_WEIGHT_MAX, LOGIT_WEIGHT_MAX)
    if component == EQUAL:
        _adaptive_step(shared + EQUAL_WEIGHT, shared + EQUAL_SUM, mean / heard, TIED_STEP, TIED_MIN,
                       WEIGHT_MAX)


cdef void mixture_learn(double* rows, u32 buckets, const Ballot* ballot, u32 label, u8 cell,
                        double right, double weight) noexcept nogil:
    """The slope of -ln p by the scores is p less the certain label. That of -ln(1 - p), for an
    answer that was wrong, is p less what the other labels have then."""
    cdef double[VOTERS_MAX] logits
    cdef double[VOTERS_MAX] p
    cdef double[COMPONENTS] likelihood
    cdef Tally tally
    cdef double* shared = rows + ballot.k * _width(buckets)
    cdef double other, found, wrong, total = 0.0
    cdef u32 i, at, component, place
    _count(ballot, &tally)
    if tally.labels == 0:
        return
    weight = min(weight, OBSERVATION_MAX)
    place = tally.labels
    for at in range(tally.labels):
        if ballot.votes[tally.first[at]] == label:
            place = at
    for i in range(ballot.k):
        logits[i] = _logit(ballot.confidence[i])
    for component in range(COMPONENTS):
        other = _probabilities(rows, buckets, component, ballot, logits, &tally, p)
        found = p[place] if place < tally.labels else other
        wrong = max(1.0 - found, P_MIN)
        likelihood[component] = max(found, P_MIN)
        if right < 1.0:
            likelihood[component] = pow(likelihood[component], right) * pow(wrong, 1.0 - right)
        for at in range(tally.labels):
            p[at] = weight * (p[at] - (right if at == place else (1.0 - right) * p[at] / wrong))
        if component >= SLOW:
            _learn_by_class(rows, buckets, component, ballot, logits, &tally, p)
        else:
            _learn_common(rows, buckets, component, ballot, logits, &tally, p)
    for component in range(COMPONENTS):
        if weight != 1.0:
            likelihood[component] = pow(likelihood[component], weight)
        shared[component] *= likelihood[component]
        total += shared[component]
    for component in range(COMPONENTS):
        found = shared[component] / total if total > 0.0 else 1.0 / COMPONENTS
        shared[component] = SHARE / COMPONENTS + (1.0 - SHARE) * found


cdef bint mixture_is_untouched(const double* rows, u32 buckets, u32 k) noexcept nogil:
    return rows[k * _width(buckets) + EQUAL_SUM] == 0.0


cdef void mixture_weights(const double* rows, u32 buckets, u32 k, double* weights) noexcept nogil:
    cdef u32 width = _width(buckets), i, component, b, n, column
    cdef const double* shared = rows + k * width
    cdef const double* row
    cdef double total = 0.0, sum, by_class
    for i in range(k):
        row = rows + i * width
        sum = shared[EQUAL] * shared[EQUAL_WEIGHT] + shared[PLAIN] * row[0] + shared[SURE] * row[1]
        for component in range(SLOW, COMPONENTS):
            by_class, n = 0.0, 0
            for b in range(buckets):
                column = _class_column(component, buckets, <u8> b)
                if row[column + 1] > 0.0:
                    by_class += row[column]
                    n += 1
            sum += shared[component] * (row[3 + 4 * (component - SLOW)]
                                        + (by_class / n if n else 0.0))
        weights[i] = max(sum, 0.0)
        total += weights[i]
    for i in range(k):
        weights[i] = weights[i] / total if total > 0.0 else 1.0 / k


# -- for Python
# --------------------------------------------------------------------------------------------------

cdef u32 buckets_of(cnp.ndarray rows) except 0:
    cdef cnp.npy_intp buckets = ((rows.shape[1] - FIXED) // (2 * BY_CLASS)
                                  if rows.ndim == 2 else 0)
    if (cnp.PyArray_TYPE(rows) != cnp.NPY_DOUBLE or rows.ndim != 2
        or not cnp.PyArray_IS_C_CONTIGUOUS(rows) or not 2 <= rows.shape[0] <= VOTERS_MAX + 1
            or buckets not in (8, 16, 32, 64) or rows.shape[1] != FIXED + 2 * BY_CLASS * buckets):
        raise_for(BAD_INPUT,
                  f"rows of a mixture must be f64[k + 1, {FIXED} + {2 * BY_CLASS} * buckets]"
                  f" with 1 to {VOTERS_MAX} models and 8, 16, 32 or 64 buckets")
    return <u32> buckets


cdef cnp.ndarray rows_with(cnp.ndarray rows, u32 cell):
    cdef u32 buckets = buckets_of(rows), wanted = buckets
    cdef cnp.npy_intp[2] shape
    cdef cnp.ndarray found
    while wanted <= cell and wanted < BUCKETS_MAX:
        wanted *= 2
    if wanted != buckets:
        return _widened(rows, buckets, wanted)
    shape[0], shape[1] = rows.shape[0], rows.shape[1]
    found = cnp.PyArray_SimpleNew(2, shape, cnp.NPY_DOUBLE)
    memcpy(cnp.PyArray_DATA(found), cnp.PyArray_DATA(rows), cnp.PyArray_NBYTES(rows))
    return found


cdef cnp.ndarray _widened(cnp.ndarray rows, u32 buckets, u32 wanted):
    """A label that was learned had a hash below `buckets`, so it keeps its bucket."""
    wide = np.zeros((rows.shape[0], _width(wanted)))
    wide[:, :FIXED] = rows[:, :FIXED]
    for component in range(BY_CLASS):
        begin = FIXED + 2 * component * wanted
        old = FIXED + 2 * component * buckets
        wide[:, begin:begin + 2 * buckets] = rows[:, old:old + 2 * buckets]
    return wide


def initial(k):
    """Rows of k models without observations: an equal vote."""
    if not 1 <= k <= VOTERS_MAX:
        raise_for(BAD_INPUT, f"a mixture has 1 to {VOTERS_MAX} models, not {k}")
    rows = np.zeros((k + 1, _width(BUCKETS_MIN)))
    rows[:k, [0, 1, 3, 7, 11]] = 1.0
    rows[k, :COMPONENTS] = 1.0 / COMPONENTS
    rows[k, EQUAL_WEIGHT] = 1.0
    return rows


def widened(cnp.ndarray rows, u32 cell):
    """A copy of the rows with a bucket for a label whose hash is `cell`, 0 to 63."""
    return rows_with(rows, cell)


def tallied(cnp.ndarray rows, votes, cells, confidence, double classes):
    """-> (f64[k], the probability of each model's label, 0 without a vote; that of each label that
    nobody voted for).

    votes: u32[k], codes of labels from 1, 0 where a model did not answer.  cells: u8[k], hashes of
    the labels, 0 to 63.  confidence: f64[k], NaN where a model reports none.  classes: number of
    different labels.
    """
    cdef u32 buckets = buckets_of(rows), i
    cdef Ballot ballot
    cdef Tally tally
    cdef cnp.ndarray cast = _column(votes, np.uint32, rows, "votes")
    cdef cnp.ndarray hashes = _column(cells, np.uint8, rows, "cells")
    cdef cnp.ndarray sure = _column(confidence, np.float64, rows, "confidence")
    cdef cnp.ndarray found = np.zeros(rows.shape[0] - 1)
    _fill(&ballot, cast, hashes, sure, classes)
    mixture_tally(<double*> cnp.PyArray_DATA(rows), buckets, &ballot, &tally)
    for i in range(ballot.k):
        if ballot.votes[i]:
            (<double*> cnp.PyArray_DATA(found))[i] = tally.p[tally.of[i]]
    return found, tally.other


def learned(cnp.ndarray rows, votes, cells, confidence, double classes, u32 label, u8 cell,
            double right=1.0, double weight=1.0):
    """New rows after one observation.

    votes, cells, confidence, classes: as of `tallied`.  label, cell: code and hash of the label
    that the feedback is about.  right: 1 if it is the right label, 0 if it is known to be wrong.
    weight: of the observation; above 100 it counts as 100.
    """
    cdef Ballot ballot
    cdef cnp.ndarray cast = _column(votes, np.uint32, rows, "votes")
    cdef cnp.ndarray hashes = _column(cells, np.uint8, rows, "cells")
    cdef cnp.ndarray sure = _column(confidence, np.float64, rows, "confidence")
    if not (0.0 <= right <= 1.0 and weight > 0.0 and isfinite(weight)):
        raise_for(BAD_INPUT, f"right must lie in 0 to 1 and weight be above 0: {right}, {weight}")
    cdef cnp.ndarray after = rows_with(rows, max(<u32> cell, <u32> hashes.max()))
    _fill(&ballot, cast, hashes, sure, classes)
    mixture_learn(<double*> cnp.PyArray_DATA(after), buckets_of(after), &ballot, label, cell, right,
                  weight)
    return after


def weights(cnp.ndarray rows):
    """f64[k]: the weight of each model's vote; they add up to 1."""
    cdef u32 buckets = buckets_of(rows)
    cdef cnp.ndarray found = np.zeros(rows.shape[0] - 1)
    mixture_weights(<double*> cnp.PyArray_DATA(rows), buckets, <u32> (rows.shape[0] - 1),
                    <double*> cnp.PyArray_DATA(found))
    return found


cdef cnp.ndarray _column(object values, object dtype, cnp.ndarray rows, str name):
    found = np.ascontiguousarray(values, dtype)
    if found.ndim != 1 or found.shape[0] != rows.shape[0] - 1:
        raise_for(BAD_INPUT, f"{name} must have {rows.shape[0] - 1} numbers")
    return found


cdef void _fill(Ballot* ballot, cnp.ndarray votes, cnp.ndarray cells, cnp.ndarray confidence,
                double classes):
    ballot.votes = <u32*> cnp.PyArray_DATA(votes)
    ballot.cells = <u8*> cnp.PyArray_DATA(cells)
    ballot.confidence = <double*> cnp.PyArray_DATA(confidence)
    ballot.k = <u32> votes.shape[0]
    ballot.classes = classes
