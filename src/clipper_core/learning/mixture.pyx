"""A mixture of eight ways to weigh the votes of several models, learned online.

Each component is a logistic regression: the score of a label is a sum over the models that voted
for it, a label without a vote scores 0, and a softmax makes probabilities of the scores. The
components differ in their weights and steps:

1. one weight for all models: the equal vote, with a learned scale;
2. a weight for each model, with a constant small step;
3. a weight for each model and one for the logit of its confidence, with a constant larger step;
4. as 3, and a weight for each model and label, and one for each label, with small AdaGrad steps;
5. as 4, with steps three times as large;
6. as 4, and a weight for each model and feature of the query's context, with the steps of Newton's
   method for each weight alone: the gradient over 1 plus the sum of p (1 - p) x^2. That is the mean
   of an approximate posterior from a standard normal prior (Laplace's method).
7. for a user's state only: one model is better for this user than the weights of component 3 say.
   The score of its label is larger by 1.5. Which model it is has probabilities, uniform at first.
8. once models report class probabilities: the score of every label is a sum over all models, of a
   weight for each model and one for each model and label, times 1 + ln(p) / ln(100) for its
   probability p of at least .01; a vote without probabilities counts as p = 1. With equal weights
   that is the logarithmic opinion pool (Genest and Zidek 1986, section 3). Steps as in 6.

The weight of a model and label is a difference to the model's weight and starts at 0. So it stays
at the common weight until there is evidence.

The probability of a label is the mean of the components' probabilities, by their weights. After
each feedback a component's weight is multiplied by the probability that it gave to the right label
(Bayes' rule, or the aggregating algorithm at its rate for the logarithmic loss, Vovk 1990), and a
share of all weights is spread evenly (Herbster and Warmuth 1998, section 3). The same is done with
the models' probabilities in component 7. No rate is to be chosen. The logarithmic loss of the
mixture exceeds that of any sequence of components with m changes over T observations by at most
(m + 1) ln(8 / share) + 2 T share.
Steps: AdaGrad, Duchi, Hazan and Singer 2011, section 1.1; constant, Zinkevich 2003; Newton's,
Chapelle and Li 2011, algorithm 3.

Columns of a model: 0 the weight of component 2; 1, 2 the weights of component 3, of a vote and of
the logit; 3 to 6 those of component 4 and their sums of squared gradients; 7 to 10 and 11 to 14 the
same of components 5 and 6, the sums of 6 being those of p (1 - p) x^2; 15 the probability that it
is component 7's model; from 16, by component and bucket, a weight and its sum; then, by feature, a
weight and its sum; then, for component 8, the same of the model, and by bucket. Columns of the last
row: 0 to 6 the weights of the components, that of component 7 being 0 where users share the state;
7, 8 the weight of component 1 and its sum; 9 the number of features; 10 the weight of component 8;
from 16 the weights of the labels.
"""
cimport numpy as cnp
from libc.math cimport exp, isfinite, log, pow, sqrt

import numpy as np

from clipper_core.learning.bandit cimport doubles_copied
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

cnp.import_array()

cdef extern from "learning/softmax.hpp" namespace "clipper" nogil:
    void softmax_lanes(double* p, u32 labels, double others, double* rest) noexcept

cdef extern from "learning/weight_pairs.hpp" namespace "clipper" nogil:
    double weights_sum(const double* pair, u32 n, u32* learned) noexcept
    void sums_scaled(double* pair, u32 n, double share) noexcept

LABELS_MAX = VOTERS_MAX     # of one observation, with those that only have evidence

cdef double WEIGHT_MAX = 20.0           # of a vote, or of a label
cdef double LOGIT_WEIGHT_MAX = 10.0
cdef double CONFIDENCE_MIN = 0.01       # of a model, and 1 less it: the logit lies in -4.6 to 4.6
cdef double SHARE = 1e-3                # of the components' weights, spread evenly
cdef double P_MIN = 1e-6                # of the right label, for a component's weight
cdef double OBSERVATION_MAX = 100.0     # weight of an observation
cdef double SMALL = 0.02                # steps
cdef double LARGE = 0.1
cdef double TIED_STEP = 0.5             # AdaGrad steps; best: range of a weight / sqrt(2)
cdef double SLOW_STEP = 0.1
cdef double FAST_STEP = 0.3
cdef double NEWTON_PRIOR = 1.0          # precision of a weight before evidence
cdef double FAVOURED = 4.4816890703380645   # exp(1.5): odds of the label of component 7's model
cdef double FIRST_SUM = 0.01            # of squared gradients
cdef double SUM_MAX = 1000.0            # so that the steps do not vanish after many observations
cdef double TIED_MIN = 0.01             # the equal vote stays a vote
cdef double LEARNED = 1e-300            # sum of the equal vote, at least, once it has learned
cdef double A_GRADIENT = 0.25           # largest squared gradient of a vote whose label has the
                                        # probability one half
# columns of a model's sums of squared gradients
cdef u32[6] SUMS = [5, 6, 9, 10, 13, 14]

cdef struct Voter:              # a model that voted
    double* row
    double logit                # of its confidence
    u32 of                      # index of its label
    u32 model
    u32 cell                    # of its label, in the rows' buckets; BUCKETS_MAX: it has none

cdef struct Votes:
    Voter[VOTERS_MAX] voter
    u32 n

