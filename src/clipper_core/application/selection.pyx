"""The built-in selection policies as data: which model a query goes to, and how outputs combine."""
cimport cython
cimport numpy as cnp
from libc.math cimport NAN, hypotl, isfinite, sqrt
from libc.string cimport memcpy, memset

from clipper_core.learning.bandit cimport (
    HEDGE, LINEAR, LOGODDS, MEMORIES_COLUMNS, MIXTURE, MODELS_MAX, STACKING, rule_choose,
    rule_weights,
)
from clipper_core.learning.feedback_update cimport (
    Learner, Observation, feedback_update_classes, feedback_update_odds, feedback_update_raw,
    reads_classes,
)
from clipper_core.learning.first_states cimport FirstState
from clipper_core.learning.linear cimport (
    FEATURES_MAX, Context, blend, context_choose, context_size,
)
from clipper_core.learning.mixture cimport (
    mixture_has_shape, mixture_is_untouched, mixture_weights,
)
from clipper_core.learning.number_votes cimport WeightedMean, weighted_mean
from clipper_core.learning.policy_states cimport StateNumbers, state_rows, state_sure
from clipper_core.runtime.machine cimport i64
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.runtime.status cimport BAD_INPUT, raise_for
from clipper_core.wire.comparison cimport (
    ARRAY_KEY, BOOL_KEY, BYTES_KEY, FLOAT_KEY, LARGE_KEY, STR_KEY, WHOLE_KEY, key_hash,
    key_is_usable, key_number, keys_are_equal, value_key,
)
from clipper_core.wire.prediction cimport TAG_BLOB, TAG_ROW, blob_of, word_confidence

cnp.import_array()

cdef ObjectMember MODELS, ROWS, SURE, LABELS, SEEN      # of a learned state
MODELS.name = b"models"
ROWS.name = b"rows"
SURE.name = b"sure"
LABELS.name, SEEN.name = b"labels", b"seen"


