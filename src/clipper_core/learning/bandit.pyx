"""Rules for choosing among models and for learning from their losses.

All weights are kept as logarithms with the largest at zero: a linear Exp3 weight falls to 5e-218
within 20 000 queries, and a model whose weight has become exactly 0 is never queried again. A loss
is clipped to 0..1 and a loss that is NaN is unknown, so no observation can leave a row that is not
finite.

Sources: Exp3 in the paper's form, section 5.1, with a floor on the probabilities; Exp4, section
5.2, as Hedge with a fixed share (Herbster and Warmuth 1998), never divided by the weight; inverse
gap weighting, Foster and Rakhlin 2020; Tsallis-INF with the reduced variance estimator, Zimmert and
Seldin 2019; KL-UCB, Garivier and Cappe 2011, with the discount of Garivier and Moulines 2008.
"""
cimport numpy as cnp
from libc.math cimport INFINITY, NAN, cos, exp, fabs, isfinite, log, pow, sqrt
from libc.string cimport memcpy

import numpy as np

from clipper_core.runtime.machine cimport u32, u64
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

cnp.import_array()

cdef enum:
    BISECTIONS = 14
    NEWTON_STEPS = 20

cdef double LOG_MIN = -700.0        # exp() of less is 0
cdef double WEIGHT_MAX = 20.0       # of a stacked vote
cdef double P_MIN = 1e-300          # of the labels that are not the answer
cdef double SHAPE_MAX = 1e15        # of a Beta's counts
cdef double[MEMORY_LENGTHS] DISCOUNTS   # of a memory, an observation
DISCOUNTS[0], DISCOUNTS[1], DISCOUNTS[2], DISCOUNTS[3] = 1.0, 0.9995, 0.998, 0.99
cdef double MEMORY_SHARE = 0.01         # of the memories' weights, spread evenly
cdef double HEAVIEST = 100.0            # weight of an observation, at most
cdef double TWO_PI = 6.283185307179586


# -- helper functions
# --------------------------------------------------------------------------------------------------

cdef double _clip(double x, double low, double high) noexcept nogil:
    return low if x < low else high if x > high else x


cdef double _lowest(const double* rows, u32 k, u32 stride, u32* at) noexcept nogil:
    """Return the lowest value of the first column. at: its row, the first of equal ones."""
    cdef u32 i
    cdef double low = INFINITY
    for i in range(k):
        if rows[i * stride] < low:
            low = rows[i * stride]
            at[0] = i
    return low


cdef void _softmax(const double* rows, u32 k, double floor, double* p) noexcept nogil:
    cdef u32 i
    cdef double total = 0.0, high = -INFINITY
    for i in range(k):
        high = max(high, rows[i])
    for i in range(k):
        p[i] = exp(rows[i] - high)
        total += p[i]
    floor = min(floor, 1.0 / k)
    for i in range(k):
        p[i] = floor + (1.0 - floor * k) * p[i] / total


cdef void _settle(double* rows, u32 k) noexcept nogil:
    """Normalize log-weights: the largest becomes 0, and none falls below a bound."""
    cdef u32 i
    cdef double high = -INFINITY
    for i in range(k):
        high = max(high, rows[i])
    for i in range(k):
        rows[i] = max(rows[i] - high, LOG_MIN)


cdef u32 _draw(const double* p, u32 k, double uniform) noexcept nogil:
    cdef u32 i
    for i in range(k - 1):
        uniform -= p[i]
        if uniform < 0:
            return i
    return k - 1


cdef double _random(u64* state) noexcept nogil:
    """Return the next number in (0, 1) of a stream that starts with the query's uniform number
    (splitmix64)."""
    cdef u64 z
    state[0] += <u64> 0x9E3779B97F4A7C15
    z = state[0]
    z = (z ^ (z >> 30)) * <u64> 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <u64> 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 11) * (1.0 / 9007199254740992.0) + 5e-17


