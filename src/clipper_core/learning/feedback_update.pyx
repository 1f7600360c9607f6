"""Updates a state by one observation, or an array of them: losses, calibration, one step of the
rule."""
cimport cython
cimport numpy as cnp
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport Py_EQ, PyObject, PyObject_RichCompareBool
from libc.math cimport NAN, exp, isfinite, log, rint

import numpy as np

from clipper_core.learning.bandit cimport (
    GREEDY, HEDGE, KL_UCB, LINEAR, LOGODDS, MEMORIES, MIXTURE, SQUARECB, STACKING, THOMPSON,
    doubles_copied, memory_mean, rule_learn, rule_weights, stack_learn, stack_learn_evidence,
)
from clipper_core.learning.class_evidence cimport (
    LABELS_READ, class_evidence_code, class_evidence_read, reports_classes,
)
from clipper_core.learning.linear cimport (
    ContextRule, context_columns, context_learn, context_size, context_widened,
)
from clipper_core.learning.mixture cimport (
    VOTERS_MAX, Ballot, Tally, mixture_has_shape, mixture_is_untouched, mixture_learn,
    mixture_shape, mixture_tally, rows_with, rows_with_features, rows_with_pool,
)
from clipper_core.learning.policy_states cimport (
    block_rows, block_sure, block_with, state_rows, state_sure,
)
from clipper_core.runtime.machine cimport CHECK
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.runtime.status cimport BAD_INPUT, raise_for
from clipper_core.wire.comparison cimport key_hash, key_of_label, key_of_output, keys_are_equal

cnp.import_array()

cdef enum:
    LABEL_BITS = 64
    BINS_MAX = 1024

cdef ObjectMember OUTPUT, CONFIDENCE, QUALIFIERS    # of a prediction
cdef ObjectMember MODELS, ROWS, SURE, SEEN, LABELS, TRACKED, DIFFERENCES    # of a state
cdef ObjectMember THRESHOLD, NUMBERS, SCALE, COUNT, KNOWN       # of the thresholds of sets
OUTPUT.name, CONFIDENCE.name, QUALIFIERS.name = b"output", b"confidence", b"qualifiers"
MODELS.name, ROWS.name, SURE.name, SEEN.name = b"models", b"rows", b"sure", b"seen"
LABELS.name, TRACKED.name, DIFFERENCES.name = b"labels", b"tracked", b"differences"
THRESHOLD.name, NUMBERS.name, SCALE.name = b"labels", b"numbers", b"scale"
COUNT.name, KNOWN.name = b"count", b"known"
cdef double[65] CLASSES         # by the number of bits that are set in `labels`


cdef extern from "learning/finite.hpp" namespace "clipper" nogil:
    bint doubles_are_finite(const double* at, size_t n) noexcept

cdef extern from *:
    int popcount "__builtin_popcountll"(unsigned long long x) noexcept nogil
    int lowest_bit "__builtin_ctzll"(unsigned long long x) noexcept nogil


cdef _fill_classes():
    """Number of labels seen, by linear counting; equal to `LearnedState.classes`."""
    cdef u32 bits
    for bits in range(LABEL_BITS + 1):
        CLASSES[bits] = max(2.0,
                            rint(LABEL_BITS * log(LABEL_BITS / max(<double> LABEL_BITS - bits,
                                                                   1.0))))


_fill_classes()


cdef double feedback_update_classes(u64 labels) noexcept nogil:
    return CLASSES[popcount(labels)]


cdef inline double* _bin(const Learner* learner, double raw) noexcept nogil:
    """Return the calibration bin of a confidence. A confidence on an edge (one half, for example)
    belongs to the bin above, whatever its rounding error."""
    return learner.sure + 2 * min(<u32> (raw * learner.bins + 1e-9), learner.bins - 1)


# -- the confidence that the answer would have had
# -------------------------------------------------------------------------------

cdef inline bint _chooses_one(u32 kind) noexcept nogil:
    return kind != HEDGE and kind != LOGODDS and kind != STACKING and kind != MIXTURE


cdef inline double _sound(double confidence) noexcept nogil:
    return 0.0 if confidence < 0.0 else 1.0 if confidence > 1.0 else confidence


cdef double _accuracy(const Learner* learner, u32 i) noexcept nogil:
    """Return how often model i was right, by its row."""
    cdef const RuleState* rule = learner.rule
    cdef const double* row = learner.rows + i * learner.columns
    cdef double good
    if rule.kind == LINEAR:
        good = row[learner.columns - context_size(learner.columns)]
        good = (good + 1.0) / (row[0] * row[0] - 1.0 + 2.0)
        return (2.0 * _sound(good) - 1.0 + 1.0) / 2.0
    if rule.kind == THOMPSON:
        return row[0] / (row[0] + row[1])
    if rule.kind == KL_UCB:
        return 1.0 - (row[0] + 1.0) / (row[1] + 2.0)
    if rule.kind == MEMORIES:
        return 1.0 - memory_mean(row)
    if rule.kind == SQUARECB or rule.kind == GREEDY:
        return 1.0 - row[0] if row[1] > 0 else 0.5
    return 0.5


cdef bint reads_classes(u32 kind) noexcept nogil:
    return kind == STACKING or kind == MIXTURE


cdef inline bint _votes(const Learner* learner, const Observation* observation,
                        u32 i) noexcept nogil:
    return observation.arrived[i] and (observation.chosen >= learner.k or observation.chosen == i)


cdef inline bint _was_queried(const Learner* learner, const Observation* observation,
                              u32 i) noexcept nogil:
    if observation.queried != NULL:
        return observation.queried[i]
    return observation.chosen >= learner.k or observation.chosen == i


cdef double _queried_weights(const Learner* learner, const Observation* observation,
                           double* w) noexcept nogil:
    """Compute the weight of each model's vote. Return the total weight of the queried models."""
    cdef u32 i
    cdef double total = 0.0
    cdef bint some = False
    rule_weights(learner.rule, learner.rows, learner.k, CLASSES[popcount(learner.labels)], w)
    for i in range(learner.k):
        some = some or (w[i] > 0 and _was_queried(learner, observation, i))
    for i in range(learner.k):
        if not some:
            w[i] = 1.0
        if _was_queried(learner, observation, i):
            total += w[i]
    return total