@cython.final
cdef class Selection:
    """A built-in policy over these models, as data. Threads: any.

    how: how outputs become the answer.  models: sorted, at most 64.  rule: of a policy that learns
    by one.  doubt: observations in a bin of confidence from which on they outweigh the confidence
    itself; of a blend, those from which on past errors outweigh the scatter.  weights: of the
    votes, or shares of the queries, that a person has set.  ridge: the strength of a blend's pull
    towards the mean.  linear: chooses by the features of the query, with a rule LINEAR.
    primaries: those of the models that the policy calls, or chooses one of; None: all.
    makes_sets: answers have prediction sets. Raises BAD_INPUT.
    """

    def __init__(self, Combining how, tuple models not None, *, Rule rule=None, double doubt=0.0,
                 weights=None, double ridge=0.0, Context linear=None, primaries=None,
                 bint makes_sets=False):
        cdef u32 i
        if not 1 <= len(models) <= TASKS_MAX:
            raise_for(BAD_INPUT, f"{len(models)} models: a selection has 1 to {TASKS_MAX}")
        self.k = <u32> len(models)
        self.how = how
        self.models = models
        self.rule = rule
        self.linear = linear
        self.makes_sets = makes_sets
        self.doubt, self.ridge = doubt, ridge
        self.calls_one = how in (DRAWN_MODEL, CHOSEN_MODEL)
        self.learns = how in (LEARNED_VOTES, BLEND, CHOSEN_MODEL)
        if how in (LEARNED_VOTES, CHOSEN_MODEL):
            self._check_rule()
            self.reads_context = self.rule.state.kind in (LINEAR, MIXTURE)
            self.reads_classes = self.k > 1 and reads_classes(self.rule.state.kind)
        if how in (FIXED_VOTES, DRAWN_MODEL) and (weights is None or len(weights) != self.k):
            raise_for(BAD_INPUT, f"a weight is needed for each of {self.k} models")
        for i in range(self.k):
            self.weights[i] = 1.0 if weights is None else weights[i]
            self.is_called[i] = primaries is None or models[i] in primaries
            self.called[self.n] = i
            self.n += self.is_called[i]
        if self.n == 0:
            raise_for(BAD_INPUT, "a selection needs a model to call")
        self.primaries = models
        if self.n < self.k:
            self.primaries = tuple([models[self.called[i]] for i in range(self.n)])

    def _check_rule(self):
        """Raise BAD_INPUT for a rule that does not fit the way of combining."""
        cdef bint votes
        if self.rule is None:
            raise_for(BAD_INPUT, "a selection that learns needs a rule")
        votes = self.rule.state.kind in (HEDGE, LOGODDS, STACKING, MIXTURE)
        if votes != (self.how == LEARNED_VOTES):
            raise_for(BAD_INPUT, f"rule {self.rule.state.kind} does not go with {self.how}")
        if (self.linear is not None) != (self.rule.state.kind == LINEAR):
            raise_for(BAD_INPUT, f"rule {self.rule.state.kind} with linear={self.linear}")

    cdef bint view(self, object state, StateView* found) except -1:
        cdef StateNumbers* numbers
        cdef object models, rows, sure
        if type(state) is FirstState:
            numbers = (<FirstState> state).numbers()
            if numbers == NULL:
                return self.view((<FirstState> state).made_state(), found)
            if not self._are_own((<FirstState> state).models):
                return False
            found.rows, found.sure = state_rows(numbers), state_sure(numbers)
            found.count = numbers.rows
            found.columns = numbers.columns
            found.bins = numbers.bins
            found.labels = numbers.labels
            found.seen = numbers.seen
            return self._fill(found)
        models = read_member(&MODELS, state)
        rows = read_member(&ROWS, state)
        sure = read_member(&SURE, state)
        if not self._are_own(models):
            return False
        if not _are_doubles(rows) or not _are_doubles(sure) or cnp.PyArray_DIM(sure, 1) != 2:
            return False
        found.rows = <const double*> cnp.PyArray_DATA(rows)
        found.sure = <const double*> cnp.PyArray_DATA(sure)
        found.count = <u32> cnp.PyArray_DIM(rows, 0)
        found.columns = <u32> cnp.PyArray_DIM(rows, 1)
        found.bins = <u32> cnp.PyArray_DIM(sure, 0)
        found.labels = read_member(&LABELS, state)
        found.seen = read_member(&SEEN, state)
        return self._fill(found)

    cdef bint _are_own(self, object models) except -1:
        """Return whether a state's models are those of this policy."""
        if models is self.models or models is self.alike:
            return True
        if models != self.models:
            return False
        # models of another reading of the catalog are equal, and slow to compare
        self.alike = models
        return True

    cdef bint _fill(self, StateView* found) noexcept nogil:
        """Fill in what follows from the numbers; False if they are of another shape."""
        found.known = 0
        found.context = NULL
        found.features = 0
        if self.how == BLEND:
            return found.count == self.k + 1 and found.columns == self.k + 3
        if found.bins == 0:
            return False
        if self.rule.state.kind == LINEAR:
            found.known = context_size(found.columns) - 1
            return found.count == self.k and found.known < FEATURES_MAX
        if self.rule.state.kind == MIXTURE:
            if found.count != self.k + 1 or not mixture_has_shape(
                    found.rows, found.count, found.columns, &found.shape):
                return False
            if not mixture_is_untouched(found.rows, found.shape, self.k):
                mixture_weights(found.rows, found.shape, self.k, NULL, found.weights)
            return True
        if found.count != self.k or found.columns != self.rule.state.columns:
            return False
        if self.how == LEARNED_VOTES:
            rule_weights(&self.rule.state, found.rows, self.k,
                         feedback_update_classes(found.labels), found.weights)
        return True

    cdef void in_context(self, StateView* view, const double* context, u32 features) noexcept nogil:
        view.features = features if self.reads_context else 0
        view.context = context if view.features else NULL
        if (self.how == LEARNED_VOTES and view.features and view.features == view.shape.features
                and not mixture_is_untouched(view.rows, view.shape, self.k)):
            mixture_weights(view.rows, view.shape, self.k, context, view.weights)

    cdef bint can_choose(self, const StateView* state) noexcept nogil:
        return (self.linear is None or state.known == 0 or state.features == 0
                or state.features == state.known)

    cdef u32 choose(self, const StateView* state, double uniform,
                    double* probability) noexcept nogil:
        cdef double[MODELS_MAX] p
        cdef double[TASKS_MAX * MEMORIES_COLUMNS] rows
        cdef u32 i, columns
        if self.linear is not None:
            probability[0] = NAN
            return self._by_features(state, uniform)
        if self.how == DRAWN_MODEL:
            return self._drawn(uniform, probability)
        if self.n == self.k:
            i = rule_choose(&self.rule.state, state.rows, self.k, state.seen, uniform, p)
            probability[0] = p[i]
            return i
        columns = self.rule.state.columns
        for i in range(self.n):
            memcpy(rows + i * columns, state.rows + <u64> self.called[i] * columns,
                   columns * sizeof(double))
        i = rule_choose(&self.rule.state, rows, self.n, state.seen, uniform, p)
        probability[0] = p[i]
        return self.called[i]

    cdef u32 _by_features(self, const StateView* state, double uniform) noexcept nogil:
        """Return the place of the model that is best for the features of the query."""
        cdef double[FEATURES_MAX] x
        cdef u32 i
        x[0] = 1.0
        for i in range(state.known):
            x[1 + i] = state.context[i] if state.features else 0.0
        i = context_choose(&self.linear.state, state.rows, self.called, self.n, state.known + 1, x,
                           uniform)
        return self.called[i]

    cdef u32 _drawn(self, double uniform, double* probability) noexcept nogil:
        """Return the place of a model that is drawn by its share."""
        cdef double total = 0.0, below = 0.0
        cdef u32 i, at, last = 0
        for at in range(self.n):
            total += self.weights[self.called[at]]
        for at in range(self.n):
            i = self.called[at]
            if self.weights[i] > 0.0:
                last = i
                below += self.weights[i]
                if uniform * total < below:
                    break
        probability[0] = self.weights[last] / total
        return last

    cdef bint combine(self, const StateView* state, const Outputs* outputs,
                      Combination* found) noexcept nogil:
        cdef OutputKind kind
        cdef double[TASKS_MAX] weights
        cdef double total
        cdef u64 usable = _usable(outputs)
        if usable != first_bits(outputs.n) or usable == 0:
            return self._some_combined(state, outputs, usable, found)
        found.used = usable
        found.agreement = 1.0
        found.winner = found.label = 0
        if outputs.queried == 1 and self.how != BLEND:
            if self.how == CHOSEN_MODEL:
                return self._rate_chosen(state, outputs, found)
            found.confidence = _sound(outputs, 0, 1.0)
            return True
        kind = kind_of(outputs)
        if kind == OTHER:
            return False
        if self.how == LEARNED_VOTES and kind == VOTED:
            return self._learned_vote(state, outputs, found)
        if self.how == BLEND and kind == NUMBERS and self._blended(state, outputs, found):
            return True
        total = self._weights(state, outputs, weights)
        if kind == NUMBERS:
            return mean_of(outputs, weights, total, found)
        vote_of(outputs, weights, total, found)
        return True

    cdef bint _some_combined(self, const StateView* state, const Outputs* outputs, u64 usable,
                             Combination* found) noexcept nogil:
        """Combine those outputs of a bit set that may be answered with."""
        cdef Outputs votes
        if usable == 0:
            nothing_found(found)
            return True
        outputs_pick(outputs, usable, &votes)
        if not self.combine(state, &votes, found):
            return False
        found_among(found, usable)
        return True

    cdef double _weights(self, const StateView* state, const Outputs* outputs,
                         double* weights) noexcept nogil:
        """Set the weights of the votes; return that of all models that were called."""
        cdef const double* by_place = NULL
        cdef double total = 0.0, arrived = 0.0
        cdef u32 i
        if self.how == FIXED_VOTES:
            by_place = &self.weights[0]
        elif self.how == LEARNED_VOTES and self.rule.state.kind != MIXTURE:
            by_place = &state.weights[0]
        if by_place != NULL:
            for i in range(outputs.n):
                weights[i] = by_place[outputs.place[i]]
                arrived += weights[i]
            for i in range(self.n):
                total += by_place[self.called[i]]
            # weights that a person has set are not for models of weight 0 alone
            if total > 0.0 and (arrived > 0.0 or self.how != FIXED_VOTES):
                return total
        for i in range(outputs.n):
            weights[i] = 1.0
        return outputs.queried

    cdef void _learner(self, const StateView* state, Learner* learner) noexcept nogil:
        """Set what feedback_update reads of a state."""
        learner.rule = &self.rule.state
        learner.k = self.k
        learner.labels = state.labels
        learner.shape = state.shape
        # nothing is learned here
        learner.rows = <double*> state.rows
        learner.sure = <double*> state.sure
        learner.columns = state.columns
        learner.bins = state.bins
        learner.doubt = self.doubt

    cdef bint _rate_chosen(self, const StateView* state, const Outputs* outputs,
                           Combination* found) noexcept nogil:
        """Calibrate the confidence of the one model that was called."""
        cdef u8[TASKS_MAX] arrived
        cdef double[TASKS_MAX] confidence
        cdef Learner learner
        cdef Observation observation
        cdef double raw
        cdef u32 i, winner = 0, chosen = outputs.place[0]
        self._learner(state, &learner)
        for i in range(self.k):
            arrived[i] = i == chosen
            confidence[i] = own_confidence(outputs, 0) if i == chosen else NAN
        _no_label(&observation)
        observation.arrived = arrived
        observation.confidence = confidence
        observation.chosen = chosen
        raw = feedback_update_raw(&learner, &observation, &winner)
        if raw < 0.0:
            return False
        found.confidence = _calibrated(&learner, raw)
        return True

    cdef void _poll(self, const StateView* state, const Outputs* outputs,
                    Poll* poll) noexcept nogil:
        """Set the votes of labels."""
        cdef bint mixed = self.rule.state.kind == MIXTURE
        cdef u32 i, j, at
        self._learner(state, &poll.learner)
        if outputs.n < self.k:
            memset(poll.arrived, 0, self.k * sizeof(u8))
            memset(poll.values, 0, self.k * sizeof(i64))
            memset(poll.cells, 0, self.k * sizeof(u8))
            for i in range(self.k):
                poll.confidence[i] = NAN
        for i in range(outputs.n):
            at = outputs.place[i]
            poll.arrived[at] = True
            poll.confidence[at] = own_confidence(outputs, i)
            j = _first_like(outputs, i)
            poll.values[at] = j
            poll.cells[at] = 0
            if mixed and j < i:
                poll.cells[at] = poll.cells[outputs.place[j]]
            elif mixed:
                poll.cells[at] = <u8> key_hash(&outputs.key[i])
        _no_label(&poll.observation)
        if self.n < self.k:
            poll.observation.queried = self.is_called
        poll.observation.values = poll.values
        poll.observation.cells = poll.cells
        poll.observation.arrived = poll.arrived
        poll.observation.confidence = poll.confidence
        poll.observation.chosen = self.k
        poll.observation.context = state.context
        poll.observation.features = state.features
        poll.observation.named = outputs.named

    cdef void label_odds(self, const StateView* state, const Outputs* outputs,
                         const Combination* found, LabelOdds* odds) noexcept nogil:
        cdef Poll poll
        cdef u32[LABELS_READ + 1] models
        cdef double votes = 0.0
        cdef u32 i, j
        odds.n = 0
        for i in range(outputs.n):
            if found.used >> i & 1 and _first_like(outputs, i) == i:
                odds.voter[odds.n] = i
                models[odds.n] = outputs.place[i]
                odds.n += 1
        if self.how == CHOSEN_MODEL:
            odds.p[0] = found.confidence
            odds.other = ((1.0 - found.confidence)
                          / max(feedback_update_classes(state.labels) - 1.0, 1.0))
            return
        if self.how == BLEND:
            for i in range(outputs.n):
                votes += found.used >> i & 1
            for i in range(odds.n):
                odds.p[i] = 0.0
                for j in range(outputs.n):
                    if found.used >> j & 1 and _first_like(outputs, j) == odds.voter[i]:
                        odds.p[i] += 1.0 / votes
            odds.other = 0.0
            return
        self._poll(state, outputs, &poll)
        for i in range(outputs.n):
            poll.arrived[outputs.place[i]] = found.used >> i & 1
        # a challenger, which alone was called
        if outputs.queried == 1:
            poll.observation.queried = NULL
            poll.observation.chosen = outputs.place[0]
        if outputs.named != NULL:
            for i in range(outputs.named.labels):
                models[i] = self.k
                for j in range(self.k):
                    if outputs.named.codes[j] == i + 1:
                        models[i] = j
                        break
            odds.n = outputs.named.labels
        odds.other = feedback_update_odds(&poll.learner, &poll.observation, odds.n, models, odds.p)

    cdef bint _learned_vote(self, const StateView* state, const Outputs* outputs,
                            Combination* found) noexcept nogil:
        """Vote with the weights of the rule."""
        cdef Poll poll
        cdef bint mixed = self.rule.state.kind == MIXTURE
        cdef double raw
        cdef u32 winner = 0
        self._poll(state, outputs, &poll)
        raw = feedback_update_raw(&poll.learner, &poll.observation, &winner)
        if raw < 0.0 or (winner >= self.k and outputs.named == NULL):
            return False
        if winner >= self.k:
            # no model voted for it
            found.winner, found.label = NO_WINNER, winner - self.k + 1
            found.agreement = 0.0
            found.confidence = _calibrated(&poll.learner, raw)
            return True
        # the first output like the winner's is that of the first model with this label
        found.winner = <u32> poll.values[winner]
        found.confidence = found.agreement = raw
        if not mixed or not mixture_is_untouched(state.rows, state.shape, self.k):
            found.agreement = _agreement(self, state.weights, poll.arrived, poll.values, winner)
            found.confidence = _calibrated(&poll.learner, raw)
        return True

    cdef bint _blended(self, const StateView* state, const Outputs* outputs,
                       Combination* found) noexcept nogil:
        """Blend numbers by the regression. False: the answer is not finite."""
        cdef double[TASKS_MAX + 1] z
        cdef double answer, scatter, residual, count, share, spread, size
        cdef u32 i
        for i in range(self.k):
            z[i] = NAN
        for i in range(outputs.n):
            z[outputs.place[i]] = key_number(&outputs.key[i])
        z[self.k] = 0.0
        residual = blend(state.rows, self.k, self.ridge, z, 1, &answer, &scatter)
        if not isfinite(answer + scatter):
            return False
        size = answer if answer > 0.0 else -answer
        count = state.rows[<u64> self.k * state.columns + 1]
        share = count / (count + self.doubt)
        # not hypot: a newer one in glibc 2.35 would be the only thing that a wheel needs of it
        spread = <double> hypotl(sqrt(share) * residual, sqrt(1.0 - share) * scatter)
        found.winner = NO_WINNER
        found.mean = answer
        found.confidence = spread == 0.0
        if size != 0.0:
            found.agreement = size / (size + scatter)
            found.confidence = size / (size + spread)
        found.confidence = min(found.confidence * (<double> outputs.n / outputs.queried), 1.0)
        return True