cdef double _gamma(double shape, u64* state) noexcept nogil:
    """Draw from a gamma distribution (Marsaglia and Tsang 2000); shape is at least 1. A shape that
    is not finite counts as 1: else no draw would ever be accepted."""
    cdef double d = (shape if 1.0 <= shape <= SHAPE_MAX else 1.0) - 1.0 / 3.0
    cdef double c = 1.0 / sqrt(9.0 * d)
    cdef double x, v
    while True:
        x = sqrt(-2.0 * log(_random(state))) * cos(TWO_PI * _random(state))
        v = 1.0 + c * x
        v = v * v * v
        if v > 0 and log(_random(state)) < 0.5 * x * x + d - d * v + d * log(v):
            return d * v


# -- choosing
# --------------------------------------------------------------------------------------------------

cdef u32 _choose_greedy(const RuleState* rule, const double* rows, u32 k, double uniform,
                        double* p) noexcept nogil:
    cdef u32 i, best = 0
    _lowest(rows, k, 2, &best)
    for i in range(k):
        p[i] = rule.share / k
    p[best] += 1.0 - rule.share
    return _draw(p, k, uniform)


cdef u32 _choose_by_gap(const RuleState* rule, const double* rows, u32 k, double uniform,
                        double* p) noexcept nogil:
    cdef u32 i, best = 0
    cdef double low = _lowest(rows, k, 3, &best)
    cdef double rest = 1.0
    for i in range(k):
        if i != best:
            p[i] = 1.0 / (k + rule.eta * (rows[i * 3] - low))
            rest -= p[i]
    p[best] = rest
    return _draw(p, k, uniform)


cdef u32 _choose_sampled(const double* rows, u32 k, double uniform, double* p) noexcept nogil:
    cdef u64 state = <u64> (uniform * 9007199254740992.0)
    cdef u32 i, best = 0
    cdef double right, drawn, high = -1.0
    for i in range(k):
        right = _gamma(rows[i * 2], &state)
        drawn = right / (right + _gamma(rows[i * 2 + 1], &state))
        p[i] = 0.0
        if drawn > high:
            high = drawn
            best = i
    p[best] = 1.0
    return best


cdef double _kl(double p, double q) noexcept nogil:
    cdef double d = 0.0
    if p > 0:
        d += p * log(p / q)
    if p < 1:
        d += (1 - p) * log((1 - p) / (1 - q))
    return d


cdef u32 _choose_optimist(const RuleState* rule, const double* rows, u32 k, double seen,
                          double* p) noexcept nogil:
    """Choose by the upper bound. With a discount, the time is the sum of the counts (Garivier and
    Moulines 2008)."""
    cdef double budget, mean, low, high, middle, top = -1.0
    cdef u32 i, best = 0, _j
    if rule.discount < 1.0:
        seen = 0.0
        for i in range(k):
            seen += rows[i * 2 + 1]
    budget = log(max(seen, 2.0))
    for i in range(k):
        p[i] = 0.0
        if rows[i * 2 + 1] < 1.0:
            best = i
            break
        mean = 1.0 - rows[i * 2] / rows[i * 2 + 1]
        low, high = mean, 1.0 - 1e-12
        for _j in range(BISECTIONS):
            middle = 0.5 * (low + high)
            if rows[i * 2 + 1] * _kl(mean, middle) > budget:
                high = middle
            else:
                low = middle
        if low > top:
            top = low
            best = i
    p[best] = 1.0
    return best


cdef void _tsallis(const double* rows, u32 k, double eta, double* p) noexcept nogil:
    """Compute p[i] = 4 / (eta (L[i] - x))^2 with the x below all L for which their sum is 1, by
    Newton's method from the right."""
    cdef u32 i, at = 0, _j
    cdef double low = _lowest(rows, k, 1, &at)
    cdef double x = low - 2.0 / eta
    cdef double total, slope, root
    for _j in range(NEWTON_STEPS):
        total = slope = 0.0
        for i in range(k):
            root = 2.0 / (eta * (rows[i] - x))
            total += root * root
            slope += root * root * root
        if fabs(total - 1.0) < 1e-12:
            break
        x -= (total - 1.0) / (eta * slope)
    total = 0.0
    for i in range(k):
        root = 2.0 / (eta * (rows[i] - x))
        p[i] = root * root
        total += p[i]
    for i in range(k):
        p[i] /= total


cdef double _tsallis_eta(const RuleState* rule, double seen) noexcept nogil:
    return max(4.0 / sqrt(seen + 1.0), rule.eta)