cdef u32 _tally(const Learner* learner, const Observation* observation, const double* w,
                double* behind,
                double* surely,
                double* top) noexcept nogil:
    """Add up the votes for each label. Return the number of different labels.

    behind[i]: the weight of the votes for model i's label if it is the first model with that label,
    else -1.  surely[i]: the sum of these models' own confidences."""
    cdef u32 i, j, labels = 0
    top[0] = -1.0
    for i in range(learner.k):
        behind[i] = -1.0
        if not _votes(learner, observation, i):
            continue
        for j in range(i):
            if behind[j] >= 0 and observation.values[j] == observation.values[i]:
                behind[j] += w[i]
                surely[j] += (_sound(observation.confidence[i])
                              if observation.confidence[i] == observation.confidence[i] else 0.5)
                break
        else:
            behind[i] = w[i]
            surely[i] = (_sound(observation.confidence[i])
                         if observation.confidence[i] == observation.confidence[i] else 0.5)
            labels += 1
    for i in range(learner.k):
        top[0] = max(top[0], behind[i])
    return labels


cdef double _softmax(const Learner* learner, const double* behind, u32 labels,
                     u32 winner) noexcept nogil:
    """Return the softmax of the winner over the scores of all labels, also those without a vote.
    winner k: a label without a vote."""
    cdef u32 i
    cdef double total = 0.0, others = 0.0, high = 0.0, top
    for i in range(learner.k):
        total += learner.rows[i]
    for i in range(learner.k):
        if behind[i] >= 0:
            high = max(high, behind[i] * total)
    for i in range(learner.k):
        if behind[i] >= 0:
            others += exp(behind[i] * total - high)
    top = exp(behind[winner] * total - high) if winner < learner.k else exp(-high)
    return top / (others + max(CLASSES[popcount(learner.labels)] - labels, 0.0) * exp(-high))


cdef double _stacked(const Learner* learner, const Observation* observation,
                     double* p) noexcept nogil:
    """Compute the probability of each label that models gave or named, by stacking. Return that of
    each other label."""
    cdef const ClassEvidence* named = observation.named
    cdef double[MODELS_MAX] w
    cdef double total = 0.0, high = 0.0, other, sum
    cdef u32 i, at
    _queried_weights(learner, observation, w)
    for i in range(learner.k):
        total += learner.rows[i]
    for at in range(named.labels):
        p[at] = 0.0
        for i in range(learner.k):
            if named.codes[i]:
                p[at] += w[i] * named.of[at * learner.k + i]
        p[at] *= total
        high = max(high, p[at])
    other = exp(-high)
    sum = max(CLASSES[popcount(learner.labels)] - named.labels, 0.0) * other
    for at in range(named.labels):
        p[at] = exp(p[at] - high)
        sum += p[at]
    for at in range(named.labels):
        p[at] /= sum
    return other / sum


cdef double _likeliest_stacked(const Learner* learner, const Observation* observation,
                               u32* winner) noexcept nogil:
    """Return the probability of the winner of the votes, or of the label that is more probable, of
    equals the first, and is then the winner."""
    cdef double[LABELS_READ + 1] p
    cdef double top = 0.0
    cdef u32 at, best = 0
    _stacked(learner, observation, p)
    for at in range(observation.named.labels):
        top = max(top, p[at])
    top *= 1 - 1e-12
    at = observation.named.codes[winner[0]] - 1
    if p[at] >= top:
        return p[at]
    for at in range(observation.named.labels):
        if p[at] >= top:
            best = at
            break
    winner[0] = _voter_of(observation, learner.k, best)
    return p[best]


cdef inline u32 _voter_of(const Observation* observation, u32 k, u32 at) noexcept nogil:
    """Return the first model that gave the label of this index; k and the index if none did."""
    cdef u32 i
    for i in range(k):
        if observation.named.codes[i] == at + 1:
            return i
    return k + at


cdef inline bint _is_right(const Learner* learner, const Observation* observation,
                           u32 winner) noexcept nogil:
    if winner < learner.k:
        return observation.values[winner] == observation.label
    return winner - learner.k + 1 == observation.right


cdef u32 _codes(const Learner* learner, const Observation* observation, bint queried,
                u32* votes) noexcept nogil:
    """Number the labels: 1 for the right one, 2 and above for others, 0 where no prediction
    arrived. Return the highest number. queried: 0 also for models that were not queried."""
    cdef u32 i, j, codes = 1
    for i in range(learner.k):
        votes[i] = 0
        if not observation.arrived[i] or (queried and not _votes(learner, observation, i)):
            continue
        votes[i] = 1
        if observation.values[i] != observation.label:
            for j in range(i):
                if votes[j] > 1 and observation.values[j] == observation.values[i]:
                    votes[i] = votes[j]
                    break
            else:
                codes += 1
                votes[i] = codes
    return codes


cdef void _ballot(const Learner* learner, const Observation* observation, const u32* votes,
                  double classes, Ballot* ballot) noexcept nogil:
    ballot.votes, ballot.cells, ballot.confidence = (votes, observation.cells,
                                                     observation.confidence)
    ballot.k, ballot.classes = learner.k, classes
    ballot.context, ballot.features = observation.context, observation.features
    ballot.evidence = NULL
    ballot.labels = ballot.right = 0
    if observation.named != NULL:
        ballot.votes = &observation.named.codes[0]
        ballot.evidence = &observation.named.of[0]
        ballot.label_cells = &observation.named.cells[0]
        ballot.labels = observation.named.labels
        ballot.classes = max(classes, <double> ballot.labels)