cdef enum:
    LANES = 8                   # of softmax_lanes(): the first six components, and two unused ones
    EQUAL = 0
    PLAIN = 1
    SURE = 2
    SLOW = 3                    # the first of those by label
    FAST = 4
    NEWTON = 5
    FAVOURITE = 6
    FAVOURED_P = 15             # column of a model


cdef inline double _clip(double x, double low, double high) noexcept nogil:
    x = low if x < low else x
    return high if x > high else x


cdef inline double _logit(double confidence) noexcept nogil:
    if confidence != confidence:
        return 0.0
    confidence = _clip(confidence, CONFIDENCE_MIN, 1.0 - CONFIDENCE_MIN)
    return log(confidence / (1.0 - confidence))


cdef inline u32 _width(RowShape shape) noexcept nogil:
    return (FIXED + 2 * (BY_CLASS * shape.buckets + shape.features)
            + (2 + 2 * shape.buckets if shape.pooled else 0))


cdef inline u32 _class_column(u32 component, RowShape shape, u8 cell) noexcept nogil:
    return FIXED + 2 * ((component - SLOW) * shape.buckets + cell)


cdef inline u32 _feature_column(RowShape shape, u32 feature) noexcept nogil:
    return FIXED + 2 * (BY_CLASS * shape.buckets + feature)


cdef inline u32 _pool_column(RowShape shape) noexcept nogil:
    return FIXED + 2 * (BY_CLASS * shape.buckets + shape.features)


cdef void _count(const double* rows, RowShape shape, const Ballot* ballot, Votes* votes,
                 Tally* tally) noexcept nogil:
    """Number the labels by their first votes, and list the models that voted; then number the
    labels that have evidence only."""
    cdef u32 i, at, n = 0, labels = 0, width = _width(shape)
    cdef u32 code
    cdef Voter* voter
    for i in range(ballot.k):
        code = ballot.votes[i]
        if code == 0:
            continue
        for at in range(labels):
            if tally.code[at] == code:
                break
        else:
            at = labels
            tally.first[at], tally.code[at] = i, code
            labels += 1
        tally.of[i] = at
        voter = votes.voter + n
        voter.row, voter.logit, voter.of = (<double*> rows + i * width,
                                            _logit(ballot.confidence[i]), at)
        voter.cell = ballot.cells[i] if ballot.cells[i] < shape.buckets else BUCKETS_MAX
        voter.model = i
        n += 1
    votes.n, tally.labels = n, labels
    if ballot.evidence != NULL:
        for i in range(ballot.labels + 1):
            code = i if i else ballot.right
            if code == 0 or (i and code == ballot.right):
                continue
            for at in range(tally.labels):
                if tally.code[at] == code:
                    break
            else:
                tally.code[labels] = code
                labels += 1
    tally.named = labels


cdef void _probabilities(const double* shared, RowShape shape, const Ballot* ballot,
                         const Votes* votes, const Tally* tally, double* p,
                         double* other) noexcept nogil:
    """Compute p[labels, LANES], the probability of each label with a vote, by each of the first
    six components. other: those of each other label."""
    cdef const double* row
    cdef const double* column
    cdef const Voter* voter
    cdef double* label
    cdef double slow, fast, newton
    cdef u32 i, at, labels = tally.labels, stride = 2 * shape.buckets
    cdef u32 features = shape.features if ballot.features == shape.features else 0
    cdef u8 cell
    for at in range(labels):
        label, cell = p + LANES * at, ballot.cells[tally.first[at]]
        for i in range(LANES):
            label[i] = 0.0
        if cell < shape.buckets:
            column = shared + FIXED + 2 * cell
            label[SLOW], label[FAST], label[NEWTON] = (column[0], column[stride],
                                                       column[2 * stride])
    for i in range(votes.n):
        voter = votes.voter + i
        row, label = voter.row, p + LANES * voter.of
        slow = row[3] + row[4] * voter.logit
        fast = row[7] + row[8] * voter.logit
        newton = row[11] + row[12] * voter.logit
        if voter.cell != BUCKETS_MAX:
            column = row + FIXED + 2 * voter.cell
            slow += column[0]
            fast += column[stride]
            newton += column[2 * stride]
        column = row + _feature_column(shape, 0)
        for at in range(features):
            newton += column[2 * at] * ballot.context[at]
        label[EQUAL] += shared[EQUAL_WEIGHT]
        label[PLAIN] += row[0]
        label[SURE] += row[1] + row[2] * voter.logit
        label[SLOW] += slow
        label[FAST] += fast
        label[NEWTON] += newton
    softmax_lanes(p, labels, max(ballot.classes - labels, 0.0), other)


cdef inline double _softmax(double* p, u32 labels, double classes) noexcept nogil:
    """Turn scores into probabilities. Return that of each other label, whose score is 0."""
    cdef double other, high = 0.0, total
    cdef u32 at
    for at in range(labels):
        high = max(high, p[at])
    other = exp(-high) if high > 0.0 else 1.0
    total = max(classes - labels, 0.0) * other
    for at in range(labels):
        p[at] = exp(p[at] - high) if p[at] != high else 1.0
        total += p[at]
    for at in range(labels):
        p[at] /= total
    return other / total