cdef double memory_mean(const double* row) noexcept nogil:
    """Return the mean over the memories, by their weights. Each is drawn towards the longest one by
    one observation, so that a model that is not queried returns to its long-term loss."""
    cdef double longest = (row[1] + 0.5) / (row[0] + row[1] + 1.0), mean = 0.0
    cdef u32 m
    for m in range(MEMORY_LENGTHS):
        mean += row[8 + m] * (row[2 * m + 1] + longest) / (row[2 * m] + row[2 * m + 1] + 1.0)
    return mean


cdef u32 _choose_by_memory(const RuleState* rule, const double* rows, u32 k, double uniform,
                           double* p) noexcept nogil:
    """The width grows with the square root of the observations, so that the rule waits for late
    feedback."""
    cdef double[MODELS_MAX] means
    cdef u32 i, best = 0
    cdef double rest = 1.0, observed = 1.0, width
    for i in range(k):
        means[i] = memory_mean(rows + i * MEMORIES_COLUMNS)
        observed += rows[i * MEMORIES_COLUMNS] + rows[i * MEMORIES_COLUMNS + 1]
        if means[i] < means[best]:
            best = i
    width = rule.eta * sqrt(observed)
    for i in range(k):
        if i != best:
            p[i] = 1.0 / (k + width * (means[i] - means[best]))
            rest -= p[i]
    p[best] = rest
    return _draw(p, k, uniform)


cdef u32 rule_choose(const RuleState* rule, const double* rows, u32 k, double seen, double uniform,
                     double* p) noexcept nogil:
    if rule.kind == GREEDY:
        return _choose_greedy(rule, rows, k, uniform, p)
    if rule.kind == SQUARECB:
        return _choose_by_gap(rule, rows, k, uniform, p)
    if rule.kind == MEMORIES:
        return _choose_by_memory(rule, rows, k, uniform, p)
    if rule.kind == THOMPSON:
        return _choose_sampled(rows, k, uniform, p)
    if rule.kind == KL_UCB:
        return _choose_optimist(rule, rows, k, seen, p)
    if rule.kind == TSALLIS:
        _tsallis(rows, k, _tsallis_eta(rule, seen), p)
    else:
        _softmax(rows, k, rule.floor, p)
    return _draw(p, k, uniform)


# -- learning
# --------------------------------------------------------------------------------------------------

cdef void _learn_hedge(const RuleState* rule, double* rows, u32 k, const double* losses,
                       double weight) noexcept nogil:
    """An unknown loss counts as the mean of the known ones, so it changes no weight relative to the
    others."""
    cdef double[MODELS_MAX] p
    cdef double known = 0.0
    cdef u32 i, n = 0
    for i in range(k):
        if isfinite(losses[i]):
            known += _clip(losses[i], 0.0, 1.0)
            n += 1
    if n == 0:
        return
    known /= n
    for i in range(k):
        rows[i] -= rule.eta * weight * (_clip(losses[i], 0.0, 1.0) if isfinite(losses[i])
                                        else known)
    if rule.share > 0:
        _softmax(rows, k, rule.share / k, p)
        for i in range(k):
            rows[i] = log(p[i])
    _settle(rows, k)


cdef void _learn_mean(double* row, double rate, double loss, double weight) noexcept nogil:
    """Update an average that is over all of the first observations, and exponential afterwards."""
    row[1] += weight
    row[0] += min(max(rate, 1.0 / row[1]) * weight, 1.0) * (loss - row[0])


cdef void _learn_gap(const RuleState* rule, double* rows, u32 k, const double* losses,
                     double weight) noexcept nogil:
    """Update the mean, the count, and a long memory to which the mean of a model returns while the
    model is not queried.

    Without the long memory, a model that failed once is queried so seldom that its recovery is not
    noticed: its mean can only fall by its own few answers. With it, a model that was good in the
    long run gets another chance after a while, and loses it after some 50 bad answers. In the world
    of Figure 8 (bench/paper/figure8.py) a prototype went from .244 to .229, over 40 seeds.
    """
    cdef u32 i
    cdef double lost
    for i in range(k):
        if isfinite(losses[i]):
            lost = _clip(losses[i], 0.0, 1.0)
            _learn_mean(rows + i * 3, rule.discount, lost, weight)
            rows[i * 3 + 2] += min(max(rule.floor, 1.0 / rows[i * 3 + 1]) * weight,
                                   1.0) * (lost - rows[i * 3 + 2])
        else:
            rows[i * 3] += rule.share * weight * (rows[i * 3 + 2] - rows[i * 3])