cdef double _likeliest(const Learner* learner, const Observation* observation, const Tally* tally,
                       u32* winner) noexcept nogil:
    """Return the highest probability of a label, and a model that gave it, or k and the index of a
    label that is only named; -1 without votes."""
    cdef double[MODELS_MAX] surely
    cdef u32 i, at, code = VOTERS_MAX + 1
    cdef double top = 0.0, high = -1.0
    if tally.labels == 0:
        return -1.0
    for at in range(tally.named):
        top = max(top, tally.p[at])
    for at in range(tally.labels):
        surely[at] = 0.0
    for i in range(learner.k):
        if _votes(learner, observation, i):
            surely[tally.of[i]] += (_sound(observation.confidence[i])
                                    if observation.confidence[i] == observation.confidence[i]
                                    else 0.5)
    for at in range(tally.labels):      # of equals the surer, then the first
        if tally.p[at] >= top * (1 - 1e-12) and surely[at] > high:
            high = surely[at]
            winner[0] = tally.first[at]
    if high < 0.0:                      # the first of the labels that only class probabilities name
        for at in range(tally.labels, tally.named):
            if tally.p[at] == top:
                code = min(code, tally.code[at])
        # none if the probabilities are not numbers
        winner[0] = learner.k + code - 1 if code <= VOTERS_MAX else tally.first[0]
    return min(top, 1.0)


cdef void _mixed(const Learner* learner, const Observation* observation,
                 Tally* tally) noexcept nogil:
    """Compute a mixture's probabilities of the labels that queried models gave."""
    cdef u32[MODELS_MAX] votes
    cdef Ballot ballot
    _codes(learner, observation, True, votes)
    _ballot(learner, observation, votes, CLASSES[popcount(learner.labels)], &ballot)
    mixture_tally(learner.rows, learner.shape, &ballot, tally)


cdef double feedback_update_raw(const Learner* learner, const Observation* observation,
                                u32* winner) noexcept nogil:
    cdef double[MODELS_MAX] w
    cdef double[MODELS_MAX] behind
    cdef double[MODELS_MAX] surely
    cdef double behind_all, top, high = -1.0
    cdef Tally tally
    cdef u32 i, labels
    if _chooses_one(learner.rule.kind):
        i = observation.chosen
        if i >= learner.k or not observation.arrived[i]:
            return -1.0
        winner[0] = i
        if observation.confidence[i] == observation.confidence[i]:
            return _sound(observation.confidence[i])
        return _accuracy(learner, i)
    if learner.rule.kind == MIXTURE and not mixture_is_untouched(learner.rows, learner.shape,
                                                                 learner.k):
        _mixed(learner, observation, &tally)
        return _likeliest(learner, observation, &tally, winner)
    behind_all = _queried_weights(learner, observation, w)
    labels = _tally(learner, observation, w, behind, surely, &top)
    if labels == 0:
        return -1.0
    for i in range(learner.k):        # of equals the surer, then the first
        if behind[i] >= 0 and behind[i] >= top * (1 - 1e-12) and surely[i] > high:
            high = surely[i]
            winner[0] = i
    if learner.rule.kind == STACKING and observation.named != NULL:
        return _likeliest_stacked(learner, observation, winner)
    if learner.rule.kind == STACKING:
        return _softmax(learner, behind, labels, winner[0])
    return min(behind[winner[0]] / behind_all, 1.0) if behind_all > 0 else 0.0


cdef double _probability(const Learner* learner, const Observation* observation, double raw,
                         const Tally* known, bint* voted) noexcept nogil:
    """Return the probability that the state gave the right label, where that is not the answer.
    known: a mixture's probabilities, or NULL.  voted: whether a queried model gave the label, or
    named it."""
    cdef double[LABELS_READ + 1] p
    cdef double[MODELS_MAX] w
    cdef double[MODELS_MAX] behind
    cdef double[MODELS_MAX] surely
    cdef Tally tally
    cdef double classes = CLASSES[popcount(learner.labels)], behind_all, share = 0.0, top
    cdef double* bin
    cdef u32 i, labels, first = learner.k
    voted[0] = False
    if _chooses_one(learner.rule.kind):
        bin = _bin(learner, raw)
        return ((1.0 - (bin[0] + learner.doubt * raw) / (bin[1] + learner.doubt))
                / max(classes - 1.0, 1.0))
    for i in range(learner.k):
        if first == learner.k and _votes(learner, observation, i) and (observation.values[i]
                                                                       == observation.label):
            first, voted[0] = i, True
    if observation.named != NULL:
        voted[0] = observation.right <= observation.named.labels
    if learner.rule.kind == MIXTURE:
        if known == NULL:
            _mixed(learner, observation, &tally)
            known = &tally
        if first < learner.k:
            return known.p[known.of[first]]
        for i in range(known.labels, known.named if voted[0] else 0):
            if known.code[i] == observation.right:
                return known.p[i]
        return known.other
    if learner.rule.kind == STACKING and observation.named != NULL:
        top = _stacked(learner, observation, p)
        return p[observation.right - 1] if voted[0] else top
    behind_all = _queried_weights(learner, observation, w)
    labels = _tally(learner, observation, w, behind, surely, &top)
    if learner.rule.kind == STACKING:
        return _softmax(learner, behind, labels, first)
    if voted[0]:
        return behind[first] / behind_all
    for i in range(learner.k):
        share += max(behind[i], 0.0) / behind_all
    return max(1.0 - share, 0.0) / max(classes - labels, 1.0)


cdef double feedback_update_odds(const Learner* learner, Observation* observation, u32 n,
                                 const u32* voters, double* p) noexcept nogil:
    cdef Tally tally
    cdef const Tally* known = NULL
    cdef bint voted
    cdef u32 i
    if learner.rule.kind == STACKING and observation.named != NULL:
        return _stacked(learner, observation, p)
    if learner.rule.kind == MIXTURE:
        observation.label = -1
        _mixed(learner, observation, &tally)
        known = &tally
    for i in range(n):
        observation.label = observation.values[voters[i]] if voters[i] < learner.k else -1
        observation.right = i + 1
        p[i] = _probability(learner, observation, 0.0, known, &voted)
    observation.label = -1
    observation.right = n + 1
    return _probability(learner, observation, 0.0, known, &voted)


# -- learning
# --------------------------------------------------------------------------------------------------