# Bit sets of kinds of keys: what is voted on, and what is averaged where a float is among it.
cdef u32 ANY_LABEL = (1 << BOOL_KEY | 1 << WHOLE_KEY | 1 << LARGE_KEY | 1 << STR_KEY
                      | 1 << BYTES_KEY)
cdef u32 ANY_NUMBER = 1 << FLOAT_KEY | 1 << WHOLE_KEY


# The exponent of a double that is no finite number.
cdef u64 NO_NUMBER = <u64> 0x7FF << 52


cdef inline u64 _usable(const Outputs* outputs) noexcept nogil:
    """Return the bit set of the outputs that may be answered with."""
    cdef u64 found = first_bits(outputs.n)
    cdef u32 i
    for i in range(outputs.n):
        if outputs.key[i].kind == FLOAT_KEY:
            if outputs.key[i].bits & NO_NUMBER == NO_NUMBER:
                found ^= <u64> 1 << i
        elif outputs.key[i].kind == ARRAY_KEY and not key_is_usable(&outputs.key[i]):
            found ^= <u64> 1 << i
    return found


cdef inline bint _are_doubles(object array) noexcept:
    """Return whether it is a contiguous f64 array of two dimensions."""
    return (cnp.PyArray_Check(array) and cnp.PyArray_TYPE(array) == cnp.NPY_DOUBLE
            and cnp.PyArray_NDIM(array) == 2 and cnp.PyArray_IS_C_CONTIGUOUS(array))