cdef void _learn_tsallis(const RuleState* rule, double* rows, u32 k, double seen, double loss,
                         u32 chosen, double p,
                         double weight) noexcept nogil:
    cdef double[MODELS_MAX] now
    cdef double eta = _tsallis_eta(rule, seen)
    cdef double base, low
    cdef u32 i, at = 0
    _tsallis(rows, k, eta, now)
    for i in range(k):
        base = 0.5 if now[i] >= eta * eta else 0.0
        rows[i] = rule.discount * rows[i] + weight * (base
                                                      + ((loss - base) / p if i == chosen else 0.0))
    low = _lowest(rows, k, 1, &at)
    for i in range(k):
        rows[i] -= low


cdef void _learn_counts(const RuleState* rule, double* rows, u32 k, const double* losses,
                        double weight,
                        double least) noexcept nogil:
    """Learn counts of right and wrong (or right and all) answers, discounted together."""
    cdef u32 i
    cdef double lost
    for i in range(k):
        rows[i * 2] = least + rule.discount * (rows[i * 2] - least)
        rows[i * 2 + 1] = least + rule.discount * (rows[i * 2 + 1] - least)
        if isfinite(losses[i]):
            lost = _clip(losses[i], 0.0, 1.0)
            rows[i * 2] += weight * (1.0 - lost)
            rows[i * 2 + 1] += weight * (lost if rule.kind == THOMPSON else 1.0)


cdef void _learn_memories(double* rows, u32 k, const double* losses, double weight) noexcept nogil:
    """Multiply each memory's weight by the probability that it gave to the loss."""
    cdef double longest, expected, likelihood, total, lost = 0.0
    cdef double* row
    cdef u32 i, m
    weight = min(weight, HEAVIEST)
    for i in range(k):
        row = rows + i * MEMORIES_COLUMNS
        if isfinite(losses[i]):
            lost, total = _clip(losses[i], 0.0, 1.0), 0.0
            longest = (row[1] + 0.5) / (row[0] + row[1] + 1.0)
            for m in range(MEMORY_LENGTHS):
                expected = (row[2 * m + 1] + longest) / (row[2 * m] + row[2 * m + 1] + 1.0)
                likelihood = max(lost * expected + (1.0 - lost) * (1.0 - expected), 1e-6)
                row[8 + m] *= likelihood if weight == 1.0 else pow(likelihood, weight)
                total += row[8 + m]
            for m in range(MEMORY_LENGTHS):
                row[8 + m] = (MEMORY_SHARE / MEMORY_LENGTHS + (1.0 - MEMORY_SHARE)
                              * (row[8 + m] / total if total > 0 else 1.0 / MEMORY_LENGTHS))
        for m in range(MEMORY_LENGTHS):
            row[2 * m] *= DISCOUNTS[m]
            row[2 * m + 1] *= DISCOUNTS[m]
            if isfinite(losses[i]):
                row[2 * m] = min(row[2 * m] + weight * (1.0 - lost), SHAPE_MAX)
                row[2 * m + 1] = min(row[2 * m + 1] + weight * lost, SHAPE_MAX)