cdef void _move(Learner* learner, const Observation* observation, double raw, u32 winner,
                const Tally* known) noexcept nogil:
    """Adjust the threshold of the sets' labels: Gibbs and Candes 2021."""
    cdef bint held = _is_right(learner, observation, winner), voted
    cdef double p
    if not held:
        p = _probability(learner, observation, raw, known, &voted)
        held = (voted or observation.known) and 1.0 - p <= learner.threshold
    learner.threshold = min(max(learner.threshold + learner.step * (learner.coverage - held), 0.0),
                            1.0 + learner.step)
    learner.moved = True


cdef void _calibrate(Learner* learner, const Observation* observation, double raw, u32 winner,
                     const Tally* known) noexcept nogil:
    """Count an answer that the state before would have given with this confidence; below 0: none.
    Its label's probability, which moves the threshold, is read before the rule's step, or known."""
    cdef double* bin
    if raw < 0:
        return
    if learner.coverage > 0:
        _move(learner, observation, raw, winner, known)
    bin = _bin(learner, raw)
    bin[0] = learner.fade * bin[0] + _is_right(learner, observation, winner)
    bin[1] = learner.fade * bin[1] + 1.0


cdef void _step(Learner* learner, const double* losses, u32 chosen, double p, double weight,
                const double* context, u32 features) noexcept nogil:
    """Take one step of a rule that learns losses. A context whose length differs from that of the
    rows is not learned."""
    cdef double[CONTEXT_MAX + 1] x
    cdef ContextRule rule
    cdef u32 i, d
    if learner.rule.kind != LINEAR:
        rule_learn(learner.rule, learner.rows, learner.k, learner.seen, losses, chosen, p, weight)
        return
    d = context_size(learner.columns)
    if features and features != d - 1:
        return
    rule.discount, rule.ridge, x[0] = learner.rule.discount, learner.rule.floor, 1.0
    for i in range(1, d):
        x[i] = context[i - 1] if features else 0.0
    for i in range(learner.k):
        context_learn(&rule, learner.rows + i * learner.columns, d, x, 1.0 - losses[i], weight,
                      <u64> learner.seen)


cdef void _stack(Learner* learner, const Observation* observation) noexcept nogil:
    cdef double[LABELS_READ + 1] p
    cdef u32[MODELS_MAX] votes
    cdef u32 codes
    if observation.named != NULL:
        codes = max(observation.named.labels, observation.right)
        stack_learn_evidence(learner.rule, learner.rows, learner.k, observation.named.of, codes,
                             observation.right, max(CLASSES[popcount(learner.labels)],
                                                    <double> codes), 1.0, observation.weight, p)
        return
    codes = _codes(learner, observation, False, votes)
    stack_learn(learner.rule, learner.rows, learner.k, votes, 1,
                max(CLASSES[popcount(learner.labels)], <double> codes), 1.0, observation.weight)


cdef void _mix(Learner* learner, const Observation* observation, const u32* votes, u32 codes,
               Tally* tally) noexcept nogil:
    """Learn; tally: the probabilities before, among at least as many labels as votes name."""
    cdef Ballot ballot
    cdef u32 label = 1
    _ballot(learner, observation, votes,
            max(CLASSES[popcount(learner.labels)], <double> codes), &ballot)
    if observation.named != NULL:
        label = ballot.right = observation.right
        ballot.labels = max(ballot.labels, label)
        ballot.classes = max(ballot.classes, <double> ballot.labels)
    mixture_learn(learner.rows, learner.shape, &ballot, label, <u8> lowest_bit(observation.bit),
                  1.0, observation.weight, tally)


cdef void _learn_mixture(Learner* learner, const Observation* observation) noexcept nogil:
    """Make a step of the mixture. The probabilities that the rows before gave are computed once:
    for the step, for the confidence, and for the threshold. They are not computed before the first
    step, nor while a label is new that makes the known number of labels too small."""
    cdef u32[MODELS_MAX] votes
    cdef u32 winner = 0, codes = _codes(learner, observation, False, votes)
    cdef bint is_new = (codes > CLASSES[popcount(learner.labels)] if observation.named == NULL
                        else observation.right > observation.named.labels)
    cdef Tally tally
    cdef double raw
    if (learner.calibrated or observation.chosen < learner.k or is_new
            or mixture_is_untouched(learner.rows, learner.shape, learner.k)):
        if not learner.calibrated:
            feedback_update_calibrate(learner, observation)
        _mix(learner, observation, votes, codes, &tally)
    else:
        _mix(learner, observation, votes, codes, &tally)
        raw = _likeliest(learner, observation, &tally, &winner)
        _calibrate(learner, observation, raw, winner, &tally)


cdef void feedback_update_calibrate(Learner* learner,
                                    const Observation* observation) noexcept nogil:
    cdef u32 winner = 0
    cdef double raw = feedback_update_raw(learner, observation, &winner)
    _calibrate(learner, observation, raw, winner, NULL)
    learner.calibrated = True


cdef bint feedback_update_learn(Learner* learner, const Observation* observation) noexcept nogil:
    cdef double[MODELS_MAX] losses
    cdef u32 i
    cdef bint anyone = False
    for i in range(learner.k):
        losses[i] = <double> (observation.values[i] != observation.label)
        if observation.arrived[i]:
            anyone = True
        else:
            losses[i] = NAN
    if not anyone:
        return False
    if not learner.calibrated:
        learner.moved = False
    if learner.rule.kind == MIXTURE:
        _learn_mixture(learner, observation)
    else:
        feedback_update_calibrate(learner, observation)
        if learner.rule.kind == STACKING:
            _stack(learner, observation)
        else:
            _step(learner, losses, observation.chosen, observation.p, observation.weight,
                  observation.context, observation.features)
    learner.labels |= observation.bit
    learner.seen += observation.weight
    learner.calibrated = False
    return True


# -- for Python
# --------------------------------------------------------------------------------------------------

cdef struct Steps:              # arrays of n, or of one that stands for all
    const u32* chosen
    const double* p
    u64 chosen_step
    u64 p_step


cdef enum:
    IS_KNOWN = 1                # whether sets may contain a label; 0: never
    MAY_BE_KNOWN = 2            # once it was learned, while there is room
    BECAME_KNOWN = 3            # by these rows, the first; 4 the second; and so on