cdef inline void _no_label(Observation* observation) noexcept nogil:
    """Set the fields of a query that has no feedback yet."""
    observation.values = NULL
    observation.cells = NULL
    observation.label = -1
    observation.context = NULL
    observation.named = NULL
    observation.queried = NULL
    observation.features = 0
    observation.right = 0


cdef bint outputs_read(Outputs* outputs) noexcept nogil:
    cdef bint plain = True
    cdef u32 i
    outputs.named = NULL
    for i in range(outputs.n):
        plain &= output_read(outputs, i)
    return plain


cdef bint output_read(Outputs* outputs, u32 i) noexcept nogil:
    cdef const Value* value = &outputs.value[i]
    outputs.key[i] = value_key(value.word, value.tag, NULL)
    outputs.is_sure[i] = False
    outputs.confidence[i] = NAN
    if value.tag != TAG_BLOB and value.tag != TAG_ROW:
        return True
    if blob_of(value.word).has_confidence:
        outputs.is_sure[i] = True
        outputs.confidence[i] = word_confidence(value.word)
    return blob_of(value.word).qualifier_bytes == 0


cdef void outputs_pick(const Outputs* outputs, u64 bits, Outputs* picked) noexcept nogil:
    cdef u32 i, n = 0
    for i in range(outputs.n):
        if bits >> i & 1:
            picked.place[n] = outputs.place[i]
            picked.value[n] = outputs.value[i]
            picked.key[n] = outputs.key[i]
            picked.confidence[n] = outputs.confidence[i]
            picked.is_sure[n] = outputs.is_sure[i]
            n += 1
    picked.n = n
    picked.queried = outputs.queried
    picked.named = outputs.named