cdef void rule_learn(const RuleState* rule, double* rows, u32 k, double seen, const double* losses,
                     u32 chosen, double p,
                     double weight) noexcept nogil:
    cdef u32 i
    cdef double lost = losses[chosen] if chosen < k else NAN
    if rule.kind == HEDGE:
        _learn_hedge(rule, rows, k, losses, weight)
    elif rule.kind == THOMPSON or rule.kind == LOGODDS:
        _learn_counts(rule, rows, k, losses, weight, 1.0 if rule.kind == THOMPSON else 0.0)
    elif rule.kind == EXP3 and isfinite(lost) and p > 0:
        rows[chosen] -= rule.eta * weight * _clip(lost, 0.0, 1.0) / max(p, rule.floor)
        _settle(rows, k)
    elif rule.kind == TSALLIS and isfinite(lost) and p > 0:
        _learn_tsallis(rule, rows, k, seen, _clip(lost, 0.0, 1.0), chosen, max(p, rule.floor),
                       weight)
    elif rule.kind == MEMORIES:
        _learn_memories(rows, k, losses, weight)
    elif rule.kind == SQUARECB:
        _learn_gap(rule, rows, k, losses, weight)
    elif rule.kind == GREEDY:
        for i in range(k):
            if isfinite(losses[i]):
                _learn_mean(rows + i * 2, rule.discount, _clip(losses[i], 0.0, 1.0), weight)
    elif rule.kind == KL_UCB:
        for i in range(k):
            rows[i * 2] *= rule.discount
            rows[i * 2 + 1] *= rule.discount
            if isfinite(losses[i]):
                rows[i * 2] += weight * _clip(losses[i], 0.0, 1.0)
                rows[i * 2 + 1] += weight


# -- votes
# --------------------------------------------------------------------------------------------------

cdef void rule_weights(const RuleState* rule, const double* rows, u32 k, double classes,
                       double* weights) noexcept nogil:
    cdef u32 i
    cdef double[MODELS_MAX] odds
    cdef double accuracy, total = 0.0
    if rule.kind == EXP3 or rule.kind == HEDGE:
        _softmax(rows, k, rule.floor, weights)
        return
    for i in range(k):
        if rule.kind == STACKING:
            weights[i] = rows[i]
        elif rule.kind == LOGODDS:
            accuracy = _clip((rows[i * 2] + 1.0) / (rows[i * 2 + 1] + 2.0), 1e-3, 1 - 1e-3)
            odds[i] = accuracy * max(classes - 1.0, 1.0) / (1.0 - accuracy)
            weights[i] = max(log(odds[i]), 0.0)
        elif rule.kind == THOMPSON:
            weights[i] = rows[i * 2] / (rows[i * 2] + rows[i * 2 + 1])
        else:
            weights[i] = 1.0 / k
        total += weights[i]
    if rule.kind == LOGODDS and total <= 0:     # none is better than chance: by how bad they are
        for i in range(k):
            weights[i] = odds[i]
            total += odds[i]
    for i in range(k):
        weights[i] = weights[i] / total if total > 0 else 1.0 / k


cdef void _learn_in_part(const RuleState* rule, double* rows, u32 k, const u32* votes, u32 label,
                         const double* score, double high, double others, double right,
                         double weight) noexcept nogil:
    """Take one step for -right ln(p) - (1 - right) ln(1 - p), where p is the probability of the
    label. others: the sum of exp(score - high) over labels without a vote, this one too."""
    cdef double[MODELS_MAX] each
    cdef double p, rest = 0.0, own = exp(-high)
    cdef u32 i, j
    cdef bint has_votes = False
    for i in range(k):
        each[i] = exp(score[i] - high) if votes[i] else 0.0
        if votes[i] == label:
            has_votes, own = True, each[i]
            continue
        for j in range(i):
            if votes[j] == votes[i]:
                break
        else:
            rest += each[i]
    rest += others if has_votes else max(others - own, 0.0)
    p = own / (own + rest)
    for i in range(k):
        if votes[i]:
            rows[i] = _clip(rows[i] - rule.eta * weight * (
                p - right if votes[i] == label else each[i] / max(rest, P_MIN) * (right - p)), 0.0,
                            WEIGHT_MAX)


cdef void stack_learn(const RuleState* rule, double* rows, u32 k, const u32* votes, u32 label,
                      double classes, double right, double weight) noexcept nogil:
    """Take one step of logistic regression. The score of a label is the sum of the weights of the
    models that voted for it; a label without votes scores 0."""
    cdef double[MODELS_MAX] score
    cdef u32 i, j
    cdef u32 voted = 0
    cdef double total, p, high = 0.0
    for i in range(k):
        score[i] = 0.0
        for j in range(k):
            if votes[j] == votes[i]:
                score[i] += rows[j]
        for j in range(i):
            if votes[j] == votes[i]:
                break
        else:
            voted += votes[i] != 0
    for i in range(k):                      # exp() of a difference to the largest never overflows
        if votes[i]:
            high = max(high, score[i])
    total = max(classes - voted, 0.0) * exp(-high)
    if right < 1.0:
        _learn_in_part(rule, rows, k, votes, label, score, high, total, right, weight)
        return
    for i in range(k):                      # each label once, by the first model that voted for it
        for j in range(i):
            if votes[j] == votes[i]:
                break
        else:
            if votes[i]:
                total += exp(score[i] - high)
    for i in range(k):
        if votes[i]:
            p = exp(score[i] - high) / total
            rows[i] = _clip(rows[i] - rule.eta * weight * (p - (votes[i] == label)), 0.0,
                            WEIGHT_MAX)