cdef struct RowLabels:          # of rows, if there are sets
    const u32* number           # [n]: of the row's label
    u8* known                   # by number
    u32 room                    # labels that may become known


cdef object _exactly(object array, object dtype, tuple shape, str name):
    found = np.ascontiguousarray(array, dtype)
    if found.shape != shape:
        raise_for(BAD_INPUT,
                  f"{name} must be {np.dtype(dtype).name}{list(shape)}, not {list(found.shape)}")
    return found


@cython.final
cdef class FeedbackUpdate:
    """The update of states by one rule. Takes states and returns new ones; nothing is changed in
    place. Threads: any.

    A state is rows f64[k, columns], sure f64[bins, 2], the weight of the observations, and one bit
    for each label seen. fade: the share of a bin's counts that remains after an observation in that
    bin.  make: makes a state from (models, rows, seen, labels, sure, thresholds) and, if it was
    made of a state, that state's `differences`.  sets: makes prediction sets of labels, with
    `coverage`, `step`, `doubt`, `remembered(known, label)` and `make(labels, numbers, scale, count,
    known)`, which returns thresholds; None: thresholds stay.
    """

    def __cinit__(self, Rule rule not None, double fade, make, sets=None):
        self.rule = rule
        self.fade = fade
        self.make, self.sets = make, sets
        if sets is not None:
            self.coverage, self.step, self.doubt = sets.coverage, sets.step, sets.doubt
            self.make_thresholds = sets.make

    cdef cnp.ndarray _bins(self, cnp.ndarray sure):
        if (cnp.PyArray_TYPE(sure) != cnp.NPY_DOUBLE or sure.ndim != 2
            or not cnp.PyArray_IS_C_CONTIGUOUS(sure)
                or not 1 <= sure.shape[0] <= BINS_MAX or sure.shape[1] != 2):
            raise_for(BAD_INPUT, "sure must be f64[bins, 2]")
        return sure

    cdef Learner _pupil(self, cnp.ndarray rows, cnp.ndarray sure, double seen, u64 labels) except *:
        """Fill a Learner from a state. The arrays must belong to the caller."""
        cdef Learner learner
        learner.rule, learner.fade = &self.rule.state, self.fade
        learner.rows = <double*> cnp.PyArray_DATA(rows)
        learner.sure = <double*> cnp.PyArray_DATA(sure)
        learner.k, learner.columns = <u32> rows.shape[0], <u32> rows.shape[1]
        learner.shape.buckets = learner.shape.features = 0
        if self.rule.state.kind == MIXTURE:
            learner.k -= 1
            learner.shape = mixture_shape(rows)
        learner.bins = <u32> sure.shape[0]
        _begin(&learner, seen, labels)
        return learner

    cdef bint begin(self, Learner* learner, StateNumbers* numbers, u32 k,
                    const Votes* votes) noexcept:
        cdef u32 kind = self.rule.state.kind
        learner.rule, learner.fade = &self.rule.state, self.fade
        learner.rows, learner.sure = state_rows(numbers), state_sure(numbers)
        learner.k = k
        learner.columns = numbers.columns
        learner.bins = numbers.bins
        learner.shape.buckets = learner.shape.features = 0
        if numbers.rows != k + (kind == MIXTURE) or not 1 <= k <= MODELS_MAX:
            return False
        if not 1 <= numbers.bins <= BINS_MAX or self.sets is not None:
            return False
        if kind == MIXTURE:
            if not mixture_has_shape(learner.rows, numbers.rows, numbers.columns, &learner.shape):
                return False
        elif kind == LINEAR:
            if not context_size(numbers.columns):
                return False
        elif numbers.columns != self.rule.state.columns:
            return False
        _begin(learner, numbers.seen, numbers.labels)
        return self._fits(learner, votes)

    cdef bint _fits(self, const Learner* learner, const Votes* votes) noexcept:
        """Return whether the rows are as wide as these votes need."""
        cdef u32 features = votes.observation.features
        if learner.rule.kind == LINEAR:
            return not features or learner.columns != context_columns(1)
        if learner.rule.kind != MIXTURE:
            return True
        if votes.cell >= learner.shape.buckets or (features and not learner.shape.features):
            return False
        return votes.observation.named == NULL or learner.shape.pooled

    cdef int follow(self, Learner* learner, double threshold) except -1:
        learner.coverage, learner.step, learner.doubt = self.coverage, self.step, self.doubt
        learner.threshold = threshold
        return 0

    cdef cnp.ndarray _rows(self, cnp.ndarray rows, u32 cell):
        """Return a copy of the rows; those of a mixture get a bucket for the cell."""
        if self.rule.state.kind == MIXTURE:
            return rows_with(rows, cell)
        return doubles_copied(self._checked(rows))

    cdef cnp.ndarray _checked(self, cnp.ndarray rows):
        if self.rule.state.kind == MIXTURE:
            mixture_shape(rows)
            return rows
        if self.rule.state.kind != LINEAR:
            return self.rule.checked(rows)
        if (cnp.PyArray_TYPE(rows) != cnp.NPY_DOUBLE or rows.ndim != 2
            or not cnp.PyArray_IS_C_CONTIGUOUS(rows)
                or not 1 <= rows.shape[0] <= MODELS_MAX or not context_size(rows.shape[1])):
            raise_for(BAD_INPUT, "rows of linear models must be f64[k, d (d + 1) / 2 + d]")
        return rows

    cdef cnp.ndarray _with_features(self, cnp.ndarray rows, u32 features):
        """Return rows with weights for that many features; a copy if weights must be added."""
        if self.rule.state.kind == MIXTURE:
            return rows_with_features(rows, features)
        if self.rule.state.kind == LINEAR and rows.shape[1] == context_columns(1):
            return context_widened(rows, features + 1, self.rule.state.floor)
        return rows

    @cython.binding(False)
    def one(self, tuple models, cnp.ndarray rows, cnp.ndarray sure, double seen, u64 labels,
            thresholds, tuple queried, odds, predictions, label, double weight, tuple features=()):
        """Learn one observation of a label. Return the new state; False if no prediction arrived;
        None if `policy.observe` must learn it, because it is not about a label, is of other models,
        or mixes types.

        thresholds: of the prediction sets.  queried: models, with the probabilities `odds` of their
        choice.  predictions: by model, objects with `output` and `confidence`.  features: of the
        query.
        """
        cdef Votes votes
        cdef Reported reported
        cdef ValueKey right
        cdef OpenState opened = OpenState.__new__(OpenState)
        cdef PyObject* found
        cdef object value, kind = type(label)
        cdef list computed = []
        cdef bint reads = reads_classes(self.rule.state.kind)
        cdef u32 i, n = 0, k = <u32> len(models)
        if (k == 0 or k > MODELS_MAX or rows.shape[0] != k + (self.rule.state.kind == MIXTURE)
                or type(predictions) is not dict or not is_label(kind)
                or len(features) > CONTEXT_MAX or not key_of_label(label, kind, &right)):
            return None
        reported.chosen, reported.qualified = k, False
        for i in range(k):
            if len(queried) == 1 and queried[0] == models[i]:
                reported.chosen = i
            found = PyDict_GetItem(<dict> predictions, models[i])
            if found == NULL:
                continue
            value = read_member(&OUTPUT, <object> found)
            reported.output[n] = kept(value, computed)
            if type(value) is not kind or not key_of_output(value, &reported.key[n]):
                return None
            reported.place[n], reported.right[n] = i, keys_are_equal(&reported.key[n], &right)
            value = read_member(&CONFIDENCE, <object> found)
            reported.sure[n] = value is not None
            if value is not None:
                reported.confidence[n] = value
            if reads:
                value = read_member(&QUALIFIERS, <object> found)
                reported.qualifiers[n] = kept(value, computed)
                reported.qualified = reported.qualified or bool(value)
            n += 1
        if reported.chosen == k and queried != models:
            return None
        reported.n, reported.features = n, <u32> len(features)
        for i in range(reported.features):
            reported.context[i] = features[i]
        reported.p = odds[0] if odds and len(queried) == 1 else 1.0
        if not self.read(&votes, k, &reported, &right, label, weight):
            return None
        if not opened.start(self, rows, sure, seen, labels, thresholds):
            return None         # `policy.observe` repairs it
        opened.learn(&votes)
        if not opened.changed:
            return False
        return opened.made(models)

    cdef bint read(self, Votes* votes, u32 k, const Reported* reported, const ValueKey* right,
                   object label, double weight) except -1:
        cdef Observation* observation = &votes.observation
        cdef bint mixed = self.rule.state.kind == MIXTURE
        cdef u32 i, j, at, cell, label_cell = key_hash(right)
        cdef u32 high = label_cell
        if not (weight > 0 and isfinite(weight)):
            return False
        if reported.chosen == k and _chooses_one(self.rule.state.kind):
            return False
        votes.anyone, votes.label = reported.n > 0, <PyObject*> label
        for i in range(k):
            votes.arrived[i] = 0
            votes.values[i] = 0
            votes.cells[i] = 0
            votes.confidence[i] = NAN
        for i in range(reported.n):
            at = reported.place[i]
            votes.arrived[at] = 1
            cell = label_cell
            if not reported.right[i]:
                votes.values[at] = at + 1
                for j in range(i):      # the same number for the same label
                    if not reported.right[j] and keys_are_equal(&reported.key[j],
                                                                &reported.key[i]):
                        votes.values[at] = votes.values[reported.place[j]]
                        break
                if mixed:
                    cell = key_hash(&reported.key[i])
            if mixed:
                votes.cells[at] = <u8> cell
                high = max(high, cell)
            if reported.sure[i]:
                votes.confidence[at] = reported.confidence[i]
                if votes.confidence[at] != votes.confidence[at]:
                    votes.confidence[at] = 0.0
        observation.values, observation.arrived = votes.values, votes.arrived
        observation.confidence, observation.cells = votes.confidence, votes.cells
        observation.label, observation.weight = 0, weight
        observation.chosen, observation.p = reported.chosen, reported.p
        observation.context = <const double*> reported.context
        observation.features = reported.features
        observation.known, observation.right = False, 0
        observation.named = NULL
        observation.queried = NULL
        observation.bit = <u64> 1 << label_cell
        votes.cell = high
        if not reported.qualified or not reads_classes(self.rule.state.kind):
            return True
        for i in range(reported.n):
            if reports_classes(<object> reported.qualifiers[i]):
                return self._read_classes(votes, k, reported, type(label))
        return True

    cdef bint _read_classes(self, Votes* votes, u32 k, const Reported* reported,
                            object kind) except -1:
        """Read class probabilities. False: they are for `policy.observe`."""
        cdef ClassEvidence* named = &votes.named
        cdef PyObject* outputs[MODELS_MAX]
        cdef PyObject* qualifiers[MODELS_MAX]
        cdef u32 i, at
        for i in range(k):
            outputs[i] = NULL
        for i in range(reported.n):
            outputs[reported.place[i]] = reported.output[i]
            qualifiers[reported.place[i]] = reported.qualifiers[i]
        if (votes.observation.chosen < k
                or not class_evidence_read(named, k, outputs, qualifiers, kind)):
            return False
        votes.observation.right = class_evidence_code(named, <object> votes.label, kind)
        votes.observation.named = named
        for at in range(max(named.labels, votes.observation.right)):
            votes.cell = max(votes.cell, <u32> named.cells[at])
        return votes.observation.right != 0

    cdef OpenState open(self, object state, tuple models):
        cdef OpenState opened = OpenState.__new__(OpenState)
        cdef object known = read_member(&MODELS, state)
        cdef cnp.ndarray rows = read_member(&ROWS, state)
        if (known is not models and known != models
                or rows.shape[0] != len(models) + (self.rule.state.kind == MIXTURE)):
            return None
        opened.state = state
        return opened if opened.start(self, rows, read_member(&SURE, state),
                                      read_member(&SEEN, state), read_member(&LABELS, state),
                                      read_member(&TRACKED, state)) else None

    def many(self, cnp.ndarray rows, cnp.ndarray sure, double seen, u64 labels, values, arrived,
             confidence, label, bits, chosen, p, cells=None, double threshold=0.0, named=None,
             known=(), u32 room=0):
        """Learn n observations of weight 1, without a context, in their order. Return (rows, sure,
        seen, labels, threshold, known). Releases the GIL.

        values: i64[k, n], labels as numbers.  arrived: u8[k, n], 0 where there is no prediction.
        confidence: f64[k, n], NaN where a model gave none. label: i64[n].  bits: u8[n], which bit
        of `labels` each stands for.  chosen: u32[n] or u32[1], the only model that was queried, k
        when all were.  p: f64[n] or f64[1], its probability then.  cells: u8[k, n], hashes of the
        labels in `values`, 0 to 63; only a mixture needs them.

        With sets: the threshold of their labels.  named: u32[n], number of each row's label, among
        those of these rows.  known: u8[labels], by number, whether sets may have it: 0 no, 1 yes, 2
        once it was learned, which is the case for the first `room` labels, at most 64; these are 3,
        4 and so on in the `known` that is returned.
        """
        sure = doubles_copied(self._bins(sure))
        cdef cnp.ndarray right = np.ascontiguousarray(label, np.int64).reshape(-1)
        cdef u64 n = <u64> right.shape[0]
        cdef bint mixed = self.rule.state.kind == MIXTURE
        cdef tuple shape = (rows.shape[0] - mixed, n)
        cdef cnp.ndarray numbers = _exactly(values, np.int64, shape, "values")
        cdef cnp.ndarray mask = _exactly(arrived, np.uint8, shape, "arrived")
        cdef cnp.ndarray own = _exactly(confidence, np.float64, shape, "confidence")
        cdef cnp.ndarray places = _exactly(bits, np.uint8, (n,), "bits")
        cdef cnp.ndarray hashes = (numbers if not mixed
                                   else _exactly(cells, np.uint8, shape, "cells"))
        cdef u32 cell = 0
        if mixed and n:
            cell = _highest(hashes, mask, places)
        rows = self._rows(rows, cell)
        cdef Learner learner = self._pupil(rows, sure, seen, labels)
        cdef cnp.ndarray picks = np.ascontiguousarray(chosen, np.uint32).reshape(-1)
        cdef cnp.ndarray odds = np.ascontiguousarray(p, np.float64).reshape(-1)
        cdef Steps steps = _steps(picks, odds, n)
        cdef cnp.ndarray which = np.zeros(0, np.uint32)
        cdef cnp.ndarray found = np.array(known, np.uint8)
        cdef RowLabels row_labels
        if self.sets is not None:
            which = _exactly(named, np.uint32, (n,), "named")
            if room > LABEL_BITS or (n and which.max() >= found.size):
                raise_for(BAD_INPUT, f"room must be at most {LABEL_BITS} and known must have a"
                                     f" number for each label")
            self.follow(&learner, threshold)
        row_labels.number = <u32*> cnp.PyArray_DATA(which)
        row_labels.known = <u8*> cnp.PyArray_DATA(found)
        row_labels.room = room
        _learn_rows(&learner, n, <i64*> cnp.PyArray_DATA(numbers), <u8*> cnp.PyArray_DATA(mask),
                    <double*> cnp.PyArray_DATA(own), <i64*> cnp.PyArray_DATA(right),
                    <u8*> cnp.PyArray_DATA(places),
                    <u8*> cnp.PyArray_DATA(hashes) if mixed else NULL, &steps,
                    &row_labels if self.sets is not None else NULL)
        return (rows, sure, learner.seen, learner.labels,
                learner.threshold if self.sets is not None else threshold, found)

    def graded(self, cnp.ndarray rows, double seen, losses, chosen, p):
        """Learn n observations of weight 1 from their losses, in their order, without calibration.
        Return (rows, seen).

        losses: f64[k, n], NaN where no prediction arrived; an observation without predictions does
        not count. Stacking and mixtures learn nothing from losses. Releases the GIL.
        """
        rows = self._rows(rows, 0)
        cdef u32 k = <u32> rows.shape[0] - (self.rule.state.kind == MIXTURE)
        cdef cnp.ndarray lost = np.ascontiguousarray(losses, np.float64)
        if lost.ndim != 2 or lost.shape[0] != k:
            raise_for(BAD_INPUT, f"losses must be f64[{k}, n]")
        cdef u64 n = <u64> lost.shape[1]
        cdef cnp.ndarray picks = np.ascontiguousarray(chosen, np.uint32).reshape(-1)
        cdef cnp.ndarray odds = np.ascontiguousarray(p, np.float64).reshape(-1)
        cdef Steps steps = _steps(picks, odds, n)
        cdef Learner learner = self._pupil(rows, np.zeros((1, 2)), seen, 0)
        _learn_losses(&learner, n, <double*> cnp.PyArray_DATA(lost), &steps)
        return rows, learner.seen