cdef inline double _evidence(const Ballot* ballot, const Tally* tally, const Voter* voter,
                             u32 at) noexcept nogil:
    if ballot.evidence == NULL:
        return <double> (voter.of == at)
    return ballot.evidence[(tally.code[at] - 1) * ballot.k + voter.model]


cdef inline u8 _cell(const Ballot* ballot, const Tally* tally, u32 at) noexcept nogil:
    return (ballot.cells[tally.first[at]] if ballot.evidence == NULL
            else ballot.label_cells[tally.code[at] - 1])


cdef double _pooled(const double* rows, RowShape shape, const Ballot* ballot, const Votes* votes,
                    const Tally* tally, double* p) noexcept nogil:
    """Compute the probability of each named label, by component 8. Return that of each other
    label."""
    cdef u32 i, at, column = _pool_column(shape)
    cdef const double* row = rows + ballot.k * _width(shape) + column + 2
    cdef double weight
    cdef u8 cell
    for at in range(tally.named):
        cell = _cell(ballot, tally, at)
        p[at] = row[2 * cell] if cell < shape.buckets else 0.0
        for i in range(votes.n):
            weight = votes.voter[i].row[column]
            if cell < shape.buckets:
                weight += votes.voter[i].row[column + 2 + 2 * cell]
            p[at] += weight * _evidence(ballot, tally, votes.voter + i, at)
    return _softmax(p, tally.named, ballot.classes)


cdef double _favoured(const double* rows, u32 width, const Ballot* ballot, const Tally* tally,
                      const double* base, double* p) noexcept nogil:
    """Compute component 7's probabilities from those of component 3, base[labels, LANES]. Return
    that of each other label, as a share of component 3's.

    With model i as the better one, the odds of its label are FAVOURED times as high, so that all
    are divided by 1 + base (FAVOURED - 1).
    """
    cdef u32 i, at
    cdef double each = 0.0, divided
    for at in range(tally.labels):
        p[at] = 0.0
    for i in range(ballot.k):
        divided = rows[i * width + FAVOURED_P]
        if ballot.votes[i]:
            divided /= 1.0 + base[LANES * tally.of[i]] * (FAVOURED - 1.0)
            p[tally.of[i]] += divided * (FAVOURED - 1.0)
        each += divided
    for at in range(tally.labels):
        p[at] = base[LANES * at] * (each + p[at])
    return each


cdef inline double _mean(const double* share, const double* p, double favoured) noexcept nogil:
    """Return the mean of the probabilities of a label, by the weights of seven components."""
    cdef double found = share[EQUAL] * p[EQUAL]
    found += share[PLAIN] * p[PLAIN]
    found += share[SURE] * p[SURE]
    if share[FAVOURITE] > 0.0:
        found += share[FAVOURITE] * favoured
    found += share[SLOW] * p[SLOW]
    found += share[FAST] * p[FAST]
    return found + share[NEWTON] * p[NEWTON]


cdef inline void _mix(const double* share, const double* p, const double* other,
                      const double* favoured, double other_favoured, Tally* tally) noexcept nogil:
    """Fill in the probabilities, without those of component 8."""
    cdef u32 at
    tally.other = _mean(share, other, other_favoured)
    for at in range(tally.labels):
        tally.p[at] = _mean(share, p + LANES * at, favoured[at])
    for at in range(tally.labels, tally.named):
        tally.p[at] = tally.other


cdef inline void _add(Tally* tally, double share, const double* p, double other) noexcept nogil:
    """Add component 8's probabilities, by its weight."""
    cdef u32 at
    tally.other += share * other
    for at in range(tally.named):
        tally.p[at] += share * p[at]


cdef void mixture_tally(const double* rows, RowShape shape, const Ballot* ballot,
                        Tally* tally) noexcept nogil:
    cdef double[LANES * VOTERS_MAX] p
    cdef double[LANES] other
    cdef double[VOTERS_MAX] favoured
    cdef Votes votes
    cdef u32 width = _width(shape)
    cdef const double* shared = rows + ballot.k * width
    cdef double other_favoured = 0.0
    _count(rows, shape, ballot, &votes, tally)
    _probabilities(shared, shape, ballot, &votes, tally, p, other)
    if shared[FAVOURITE] > 0.0:
        other_favoured = other[SURE] * _favoured(rows, width, ballot, tally, p + SURE, favoured)
    _mix(shared, p, other, favoured, other_favoured, tally)
    if shape.pooled:
        other[0] = _pooled(rows, shape, ballot, &votes, tally, p)
        _add(tally, shared[POOLED_SHARE], p, other[0])


cdef inline void _step(double* weight, double gradient, double step, double low,
                       double high) noexcept nogil:
    weight[0] = _clip(weight[0] - step * gradient, low, high)


cdef inline void _adaptive_step(double* weight, double* sum, double gradient, double step,
                                double low, double high) noexcept nogil:
    sum[0] = min(sum[0] + gradient * gradient, SUM_MAX)
    weight[0] = _clip(weight[0] - step * gradient / sqrt(FIRST_SUM + sum[0]), low, high)


cdef inline void _newton_step(double* weight, double* sum, double gradient, double curvature,
                              double low, double high) noexcept nogil:
    sum[0] = min(sum[0] + curvature, SUM_MAX)
    weight[0] = _clip(weight[0] - gradient / (NEWTON_PRIOR + sum[0]), low, high)