cdef void stack_learn_evidence(const RuleState* rule, double* rows, u32 k, const double* evidence,
                               u32 labels, u32 label, double classes, double right, double weight,
                               double* p) noexcept nogil:
    """The score of a label is the sum of the models' weights, times their evidence. The right label
    comes first, so that sums do not depend on its number."""
    cdef u32 i, j, at
    cdef double total, rest, gradient, own, high = 0.0
    for at in range(labels):
        p[at] = 0.0
        for i in range(k):
            p[at] += rows[i] * evidence[at * k + i]
        high = max(high, p[at])
    total = rest = max(classes - labels, 0.0) * exp(-high)
    for j in range(labels):
        at = label - 1 if j == 0 else j - (j < label)
        p[at] = exp(p[at] - high)
        total += p[at]
        rest += p[at] if j else 0.0
    own = p[label - 1] / total
    for at in range(labels):
        if right >= 1.0:
            p[at] = p[at] / total - (at + 1 == label)
        else:                               # as _learn_in_part
            p[at] = own - right if at + 1 == label else p[at] / max(rest, P_MIN) * (right - own)
    for i in range(k):
        gradient = 0.0
        for j in range(labels):
            at = label - 1 if j == 0 else j - (j < label)
            gradient += p[at] * evidence[at * k + i]
        rows[i] = _clip(rows[i] - rule.eta * weight * gradient, 0.0, WEIGHT_MAX)


# -- for Python
# --------------------------------------------------------------------------------------------------

cdef cnp.ndarray doubles_copied(cnp.ndarray array):
    cdef cnp.ndarray copy = cnp.PyArray_SimpleNew(array.ndim, array.shape, cnp.NPY_DOUBLE)
    memcpy(cnp.PyArray_DATA(copy), cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))
    return copy


cdef void rows_limited(double* rows, u32 n, u32 width, const u32* columns, u32 columns_n,
                       double least, double counts) noexcept nogil:
    cdef double* row = rows
    cdef double most, share
    cdef u32 _i, at
    for _i in range(n):
        most = 0.0
        for at in range(columns_n):
            most = max(most, row[columns[at]] - least)
        share = min(1.0, counts / max(most, 1e-300))
        for at in range(columns_n):
            row[columns[at]] = least + share * (row[columns[at]] - least)
        row += width