@cython.final
cdef class OpenState:
    cdef int start(self, FeedbackUpdate update, cnp.ndarray rows, cnp.ndarray sure, double seen,
                   u64 labels, object thresholds) except -1:
        self.update = update
        self.block = block_with(update._checked(rows), update._bins(sure), seen, labels)
        self.rows, self.sure = block_rows(self.block), block_sure(self.block)
        self.thresholds, self.fits = thresholds, True
        self.learner = update._pupil(self.rows, self.sure, seen, labels)
        if update.sets is not None:
            update.follow(&self.learner, read_member(&THRESHOLD, thresholds))
            self.known = read_member(&KNOWN, thresholds)
        return _is_finite(self.rows) and _is_finite(self.sure)

    cdef int use(self, cnp.ndarray rows) except -1:
        cdef Learner* learner = &self.learner
        cdef Learner other = self.update._pupil(rows, self.sure, learner.seen, learner.labels)
        self.rows = rows        # no longer the block's
        self.fits = False
        learner.rows, learner.columns, learner.shape = other.rows, other.columns, other.shape
        return 0

    cdef int learn(self, Votes* votes) except -1:
        cdef FeedbackUpdate update = self.update
        cdef u32 features = votes.observation.features
        cdef cnp.ndarray rows
        if not votes.anyone:
            return 0
        CHECK(not self.is_made, "a state that others may read learns")
        if update.rule.state.kind == MIXTURE and votes.cell >= self.learner.shape.buckets:
            self.use(update._rows(self.rows, votes.cell))
        if features and features != self.learner.shape.features:
            rows = update._with_features(self.rows, features)
            if rows is not self.rows:
                self.use(rows)
        if update.sets is not None:
            votes.observation.known = _contains(self.known, <object> votes.label)
        if (update.rule.state.kind == MIXTURE and votes.observation.named != NULL
                and not self.learner.shape.pooled):
            feedback_update_calibrate(&self.learner, &votes.observation)    # by the rows before
            self.use(rows_with_pool(self.rows))
        feedback_update_learn(&self.learner, &votes.observation)
        self.changed = True
        if update.sets is not None and self.learner.moved and not votes.observation.known:
            self.known = update.sets.remembered(self.known, <object> votes.label)
        return 0

    cdef object made(self, tuple models, object differences=None):
        cdef object sets = self.thresholds
        if self.update.sets is not None:
            sets = self.update.make_thresholds(
                self.learner.threshold, read_member(&NUMBERS, sets), read_member(&SCALE, sets),
                read_member(&COUNT, sets), self.known)
        if not self.fits:
            self.block = block_with(self.rows, self.sure, self.learner.seen, self.learner.labels)
            self.rows, self.sure = block_rows(self.block), block_sure(self.block)
        self.block.numbers.seen, self.block.numbers.labels = self.learner.seen, self.learner.labels
        self.is_made = True
        if differences is None:
            return self.update.make(models, self.rows, self.learner.seen, self.learner.labels,
                                    self.sure, sets)
        return self.update.make(models, self.rows, self.learner.seen, self.learner.labels,
                                self.sure, sets, differences)

    cdef object closed(self):
        if not self.changed:
            return self.state
        return self.made(read_member(&MODELS, self.state), read_member(&DIFFERENCES, self.state))