cdef inline void _learn_bucket(double* column, u32 stride, const double* slope,
                               double curvature) noexcept nogil:
    """Make the steps of components 4 to 6 for a label's weights, and their sums."""
    _adaptive_step(column, column + 1, slope[SLOW], SLOW_STEP, -WEIGHT_MAX, WEIGHT_MAX)
    column += stride
    _adaptive_step(column, column + 1, slope[FAST], FAST_STEP, -WEIGHT_MAX, WEIGHT_MAX)
    column += stride
    _newton_step(column, column + 1, slope[NEWTON], curvature, -WEIGHT_MAX, WEIGHT_MAX)


cdef void _learn_votes(double* shared, RowShape shape, const Ballot* ballot, const Votes* votes,
                       const Tally* tally, const double* slopes,
                       const double* curvatures) noexcept nogil:
    """Make the steps of the first six components.

    slopes: [labels, LANES], of the loss, by the score of each label with a vote.  curvatures:
    [labels], of component 6.
    """
    cdef u32 i, at, stride = 2 * shape.buckets
    cdef u32 features = shape.features if ballot.features == shape.features else 0
    cdef const double* slope
    cdef double* row
    cdef const Voter* voter
    cdef double x, curvature, mean = 0.0
    cdef u8 cell
    for at in range(tally.labels):
        cell = ballot.cells[tally.first[at]]
        if cell < shape.buckets:
            _learn_bucket(shared + FIXED + 2 * cell, stride, slopes + LANES * at,
                          curvatures[at])
    for i in range(votes.n):
        voter = votes.voter + i
        row, slope, curvature = voter.row, slopes + LANES * voter.of, curvatures[voter.of]
        mean += slope[EQUAL]
        _step(row, slope[PLAIN], SMALL, 0.0, WEIGHT_MAX)
        _step(row + 1, slope[SURE], LARGE, -WEIGHT_MAX, WEIGHT_MAX)
        _adaptive_step(row + 3, row + 5, slope[SLOW], SLOW_STEP, -WEIGHT_MAX, WEIGHT_MAX)
        _adaptive_step(row + 7, row + 9, slope[FAST], FAST_STEP, -WEIGHT_MAX, WEIGHT_MAX)
        _newton_step(row + 11, row + 13, slope[NEWTON], curvature, -WEIGHT_MAX, WEIGHT_MAX)
        x = voter.logit
        if x != 0.0:
            _step(row + 2, slope[SURE] * x, LARGE, -LOGIT_WEIGHT_MAX, LOGIT_WEIGHT_MAX)
            _adaptive_step(row + 4, row + 6, slope[SLOW] * x, SLOW_STEP, -LOGIT_WEIGHT_MAX,
                           LOGIT_WEIGHT_MAX)
            _adaptive_step(row + 8, row + 10, slope[FAST] * x, FAST_STEP, -LOGIT_WEIGHT_MAX,
                           LOGIT_WEIGHT_MAX)
            _newton_step(row + 12, row + 14, slope[NEWTON] * x, curvature * x * x,
                         -LOGIT_WEIGHT_MAX, LOGIT_WEIGHT_MAX)
        if voter.cell != BUCKETS_MAX:
            _learn_bucket(row + FIXED + 2 * voter.cell, stride, slope, curvature)
        row += _feature_column(shape, 0)
        for at in range(features):
            x = ballot.context[at]
            _newton_step(row, row + 1, slope[NEWTON] * x, curvature * x * x, -WEIGHT_MAX,
                         WEIGHT_MAX)
            row += 2
    _adaptive_step(shared + EQUAL_WEIGHT, shared + EQUAL_SUM, mean / votes.n, TIED_STEP, TIED_MIN,
                   WEIGHT_MAX)
    shared[EQUAL_SUM] = max(shared[EQUAL_SUM], LEARNED)


cdef void _learn_pool(double* rows, RowShape shape, const Ballot* ballot, const Votes* votes,
                      const Tally* tally, const double* p, const double* slope,
                      double weight) noexcept nogil:
    """Learn one observation for component 8. p: the probability of each named label, by component
    8.  slope: of the loss, by their scores. The second derivative by a model's weight is the
    variance of its evidence."""
    cdef u32 i, at, column = _pool_column(shape)
    cdef double* row = rows + ballot.k * _width(shape)
    cdef double x, gradient, mean, square
    cdef u8 cell
    for at in range(tally.named):
        cell = _cell(ballot, tally, at)
        if cell < shape.buckets:
            _newton_step(row + column + 2 + 2 * cell, row + column + 3 + 2 * cell, slope[at],
                         weight * p[at] * (1.0 - p[at]), -WEIGHT_MAX, WEIGHT_MAX)
    for i in range(votes.n):
        row = votes.voter[i].row
        gradient = mean = square = 0.0
        for at in range(tally.named):
            x, cell = _evidence(ballot, tally, votes.voter + i, at), _cell(ballot, tally, at)
            gradient += slope[at] * x
            mean += p[at] * x
            square += p[at] * x * x
            if cell < shape.buckets and x != 0.0:
                _newton_step(row + column + 2 + 2 * cell, row + column + 3 + 2 * cell,
                             slope[at] * x, weight * p[at] * (1.0 - p[at]) * x * x,
                             -WEIGHT_MAX, WEIGHT_MAX)
        _newton_step(row + column, row + column + 1, gradient,
                     weight * max(square - mean * mean, 0.0), -WEIGHT_MAX, WEIGHT_MAX)


