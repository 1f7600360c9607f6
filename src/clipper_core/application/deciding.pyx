"""Answers of deciders by the predictions that have arrived."""
cimport cython
from libc.string cimport memset

from clipper_core.application.selection cimport (
    NO_WINNER, NUMBERS, OTHER, first_bits, found_among, key_of_answer, kind_of, mean_of,
    nothing_found, outputs_pick, own_confidence, vote_of,
)
from clipper_core.learning.bandit cimport MIXTURE
from clipper_core.learning.mixture cimport mixture_is_untouched
from clipper_core.learning.number_votes cimport WeightedMean, weighted_mean
from clipper_core.results.decider cimport ARRIVED, NEVER_US
from clipper_core.runtime.histogram cimport Counter
from clipper_core.runtime.status cimport BAD_INPUT, raise_for
from clipper_core.wire.comparison cimport (
    BOOL_KEY, BYTES_KEY, FLOAT_KEY, LARGE_KEY, STR_KEY, WHOLE_KEY, ValueKey, key_is_usable,
    key_number, keys_agree, keys_are_equal,
)


@cython.final
cdef class Deciding:
    """The order of an application's models and its decider, for one state of its policy. Threads:
    any; it never changes.

    decider: of these models.  models: best first.  selected: those of the policy's selection, of
    which these are all or some.
    steps: of the decider: the name in answers, how it answers, and what counts its answers.
    starts_us: when each model is queried, as of predict_ensemble; None: all at once.  weights: of
    the models' votes; None: all alike.  until_us: when the last step ends, 0 for the deadline.
    margin_us: how long before the deadline that is.  order: what Python calls this order.
    measures: starts_us follow measured times, and are asked for in each query that calls models.
    Raises BAD_INPUT.
    """

    def __init__(self, Decider decider not None, tuple models not None, tuple selected not None,
                 steps, starts_us, weights, u64 until_us, u64 margin_us, order=None,
                 bint measures=False):
        cdef u32 i
        if not 1 <= len(models) <= TASKS_MAX or not set(models) <= set(selected):
            raise_for(BAD_INPUT, f"a decider of {len(models)} models for a policy of "
                                 f"{len(selected)}")
        if len(steps) != <Py_ssize_t> decider.state.count:
            raise_for(BAD_INPUT, f"{len(steps)} steps are described of {decider.state.count}")
        self.decider = decider
        self.models = models
        self.n = <u32> len(models)
        self.until_us = until_us
        self.margin_us = margin_us
        self.order, self.measures = order, measures
        self.starts, self.votes = starts_us, weights
        self.names = tuple([name for name, _, _ in steps])
        self.counters = [<Counter?> counter for _, _, counter in steps]
        for i in range(<u32> len(steps)):
            self.answering[i] = <u8> int(steps[i][1])
        for i in range(self.n):
            self.places[i] = <u32> selected.index(models[i])
            self.ranks[self.places[i]] = i
            self.starts_us[i] = 0
            if starts_us is not None:
                self.starts_us[i] = NEVER_US if starts_us[i] < 0 else starts_us[i]
            self.weights[self.places[i]] = 1.0 if weights is None else weights[i]
        for i, model in enumerate(sorted(models, key=selected.index)):
            self.sorted_ranks[i] = <u32> models.index(model)

    cdef u64 time_us(self, u64 slo_us) noexcept nogil:
        if self.until_us:
            return min(slo_us, self.until_us)
        return slo_us - self.margin_us if self.margin_us < slo_us else 1

    cdef bint weigh(self, const Outputs* outputs, u32 rank, u8 order,
                    VoteData* votes) noexcept nogil:
        cdef VoteData* vote = &votes[rank]
        cdef double own = own_confidence(outputs, rank)
        cdef u32 k
        if not key_is_usable(&outputs.key[rank]):
            return False
        vote.confidence = min(max(own, 0.0), 1.0) if own == own else -1.0
        vote.numeric = outputs.key[rank].data == NULL
        vote.number = key_number(&outputs.key[rank])
        vote.order = order
        vote.klass = rank
        for k in range(self.n):
            if (votes[k].state == ARRIVED and votes[k].klass == k
                    and keys_are_equal(&outputs.key[k], &outputs.key[rank])):
                vote.klass = k
                break
        vote.state = ARRIVED
        return True

    cdef u64 used_of(self, const Outputs* outputs, u64 mask, u32* one) noexcept nogil:
        cdef u32 i, rank, best = TASKS_MAX
        cdef u64 used = 0
        one[0] = TASKS_MAX
        for i in range(outputs.n):
            rank = self.ranks[outputs.place[i]]
            if not mask >> rank & 1:
                continue
            used |= <u64> 1 << i
            if rank < best:
                best, one[0] = rank, i
        return used

    cdef bint combine(self, Selection selection, const StateView* state, const Outputs* outputs,
                      u32 step, u64 used, u32 one, Combination* found) noexcept nogil:
        cdef Outputs picked
        cdef u8 how = self.answering[step]
        cdef u64 numbers = 0
        cdef u32 i
        cdef bint made
        found.label = 0
        if used == 0:
            nothing_found(found)
            return True
        if how == BY_ONE:
            return _one(outputs, one, self.n, found) and self._bounded(selection, state, outputs,
                                                                       True, found)
        if how == BY_POLICY:
            if used == first_bits(outputs.n):
                return selection.combine(state, outputs, found)
            outputs_pick(outputs, used, &picked)
            made = selection.combine(state, &picked, found)
            found_among(found, used)
            return made
        if how != BY_MEAN and how != BY_MEDIAN:
            return self._by_votes(selection, state, outputs, how, found)
        for i in range(outputs.n):
            if outputs.key[i].kind > BYTES_KEY:
                return False
            numbers |= <u64> _is_number(&outputs.key[i]) << i
        if numbers == 0:
            nothing_found(found)
            return True
        if numbers == first_bits(outputs.n):
            if how == BY_MEAN:
                return self._by_votes(selection, state, outputs, how, found)
            return _median(outputs, self.n, found)
        outputs_pick(outputs, numbers, &picked)
        if how == BY_MEAN:
            # what the policy says of the others too bounds the confidence
            return False
        made = _median(&picked, self.n, found)
        found_among(found, numbers)
        return made

    cdef bint _by_votes(self, Selection selection, const StateView* state, const Outputs* outputs,
                        u8 how, Combination* found) noexcept nogil:
        """Vote, or average numbers."""
        cdef double[TASKS_MAX] weights
        cdef double selected = 0.0, arrived = 0.0
        cdef u32 i
        for i in range(self.n):
            selected += self.weights[self.places[i]] if how != BY_VOTES else 1.0
        for i in range(outputs.n):
            weights[i] = self.weights[outputs.place[i]] if how != BY_VOTES else 1.0
            arrived += weights[i]
        if arrived <= 0.0:
            selected = self.n
            for i in range(outputs.n):
                weights[i] = 1.0
        found.used = first_bits(outputs.n)
        if how == BY_MEAN:
            mean_of(outputs, weights, selected, found)
        elif not _votes(outputs, weights, selected, found):
            return False
        return self._bounded(selection, state, outputs, False, found)

    cdef bint _bounded(self, Selection selection, const StateView* state, const Outputs* outputs,
                       bint is_one, Combination* found) noexcept nogil:
        """Replace the confidence by the calibrated one of a policy that learns."""
        cdef Combination whole, alone
        cdef Outputs only
        cdef ValueKey said, answer
        if not selection.learns or selection.n == 1:
            return True
        if selection.rule is not None and selection.rule.state.kind == MIXTURE:
            if mixture_is_untouched(state.rows, state.shape, selection.k):
                return True
        if not selection.combine(state, outputs, &whole):
            return False
        if is_one:
            outputs_pick(outputs, found.used, &only)
            if not selection.combine(state, &only, &alone):
                return False
            found.confidence = alone.confidence
        if whole.used == 0:
            return True
        said, answer = key_of_answer(outputs, &whole), key_of_answer(outputs, found)
        if keys_agree(&said, &answer):
            found.confidence = whole.confidence
        else:
            found.confidence = min(found.confidence, 1.0 - whole.confidence)
        return True