cdef bint _contains(tuple labels, object label) except -1:
    """Return whether a label is among others; equal labels have the same type."""
    cdef object one
    for one in labels:
        if type(one) is type(label) and PyObject_RichCompareBool(one, label, Py_EQ):
            return True
    return False


cdef bint _is_finite(cnp.ndarray array):
    """Return whether a contiguous array of doubles holds neither NaN nor infinities."""
    return doubles_are_finite(<double*> cnp.PyArray_DATA(array),
                              <size_t> cnp.PyArray_SIZE(array))


cdef void _begin(Learner* learner, double seen, u64 labels) noexcept nogil:
    """Have a learner begin without sets."""
    learner.coverage = 0.0
    learner.moved = learner.calibrated = False
    learner.seen, learner.labels = seen, labels


cdef Steps _steps(cnp.ndarray chosen, cnp.ndarray p, u64 n) except *:
    cdef Steps steps
    if <u64> chosen.shape[0] not in (1, n) or <u64> p.shape[0] not in (1, n):
        raise_for(BAD_INPUT, f"chosen and p must be arrays of {n}, or of one")
    steps.chosen, steps.chosen_step = <u32*> cnp.PyArray_DATA(chosen), chosen.shape[0] != 1
    steps.p, steps.p_step = <double*> cnp.PyArray_DATA(p), p.shape[0] != 1
    return steps