cdef inline double _likelihood(double found, double right, double weight) noexcept nogil:
    """Return the probability of an observation, given that of its label."""
    cdef double p = max(found, P_MIN)
    if right < 1.0:
        p = pow(p, right) * pow(max(1.0 - found, P_MIN), 1.0 - right)
    return p if weight == 1.0 else pow(p, weight)


cdef double _learn_favourite(double* rows, u32 width, const Ballot* ballot, const Tally* tally,
                             const double* base, double other, u32 place, double right,
                             double weight, double* favoured) noexcept nogil:
    """Learn one observation for component 7. Return its probability of each label without a vote,
    as it was before this observation.  favoured: set to those of the labels with a vote.

    base, other: component 3's probabilities, base[labels, LANES].
    """
    cdef double found = other * _favoured(rows, width, ballot, tally, base, favoured)
    cdef double p, total = 0.0
    cdef double* at
    cdef u32 i
    for i in range(ballot.k):
        at = rows + i * width + FAVOURED_P
        p = base[LANES * place] if place < tally.labels else other
        if ballot.votes[i]:
            p /= 1.0 + base[LANES * tally.of[i]] * (FAVOURED - 1.0)
            if tally.of[i] == place:
                p *= FAVOURED
        at[0] *= _likelihood(p, right, weight)
        total += at[0]
    for i in range(ballot.k):
        at = rows + i * width + FAVOURED_P
        at[0] = (SHARE / ballot.k
                 + (1.0 - SHARE) * (at[0] / total if total > 0.0 else 1.0 / ballot.k))
    return found


cdef inline double _slope(double p, bint right_label, double found, double right,
                          double weight) noexcept nogil:
    """Return the slope of the loss by a label's score. found: the probability of the label that the
    feedback is about.

    The slope of -ln p is p less the certain label. That of -ln(1 - p), for an answer that was
    wrong, is p less what the other labels have then.
    """
    if right_label:
        return weight * (p - right)
    return weight * (p - (1.0 - right) / max(1.0 - found, P_MIN) * p if right < 1.0 else p)


cdef void mixture_learn(double* rows, RowShape shape, const Ballot* ballot, u32 label, u8 cell,
                        double right, double weight, Tally* tally) noexcept nogil:
    cdef double[LANES * VOTERS_MAX] p
    cdef double[LANES] other
    cdef double[VOTERS_MAX] curvature       # of component 6
    cdef double[VOTERS_MAX] favoured
    cdef double[VOTERS_MAX] slope
    cdef double[COMPONENTS] likelihood
    cdef Votes votes
    cdef u32 width = _width(shape)
    cdef double* shared = rows + ballot.k * width
    cdef double found, other_favoured = 0.0, total = 0.0, even
    cdef u32 at, component, place, components = COMPONENTS
    _count(rows, shape, ballot, &votes, tally)
    if tally.labels == 0:
        tally.other = 0.0
        for at in range(tally.named):
            tally.p[at] = 0.0
        return
    weight = min(weight, OBSERVATION_MAX)
    place = tally.named
    for at in range(tally.named):
        if tally.code[at] == label:
            place = at
    _probabilities(shared, shape, ballot, &votes, tally, p, other)
    if shared[FAVOURITE] == 0.0:
        components -= 1
    else:
        other_favoured = _learn_favourite(rows, width, ballot, tally, p + SURE, other[SURE], place,
                                          right, weight, favoured)
        likelihood[FAVOURITE] = _likelihood(
            favoured[place] if place < tally.labels else other_favoured, right, weight)
    _mix(shared, p, other, favoured, other_favoured, tally)
    for at in range(tally.labels):
        found = p[LANES * at + NEWTON]
        curvature[at] = weight * found * (1.0 - found)
    for component in range(FAVOURITE):
        found = p[LANES * place + component] if place < tally.labels else other[component]
        likelihood[component] = _likelihood(found, right, weight)
        for at in range(tally.labels):
            p[LANES * at + component] = _slope(p[LANES * at + component], at == place, found, right,
                                               weight)
    _learn_votes(shared, shape, ballot, &votes, tally, p, curvature)
    if shape.pooled:
        other[0] = _pooled(rows, shape, ballot, &votes, tally, p)
        _add(tally, shared[POOLED_SHARE], p, other[0])
        found = p[place] if place < tally.named else other[0]
        for at in range(tally.named):
            slope[at] = _slope(p[at], at == place, found, right, weight)
        _learn_pool(rows, shape, ballot, &votes, tally, p, slope, weight)
        shared[POOLED_SHARE] *= _likelihood(found, right, weight)
        total = shared[POOLED_SHARE]
    for component in range(components):
        shared[component] *= likelihood[component]
        total += shared[component]
    even = 1.0 / (components + shape.pooled)
    if shape.pooled:
        found = shared[POOLED_SHARE] / total if total > 0.0 else even
        shared[POOLED_SHARE] = SHARE / (components + 1) + (1.0 - SHARE) * found
    for component in range(components):
        found = shared[component] / total if total > 0.0 else even
        shared[component] = SHARE / (components + shape.pooled) + (1.0 - SHARE) * found


cdef bint mixture_is_untouched(const double* rows, RowShape shape, u32 k) noexcept nogil:
    return rows[k * _width(shape) + EQUAL_SUM] == 0.0