cdef void nothing_found(Combination* found) noexcept nogil:
    found.confidence = found.agreement = found.mean = 0.0
    found.winner = NO_WINNER
    found.used = found.label = 0


cdef void found_among(Combination* found, u64 bits) noexcept nogil:
    cdef u32 i, at = 0, winner = NO_WINNER
    cdef u64 used = 0
    for i in range(TASKS_MAX):
        if not bits >> i & 1:
            continue
        used |= (found.used >> at & 1) << i
        if at == found.winner:
            winner = i
        at += 1
    found.used, found.winner = used, winner


cdef double own_confidence(const Outputs* outputs, u32 i) noexcept nogil:
    if not outputs.is_sure[i]:
        return NAN
    return outputs.confidence[i] if outputs.confidence[i] == outputs.confidence[i] else 0.0


cdef inline double _sound(const Outputs* outputs, u32 i, double unknown) noexcept nogil:
    """Return the confidence that a model reported, between 0 and 1; `unknown` if it did not."""
    cdef double own = own_confidence(outputs, i)
    if not outputs.is_sure[i]:
        return unknown
    return min(max(own, 0.0), 1.0)


cdef inline u32 _first_like(const Outputs* outputs, u32 i) noexcept nogil:
    """Return the first task that has the same output as task i."""
    cdef u32 j
    for j in range(i):
        if keys_are_equal(&outputs.key[j], &outputs.key[i]):
            return j
    return i