cdef class Rule:
    """A rule with its parameters. Takes rows f64[k, columns] and returns new ones; nothing is
    changed in place. Threads: any.

    kind: a RuleKind.  eta: step (EXP3, HEDGE, STACKING), width (SQUARECB, MEMORIES), least step
    (TSALLIS). share: fixed share (HEDGE), share of chance (GREEDY), drift back to the long memory
    (SQUARECB). floor: least probability; rate of the memory (SQUARECB); ridge (LINEAR).
    discount: factor of what was learned, per observation (THOMPSON, LOGODDS, TSALLIS, KL_UCB,
    LINEAR); rate of the average (GREEDY, SQUARECB).
    """

    def __cinit__(self, u32 kind, *, double eta=0.0, double share=0.0, double floor=0.0,
                  double discount=1.0):
        self.state.kind = kind
        if not EXP3 <= kind <= LINEAR:
            raise_for(BAD_INPUT, f"no rule {kind}")
        self.state.columns = 1 if kind in (EXP3, HEDGE, TSALLIS,
                                           STACKING) else 3 if kind == SQUARECB else 2
        if kind in (MIXTURE, MEMORIES, LINEAR):
            self.state.columns = MEMORIES_COLUMNS if kind == MEMORIES else 0
        self.state.eta = eta
        self.state.share = share
        self.state.floor = floor
        self.state.discount = discount

    @property
    def kind(self):
        """The rule's RuleKind."""
        return self.state.kind

    @property
    def columns(self):
        """Number of columns of a model in a state."""
        return self.state.columns

    cdef cnp.ndarray checked(self, cnp.ndarray rows):
        if (cnp.PyArray_TYPE(rows) != cnp.NPY_DOUBLE or rows.ndim != 2
            or not cnp.PyArray_IS_C_CONTIGUOUS(rows)
                or not 1 <= rows.shape[0] <= MODELS_MAX or rows.shape[1] != self.state.columns):
            raise_for(BAD_INPUT,
                      f"rows must be f64[k, {self.state.columns}] with 1 to {MODELS_MAX} models")
        return rows

    cdef cnp.ndarray copied(self, cnp.ndarray rows):
        return doubles_copied(self.checked(rows))

    def choose(self, cnp.ndarray rows, double seen, double uniform):
        """Return (model to query, probability of that choice). seen: observations so far; uniform:
        in [0, 1)."""
        cdef double[MODELS_MAX] p
        self.checked(rows)
        cdef u32 i = rule_choose(&self.state, <double*> cnp.PyArray_DATA(rows), <u32> rows.shape[0],
                                 seen, uniform, p)
        return i, p[i]

    def probabilities(self, cnp.ndarray rows, double seen):
        """Return how probable each choice is now, f64[k]; of sampled and optimistic rules, 1 for
        the model that would be chosen now."""
        cdef cnp.ndarray p = np.zeros(self.checked(rows).shape[0])
        rule_choose(&self.state, <double*> cnp.PyArray_DATA(rows), <u32> rows.shape[0], seen, 0.5,
                    <double*> cnp.PyArray_DATA(p))
        return p

    def weights(self, cnp.ndarray rows, double classes=2.0):
        """Return the weights of the models' votes, f64[k]; their sum is 1."""
        cdef cnp.ndarray w = np.zeros(self.checked(rows).shape[0])
        rule_weights(&self.state, <double*> cnp.PyArray_DATA(rows), <u32> rows.shape[0], classes,
                     <double*> cnp.PyArray_DATA(w))
        return w

    def limited(self, cnp.ndarray rows, cnp.ndarray columns, double least, double counts):
        """Return a copy of the rows in which each row's evidence is at most `counts`: the largest
        value of these columns, above `least`. They are scaled towards `least` together.

        columns: u32[n].
        """
        cdef cnp.ndarray after = self.copied(rows)
        cdef const u32* column = <u32*> cnp.PyArray_DATA(columns)
        cdef cnp.npy_intp at, n = columns.shape[0]
        if (cnp.PyArray_TYPE(columns) != cnp.NPY_UINT32 or columns.ndim != 1
                or not cnp.PyArray_IS_C_CONTIGUOUS(columns)):
            raise_for(BAD_INPUT, "columns must be u32[n]")
        for at in range(n):
            if column[at] >= self.state.columns:
                raise_for(BAD_INPUT, f"a row has {self.state.columns} columns")
        rows_limited(<double*> cnp.PyArray_DATA(after), <u32> after.shape[0], self.state.columns,
                     column, <u32> n, least, counts)
        return after

    def learn(self, cnp.ndarray rows, double seen, losses, int chosen=-1, double p=1.0,
              double weight=1.0):
        """Return new rows after one observation. losses: f64[k], NaN where unknown; chosen: the
        only model that was queried, with probability `p`; -1 when all were."""
        cdef cnp.ndarray after = self.copied(rows)
        cdef cnp.ndarray lost = np.ascontiguousarray(losses, np.float64)
        cdef u32 k = <u32> after.shape[0]
        if lost.ndim != 1 or lost.shape[0] != after.shape[0] or chosen >= <int> k:
            raise_for(BAD_INPUT, f"losses must be f64[{k}] and chosen below {k}")
        rule_learn(&self.state, <double*> cnp.PyArray_DATA(after), k, seen,
                   <double*> cnp.PyArray_DATA(lost),
                   k if chosen < 0 else <u32> chosen, p, weight)
        return after

    def learn_many(self, cnp.ndarray rows, double seen, losses, chosen=None, p=None):
        """Return new rows after n observations in their order. losses: f64[n, k]; chosen: i32[n];
        p: f64[n]. Releases the GIL."""
        cdef cnp.ndarray after = self.copied(rows)
        cdef cnp.ndarray lost = np.ascontiguousarray(losses, np.float64)
        cdef u32 k = <u32> after.shape[0]
        if lost.ndim != 2 or lost.shape[1] != k:
            raise_for(BAD_INPUT, f"losses must be f64[n, {k}]")
        cdef u64 n = <u64> lost.shape[0], i
        cdef cnp.ndarray picks = (np.full(n, k, np.uint32) if chosen is None
                                  else np.ascontiguousarray(chosen, np.uint32))
        cdef cnp.ndarray odds = np.ones(n) if p is None else np.ascontiguousarray(p, np.float64)
        if (picks.ndim != 1 or odds.ndim != 1 or <u64> picks.shape[0] != n
            or <u64> odds.shape[0] != n):
            raise_for(BAD_INPUT, f"chosen and p must be arrays of {n}")
        cdef double* row = <double*> cnp.PyArray_DATA(after)
        cdef const double* loss = <double*> cnp.PyArray_DATA(lost)
        cdef const u32* pick = <u32*> cnp.PyArray_DATA(picks)
        cdef const double* odd = <double*> cnp.PyArray_DATA(odds)
        with nogil:
            for i in range(n):
                rule_learn(&self.state, row, k, seen + i, loss + i * k, min(pick[i], k), odd[i],
                           1.0)
        return after

    def stack(self, cnp.ndarray rows, votes, label, double classes=2.0, double weight=1.0,
              double right=1.0):
        """Return new rows of STACKING. votes: u32[k] or u32[n, k], codes of labels from 1, 0 where
        a model has no prediction; label: the code of the right one, or u32[n]. right: how right
        that is, 0 to 1."""
        cdef cnp.ndarray after = self.copied(rows)
        cdef u32 k = <u32> after.shape[0]
        cdef cnp.ndarray cast = np.ascontiguousarray(votes, np.uint32).reshape(-1, k)
        cdef cnp.ndarray truth = np.ascontiguousarray(label, np.uint32).reshape(-1)
        if truth.shape[0] != cast.shape[0]:
            raise_for(BAD_INPUT, f"{cast.shape[0]} rows of votes, and {truth.shape[0]} labels")
        cdef u64 i, n = <u64> cast.shape[0]
        cdef double* row = <double*> cnp.PyArray_DATA(after)
        cdef const u32* vote = <u32*> cnp.PyArray_DATA(cast)
        cdef const u32* code = <u32*> cnp.PyArray_DATA(truth)
        with nogil:
            for i in range(n):
                stack_learn(&self.state, row, k, vote + i * k, code[i], classes, right, weight)
        return after

    def stack_evidence(self, cnp.ndarray rows, evidence, u32 label, double classes,
                       double weight=1.0, double right=1.0):
        """Return new rows of STACKING after one observation with class probabilities. evidence:
        f64[k, labels], how much each model is for each label, 0 to 1; label: the number of the
        right one, from 1. right: how right that is, 0 to 1."""
        cdef cnp.ndarray after = self.copied(rows)
        cdef cnp.ndarray cast = np.ascontiguousarray(evidence, np.float64)
        if cast.ndim != 2 or cast.shape[0] != after.shape[0] or not 1 <= label <= cast.shape[1]:
            raise_for(BAD_INPUT, f"evidence must be f64[{after.shape[0]}, labels], and label the"
                                 " number of one of them")
        cdef u32 k = <u32> cast.shape[0], labels = <u32> cast.shape[1]
        cdef cnp.ndarray by_label = np.ascontiguousarray(cast.T)
        cdef cnp.ndarray p = np.empty(labels)
        stack_learn_evidence(&self.state, <double*> cnp.PyArray_DATA(after), k,
                             <double*> cnp.PyArray_DATA(by_label), labels, label, classes, right,
                             weight, <double*> cnp.PyArray_DATA(p))
        return after