cdef void mixture_weights(const double* rows, RowShape shape, u32 k, const double* context,
                          double* weights) noexcept nogil:
    cdef u32 width = _width(shape), i, component, n = 0, column, at
    cdef const double* shared = rows + k * width
    cdef const double* row
    cdef double favoured = log(FAVOURED), total = 0.0, sum, by_class
    for i in range(k):
        row = rows + i * width
        sum = (shared[EQUAL] * shared[EQUAL_WEIGHT] + shared[PLAIN] * row[0] + shared[SURE] * row[1]
               + shared[FAVOURITE] * (row[1] + row[FAVOURED_P] * favoured))
        for component in range(SLOW, FAVOURITE):
            by_class = weights_sum(row + _class_column(component, shape, 0), shape.buckets, &n)
            sum += shared[component] * (row[3 + 4 * (component - SLOW)]
                                        + (by_class / n if n else 0.0))
        if context != NULL:
            column = _feature_column(shape, 0)
            for at in range(shape.features):
                sum += shared[NEWTON] * row[column + 2 * at] * context[at]
        if shape.pooled:
            sum += shared[POOLED_SHARE] * row[_pool_column(shape)]
        weights[i] = max(sum, 0.0)
        total += weights[i]
    for i in range(k):
        weights[i] = weights[i] / total if total > 0.0 else 1.0 / k


# -- for Python
# --------------------------------------------------------------------------------------------------