cdef inline bint _is_number(const ValueKey* key) noexcept nogil:
    """Return whether an output is a number, or a whole number, which may stand for one."""
    return key.kind == FLOAT_KEY or key.kind == WHOLE_KEY or key.kind == LARGE_KEY


cdef bint _votes(const Outputs* outputs, const double* weights, double selected,
                 Combination* found) noexcept nogil:
    """Vote on labels, or average numbers."""
    cdef u8 kind = kind_of(outputs)
    if kind == OTHER:
        return False
    if kind == NUMBERS:
        return mean_of(outputs, weights, selected, found)
    vote_of(outputs, weights, selected, found)
    return True


cdef bint _one(const Outputs* outputs, u32 one, u32 queried, Combination* found) noexcept nogil:
    """Answer with one output; its agreement is the share of the queried models that agree."""
    cdef double[TASKS_MAX] weights
    cdef double own = own_confidence(outputs, one)
    cdef u8 kind = outputs.key[one].kind
    cdef u32 i, like = 0
    if kind == FLOAT_KEY:
        for i in range(outputs.n):
            weights[i] = 1.0
        if kind_of(outputs) != NUMBERS or not mean_of(outputs, weights, queried, found):
            return False
    elif (kind == BOOL_KEY or kind == WHOLE_KEY or kind == LARGE_KEY or kind == STR_KEY
          or kind == BYTES_KEY):
        for i in range(outputs.n):
            like += keys_are_equal(&outputs.key[i], &outputs.key[one])
        found.agreement = <double> like / queried
    else:
        return False
    found.winner = one
    found.used = <u64> 1 << one
    found.confidence = min(max(own, 0.0), 1.0) if own == own else found.agreement
    return True


cdef bint _median(const Outputs* outputs, u32 queried, Combination* found) noexcept nogil:
    """Answer with the median of numbers."""
    cdef double[TASKS_MAX] numbers
    cdef double[TASKS_MAX] weights
    cdef WeightedMean spread
    cdef double number
    cdef u32 i, j, n = outputs.n
    memset(numbers, 0, sizeof(numbers))
    for i in range(n):
        number = key_number(&outputs.key[i])
        weights[i] = 1.0
        j = i
        while j > 0 and numbers[j - 1] > number:
            numbers[j] = numbers[j - 1]
            j -= 1
        numbers[j] = number
    found.mean = numbers[n // 2]
    if n % 2 == 0:
        found.mean = (numbers[n // 2 - 1] + numbers[n // 2]) / 2.0
    spread = weighted_mean(numbers, weights, n)
    found.agreement = spread.agreement
    found.confidence = min(spread.arrived / queried * spread.agreement, 1.0)
    found.winner = NO_WINNER
    found.used = first_bits(n)
    return True