cdef OutputKind kind_of(const Outputs* outputs) noexcept nogil:
    """Return what the outputs are: labels, or numbers with a float among them."""
    cdef u32 kinds = 0, i
    for i in range(outputs.n):
        kinds |= <u32> 1 << outputs.key[i].kind
    if kinds & ~ANY_LABEL == 0:
        return VOTED
    return NUMBERS if kinds & ~ANY_NUMBER == 0 else OTHER


cdef void vote_of(const Outputs* outputs, const double* weights, double selected,
                Combination* found) noexcept nogil:
    """Find the label with the largest weight; of equals the one of the surer models, then that of
    the first."""
    cdef double[TASKS_MAX] behind
    cdef double[TASKS_MAX] sure
    cdef u32[TASKS_MAX] first
    cdef double top = 0.0, high = -1.0
    cdef u32 i
    for i in range(outputs.n):
        behind[i] = 0.0
        sure[i] = 0.0
        first[i] = _first_like(outputs, i)
        behind[first[i]] += weights[i]
    for i in range(outputs.n):
        top = max(top, behind[i])
        sure[first[i]] += _sound(outputs, i, 0.5)
    for i in range(outputs.n):
        if first[i] == i and behind[i] >= top * (1 - 1e-12) and sure[i] > high:
            high = sure[i]
            found.winner = i
    found.confidence = min(behind[found.winner] / selected, 1.0)
    found.agreement = found.confidence