cdef bint mixture_has_shape(const double* rows, u64 n, u64 columns, RowShape* shape) noexcept nogil:
    cdef u64 each = 2 * BY_CLASS
    cdef u64 rest
    cdef double features
    shape.features, shape.pooled = 0, False
    if columns <= FIXED or not 1 < n <= VOTERS_MAX + 1:
        return False
    features = rows[(n - 1) * columns + FEATURES]
    if not 0.0 <= features <= FEATURES_MAX:
        return False
    shape.features = <u32> features
    shape.pooled = rows[(n - 1) * columns + POOLED_SHARE] > 0.0
    rest = columns - FIXED
    if shape.pooled:
        each += 2
    if rest < 2 * shape.features + 2 * shape.pooled:
        return False
    rest -= 2 * shape.features + 2 * shape.pooled
    shape.buckets = <u32> (rest // each)
    return rest % each == 0 and (shape.buckets == 8 or shape.buckets == 16 or shape.buckets == 32
                                 or shape.buckets == 64)


cdef RowShape mixture_shape(cnp.ndarray rows) except *:
    cdef RowShape shape
    if not (rows.ndim == 2 and cnp.PyArray_TYPE(rows) == cnp.NPY_DOUBLE
            and cnp.PyArray_IS_C_CONTIGUOUS(rows)
            and mixture_has_shape(<double*> cnp.PyArray_DATA(rows), <u64> rows.shape[0],
                                  <u64> rows.shape[1], &shape)):
        raise_for(BAD_INPUT,
                  f"rows of a mixture must be f64[k + 1, {FIXED} + {2 * BY_CLASS} * buckets"
                  f" + 2 * features], or 2 + 2 * buckets wider for class probabilities, with 1 to"
                  f" {VOTERS_MAX} models, 8, 16, 32 or 64 buckets and at most {FEATURES_MAX}"
                  f" features")
    return shape


cdef cnp.ndarray rows_with(cnp.ndarray rows, u32 cell):
    cdef RowShape shape = mixture_shape(rows), wanted = shape
    while wanted.buckets <= cell and wanted.buckets < BUCKETS_MAX:
        wanted.buckets *= 2
    if wanted.buckets != shape.buckets:
        return _widened(rows, shape, wanted)
    return doubles_copied(rows)


cdef cnp.ndarray rows_with_features(cnp.ndarray rows, u32 features):
    cdef RowShape shape = mixture_shape(rows), wanted = shape
    if shape.features or not features:
        return rows
    if features > FEATURES_MAX:
        raise_for(BAD_INPUT, f"a context has at most {FEATURES_MAX} features, not {features}")
    wanted.features = features
    return _widened(rows, shape, wanted)


cdef cnp.ndarray rows_with_pool(cnp.ndarray rows):
    cdef RowShape shape = mixture_shape(rows), wanted = shape
    cdef cnp.ndarray wide
    if shape.pooled:
        return rows
    wanted.pooled = True
    wide = _widened(rows, shape, wanted)
    wide[:-1, _pool_column(wanted)] = 1.0
    components = 1 + np.count_nonzero(wide[-1, :COMPONENTS])
    wide[-1, :COMPONENTS] *= 1.0 - 1.0 / components
    wide[-1, POOLED_SHARE] = 1.0 / components
    return wide


cdef cnp.ndarray _widened(cnp.ndarray rows, RowShape shape, RowShape wanted):
    """A label that was learned had a hash below `buckets`, so it keeps its bucket."""
    wide = np.zeros((rows.shape[0], _width(wanted)))
    wide[:, :FIXED] = rows[:, :FIXED]
    for component in range(SLOW, FAVOURITE):
        begin = _class_column(component, wanted, 0)
        old = _class_column(component, shape, 0)
        wide[:, begin:begin + 2 * shape.buckets] = rows[:, old:old + 2 * shape.buckets]
    begin, old = _feature_column(wanted, 0), _feature_column(shape, 0)
    wide[:, begin:begin + 2 * shape.features] = rows[:, old:old + 2 * shape.features]
    wide[-1, FEATURES] = wanted.features
    if shape.pooled:
        begin, old = _pool_column(wanted), _pool_column(shape)
        wide[:, begin:begin + 2 + 2 * shape.buckets] = rows[:, old:]
    return wide


def initial(k):
    """Return rows of k models without observations: an equal vote."""
    if not 1 <= k <= VOTERS_MAX:
        raise_for(BAD_INPUT, f"a mixture has 1 to {VOTERS_MAX} models, not {k}")
    cdef RowShape shape
    shape.buckets, shape.features, shape.pooled = BUCKETS_MIN, 0, False
    rows = np.zeros((k + 1, _width(shape)))
    rows[:k, [0, 1, 3, 7, 11]] = 1.0
    rows[:k, FAVOURED_P] = 1.0 / k
    rows[k, :FAVOURITE] = 1.0 / FAVOURITE
    rows[k, EQUAL_WEIGHT] = 1.0
    return rows


def of_user(cnp.ndarray rows):
    """Return rows of a user's state, from those that all users share: component 7 has an even
    weight, and each model the same probability in it."""
    cdef cnp.ndarray found = rows_with(rows, 0)
    mixture_for_user(<double*> cnp.PyArray_DATA(found), <u32> found.shape[0] - 1,
                     <u32> found.shape[1])
    return found


cdef void mixture_for_user(double* rows, u32 k, u32 columns) noexcept nogil:
    cdef double* last = rows + k * columns
    cdef double total = 0.0, scale
    cdef u32 i
    for i in range(FAVOURITE):
        total += last[i]
    scale = (COMPONENTS - 1.0) / COMPONENTS / (total + last[POOLED_SHARE])
    for i in range(FAVOURITE):
        last[i] *= scale
    last[POOLED_SHARE] *= scale
    last[FAVOURITE] = 1.0 / COMPONENTS
    for i in range(k):
        rows[i * columns + FAVOURED_P] = 1.0 / k


def limited(cnp.ndarray rows, double counts):
    """Return a copy of the rows in which each model's sums of squared gradients stand for at most
    so many uncertain observations, so that its next steps are as large as after these."""
    cdef cnp.ndarray found = rows_with(rows, 0)
    mixture_limited(<double*> cnp.PyArray_DATA(found), <u32> found.shape[0] - 1,
                    <u32> found.shape[1], counts)
    return found


cdef void mixture_limited(double* rows, u32 k, u32 columns, double counts) noexcept nogil:
    cdef double* row
    cdef double most, share
    cdef u32 i, at
    for i in range(k):
        row = rows + i * columns
        most = 0.0
        for at in range(6):
            most = max(most, row[SUMS[at]])
        share = min(1.0, counts / max(most / A_GRADIENT, 1e-300))
        if share < 1.0:
            for at in range(6):
                row[SUMS[at]] *= share
            sums_scaled(row + FIXED, (columns - FIXED) // 2, share)


def widened(cnp.ndarray rows, u32 cell, u32 features=0, bint pooled=False):
    """Return a copy of the rows with a bucket for a label whose hash is `cell`, 0 to 63, with
    weights for so many features of a context, if it had none, and with weights of class
    probabilities."""
    found = rows_with_features(rows_with(rows, cell), features)
    return rows_with_pool(found) if pooled else found


def shape(cnp.ndarray rows):
    """Return (buckets, features of a context, whether there are weights of class probabilities)."""
    cdef RowShape found = mixture_shape(rows)
    return found.buckets, found.features, bool(found.pooled)


def in_context(cnp.ndarray rows, context):
    """Return rows whose votes have the weights that they have in a context. They are for answers,
    not for learning.

    context: f64[features]; of another length than the rows': the rows themselves.
    """
    cdef RowShape shape = mixture_shape(rows)
    x = np.ascontiguousarray(context, np.float64)
    if shape.features == 0 or x.shape != (shape.features,):
        return rows
    cdef cnp.ndarray found = rows_with(rows, 0)
    cdef u32 column = _feature_column(shape, 0)
    found[:-1, 3 + 4 * (NEWTON - SLOW)] += found[:-1, column:column + 2 * shape.features:2] @ x
    return found


def tallied(cnp.ndarray rows, votes, cells, confidence, double classes, evidence=None,
            label_cells=None):
    """Return (f64[labels], the probability of each label by its code less 1; that of each other
    label).

    votes: u32[k], codes of labels from 1, 0 where a model did not answer.  cells: u8[k], hashes of
    the labels, 0 to 63.  confidence: f64[k], NaN where a model reports none.  classes: number of
    different labels.  evidence: f64[k, labels], how much each model is for each label, 0 to 1, with
    label_cells: u8[labels], their hashes; None: 1 for the label that it votes for.
    """
    cdef RowShape shape = mixture_shape(rows)
    cdef u32 i
    cdef Ballot ballot
    cdef Tally tally
    cdef cnp.ndarray cast = _column(votes, np.uint32, rows, "votes")
    cdef cnp.ndarray hashes = _column(cells, np.uint8, rows, "cells")
    cdef cnp.ndarray sure = _column(confidence, np.float64, rows, "confidence")
    cdef cnp.ndarray proof = _matrix(evidence, rows)
    cdef cnp.ndarray named = np.ascontiguousarray(() if label_cells is None else label_cells,
                                                  np.uint8)
    cdef cnp.ndarray found = np.zeros(max(<u32> cast.max(), <u32> proof.shape[0]))
    _fill(&ballot, cast, hashes, sure, classes)
    _fill_evidence(&ballot, proof, named)
    mixture_tally(<double*> cnp.PyArray_DATA(rows), shape, &ballot, &tally)
    for i in range(tally.named):
        (<double*> cnp.PyArray_DATA(found))[tally.code[i] - 1] = tally.p[i]
    return found, tally.other


def learned(cnp.ndarray rows, votes, cells, confidence, double classes, u32 label, u8 cell,
            double right=1.0, double weight=1.0, context=(), evidence=None, label_cells=None):
    """New rows after one observation.

    votes, cells, confidence, classes, evidence, label_cells: as of `tallied`.  label, cell: code
    and hash of the label that the feedback is about.  right: 1 if it is the right label, 0 if it is
    known to be wrong.  weight: of the observation; above 100 it counts as 100.  context:
    f64[features], or empty; one of another length than the rows' is not learned.
    """
    cdef Ballot ballot
    cdef Tally tally
    cdef cnp.ndarray cast = _column(votes, np.uint32, rows, "votes")
    cdef cnp.ndarray hashes = _column(cells, np.uint8, rows, "cells")
    cdef cnp.ndarray sure = _column(confidence, np.float64, rows, "confidence")
    if not (0.0 <= right <= 1.0 and weight > 0.0 and isfinite(weight)):
        raise_for(BAD_INPUT, f"right must lie in 0 to 1 and weight be above 0: {right}, {weight}")
    cdef cnp.ndarray proof = _matrix(evidence, rows)
    cdef cnp.ndarray named = np.ascontiguousarray(() if label_cells is None else label_cells,
                                                  np.uint8)
    cdef cnp.ndarray after = rows_with(rows, max(<u32> cell, <u32> hashes.max(),
                                                 <u32> named.max(initial=0)))
    cdef cnp.ndarray x = np.ascontiguousarray(context, np.float64).reshape(-1)
    _fill(&ballot, cast, hashes, sure, classes)
    _fill_evidence(&ballot, proof, named)
    ballot.context, ballot.features = <double*> cnp.PyArray_DATA(x), <u32> x.shape[0]
    ballot.right = label if 0 < label <= ballot.labels else 0
    mixture_learn(<double*> cnp.PyArray_DATA(after), mixture_shape(after), &ballot, label, cell,
                  right, weight, &tally)
    return after


def weights(cnp.ndarray rows):
    """Return the weights of the models' votes, f64[k]; their sum is 1."""
    cdef RowShape shape = mixture_shape(rows)
    cdef cnp.ndarray found = np.zeros(rows.shape[0] - 1)
    mixture_weights(<double*> cnp.PyArray_DATA(rows), shape, <u32> (rows.shape[0] - 1), NULL,
                    <double*> cnp.PyArray_DATA(found))
    return found


cdef cnp.ndarray _column(object values, object dtype, cnp.ndarray rows, str name):
    found = np.ascontiguousarray(values, dtype)
    if found.ndim != 1 or found.shape[0] != rows.shape[0] - 1:
        raise_for(BAD_INPUT, f"{name} must have {rows.shape[0] - 1} numbers")
    return found


cdef cnp.ndarray _matrix(object evidence, cnp.ndarray rows):
    """Return the evidence by label, then model."""
    found = np.asarray(np.zeros((rows.shape[0] - 1, 0)) if evidence is None else evidence,
                       np.float64)
    if found.ndim != 2 or found.shape[0] != rows.shape[0] - 1 or found.shape[1] > VOTERS_MAX:
        raise_for(BAD_INPUT, f"evidence must be f64[{rows.shape[0] - 1}, labels] of at most"
                             f" {VOTERS_MAX} labels")
    return np.ascontiguousarray(found.T)


cdef int _fill_evidence(Ballot* ballot, cnp.ndarray evidence, cnp.ndarray label_cells) except -1:
    cdef u32 i
    if not evidence.shape[0]:
        return 0
    ballot.evidence, ballot.labels = <double*> cnp.PyArray_DATA(evidence), <u32> evidence.shape[0]
    ballot.label_cells = <u8*> cnp.PyArray_DATA(label_cells)
    for i in range(ballot.k):
        if ballot.votes[i] > ballot.labels or label_cells.shape[0] != evidence.shape[0]:
            raise_for(BAD_INPUT, f"evidence has {ballot.labels} labels; each vote must be for one"
                                 " of them, and label_cells must have as many numbers")
    return 0


cdef void _fill(Ballot* ballot, cnp.ndarray votes, cnp.ndarray cells, cnp.ndarray confidence,
                double classes):
    ballot.votes = <u32*> cnp.PyArray_DATA(votes)
    ballot.cells = <u8*> cnp.PyArray_DATA(cells)
    ballot.confidence = <double*> cnp.PyArray_DATA(confidence)
    ballot.k = <u32> votes.shape[0]
    ballot.classes = classes
    ballot.context = NULL
    ballot.features = 0
    ballot.evidence = NULL
    ballot.labels = ballot.right = 0