cdef u32 _highest(cnp.ndarray cells, cnp.ndarray arrived, cnp.ndarray bits):
    """Return the largest hash of the rows with at least one prediction, labels included."""
    arrived = arrived != 0
    counts = arrived.any(axis=0)
    high = max(np.where(arrived, cells, 0).max(initial=0), np.where(counts, bits, 0).max(initial=0))
    return <u32> (high % LABEL_BITS)


cdef void _learn_rows(Learner* learner, u64 n, const i64* values, const u8* arrived,
                      const double* confidence, const i64* label,
                      const u8* bits, const u8* hashes, const Steps* steps, RowLabels* named):
    cdef i64[MODELS_MAX] row
    cdef u8[MODELS_MAX] mask
    cdef u8[MODELS_MAX] cells
    cdef double[MODELS_MAX] own
    cdef Observation observation
    cdef u64 i
    cdef u32 j, new = 0
    cdef u8* known = NULL
    observation.values, observation.arrived, observation.confidence, observation.weight = (row,
            mask, own, 1.0)
    observation.cells = cells
    observation.context = NULL
    observation.named = NULL
    observation.queried = NULL
    observation.features, observation.known, observation.right = 0, False, 0
    with nogil:
        for i in range(n):
            for j in range(learner.k):
                row[j] = values[j * n + i]
                mask[j] = arrived[j * n + i]
                own[j] = confidence[j * n + i]
                if hashes != NULL:
                    cells[j] = hashes[j * n + i] % LABEL_BITS
            observation.label = label[i]
            observation.bit = <u64> 1 << (bits[i] % LABEL_BITS)
            observation.chosen = min(steps.chosen[i * steps.chosen_step], learner.k)
            observation.p = steps.p[i * steps.p_step]
            if named != NULL:
                known = named.known + named.number[i]
                observation.known = known[0] == IS_KNOWN or known[0] >= BECAME_KNOWN
            feedback_update_learn(learner, &observation)
            if named != NULL and learner.moved and known[0] == MAY_BE_KNOWN and new < named.room:
                known[0] = <u8> (BECAME_KNOWN + new)
                new += 1


cdef void _learn_losses(Learner* learner, u64 n, const double* losses, const Steps* steps):
    cdef double[MODELS_MAX] row
    cdef u64 i
    cdef u32 j
    cdef bint anyone
    with nogil:
        for i in range(n):
            anyone = False
            for j in range(learner.k):
                row[j] = losses[j * n + i]
                anyone = anyone or isfinite(row[j])
            if anyone:
                if learner.rule.kind != STACKING and learner.rule.kind != MIXTURE:
                    _step(learner, row, min(steps.chosen[i * steps.chosen_step], learner.k),
                          steps.p[i * steps.p_step], 1.0, NULL, 0)
                learner.seen += 1.0