cdef bint mean_of(const Outputs* outputs, const double* weights, double selected,
                Combination* found) noexcept nogil:
    """Average numbers."""
    cdef double[TASKS_MAX] numbers
    cdef WeightedMean mean
    cdef u32 i
    for i in range(outputs.n):
        numbers[i] = key_number(&outputs.key[i])
    mean = weighted_mean(numbers, weights, outputs.n)
    found.winner = NO_WINNER
    found.mean = mean.mean
    found.agreement = mean.agreement
    found.confidence = min(mean.arrived / selected * mean.agreement, 1.0)
    return True


cdef double _agreement(Selection self, const double* weights, const u8* arrived,
                       const i64* values, u32 winner) noexcept nogil:
    """Return the weight of the models that agree with the winner, as a share of that of the models
    that are called; of a mixture, of so many with the mean weight of all."""
    cdef double total = 0.0, queried = 0.0, behind = 0.0
    cdef u32 i
    for i in range(self.k):
        total += weights[i]
        if self.is_called[i]:
            queried += weights[i]
        if arrived[i] and values[i] == values[winner]:
            behind += weights[i]
    if self.n < self.k and self.rule.state.kind == MIXTURE:
        total = total * self.n / self.k
    elif self.n < self.k and queried > 0.0:
        total = queried
    elif self.n < self.k:               # none of them has any weight: they are equal
        total = self.n
        for i in range(self.k):
            if arrived[i] and values[i] == values[winner]:
                behind += 1.0
    return min(behind / total, 1.0) if total > 0.0 else 0.0


cdef double _calibrated(const Learner* learner, double raw) noexcept nogil:
    """Return the share of answers with this confidence that were right."""
    cdef u32 i = min(<u32> (raw * learner.bins + 1e-9), learner.bins - 1)
    cdef const double* bin = learner.sure + 2 * i
    return (bin[0] + learner.doubt * raw) / (bin[1] + learner.doubt)
