"""The rules that decide when an ensemble has an answer.

Schedule. Steps end one after another; the last one ends at the deadline. The current step reads
everything that has arrived since the start. If no task is outstanding any more, the remaining steps
are tried in order without waiting for their time; the last one answers with what has arrived, which
may be nothing.

Exact by construction. A step answers early only if the outstanding tasks cannot change its answer,
whether they end with any value or with none. For votes: the leader's weight less the runner-up's
exceeds all outstanding weight, so that no tie is possible, and the tie-breakers (confidence, then
rank) need not be known. For ranks: no better task is outstanding. For a median: the order
statistics with everything outstanding at either end. A mean has no such bound unless the outputs
have: `low` and `high`. There is one exception, which the user must set: with a `tolerance` and
`need` of two or more, `need` numbers that differ by at most the tolerance stand for all.

Tasks that can still come are those that were submitted and have not ended, and those that will be
submitted at a set time. A task that only a rule can submit does not count until it is submitted.

A tie among all that arrived goes to the surer votes, then to the best ranked: the rule of
clipper.selection.votes.

Not done: ending a step early because it cannot succeed any more (the next one would see fewer
predictions than at its time).
"""
cimport cython
from libc.math cimport INFINITY, fabs
from libc.stdlib cimport free
from libc.string cimport memset

from collections import namedtuple
from collections.abc import Mapping

from clipper_core.runtime.machine cimport acq_rel, aligned_new, relaxed
from clipper_core.runtime.spin_lock cimport spin_lock, spin_unlock
from clipper_core.runtime.status cimport BAD_INPUT, NO_MEMORY, raise_for

cdef u64 NEVER_US = ~(<u64> 0)
cdef double MARGIN = 1e-9           # share of all weight: sums may differ by the order of addition
cdef double BURST = 8.0             # largest number of tokens

cdef inline u64 _bit(u32 i) noexcept nogil:
    return <u64> 1 << i

cdef inline bint _to_come(const VoteData* vote, u64 slo_us) noexcept nogil:
    return vote.state == OUTSTANDING or (vote.state == UNSUBMITTED and vote.start_us < slo_us)

cdef inline double _sound(const VoteData* vote) noexcept nogil:
    return vote.confidence if vote.confidence >= 0 else 0.5

cdef inline bint _sure(const StepState* step, const VoteData* vote) noexcept nogil:
    return step.confidence_min <= 0 or vote.confidence >= step.confidence_min

cdef inline u64 _until(const StepState* step, u64 slo_us) noexcept nogil:
    return step.until_us if 0 < step.until_us < slo_us else slo_us

cdef struct StepView:               # the tasks as one step sees them
    const VoteData* votes
    u32 n
    u64 arrived                 # bits
    u64 coming
    u64 slo_us
    bint last                   # no step follows


cdef StepView _view_of(const StepState* step, const VoteData* votes, u32 n, u64 slo_us,
                bint last) noexcept nogil:
    cdef StepView view
    cdef u32 i
    view.votes, view.n, view.slo_us, view.last = votes, n, slo_us, last
    view.arrived = view.coming = 0
    for i in range(n):
        if step.accept >> i & 1:
            if votes[i].state == ARRIVED:
                view.arrived |= _bit(i)
            elif _to_come(&votes[i], slo_us):
                view.coming |= _bit(i)
    return view


cdef RulingData _wait() noexcept nogil:
    cdef RulingData ruling
    memset(&ruling, 0, sizeof(RulingData))
    ruling.winner = ENSEMBLE_TASKS_MAX
    ruling.until_us = NEVER_US
    return ruling


cdef RulingData _answer(u64 mask, u32 winner) noexcept nogil:
    cdef RulingData ruling = _wait()
    ruling.kind = ANSWER
    ruling.mask = mask
    ruling.winner = winner
    return ruling


cdef RulingData _answer_one(u32 i) noexcept nogil:
    return _answer(_bit(i), i)


cdef RulingData _submit(u64 mask, bint extra) noexcept nogil:
    cdef RulingData ruling = _wait()
    ruling.kind = SUBMIT
    ruling.mask = mask
    ruling.extra = extra
    return ruling


# -- selecting one
# --------------------------------------------------------------------------------------------------

cdef u32 _first(const StepState* step, const StepView* view, bint sure) noexcept nogil:
    """Return the first to arrive of those that are confident enough; ENSEMBLE_TASKS_MAX: none."""
    cdef u32 i, found = ENSEMBLE_TASKS_MAX
    for i in range(view.n):
        if view.arrived >> i & 1 and (not sure or _sure(step, &view.votes[i])):
            if found == ENSEMBLE_TASKS_MAX or view.votes[i].order < view.votes[found].order:
                found = i
    return found


cdef u32 _best(const StepState* step, const StepView* view, bint sure) noexcept nogil:
    cdef u32 i
    for i in range(view.n):
        if view.arrived >> i & 1 and (not sure or _sure(step, &view.votes[i])):
            return i
    return ENSEMBLE_TASKS_MAX


cdef u32 _surest(const StepView* view, bint latest) noexcept nogil:
    """Return the most confident; of equal ones the best ranked, or the latest submitted."""
    cdef u32 i, found = ENSEMBLE_TASKS_MAX
    for i in range(view.n):
        if view.arrived >> i & 1 and (found == ENSEMBLE_TASKS_MAX
                                      or _sound(&view.votes[i]) > _sound(&view.votes[found])
                                      or (latest and _sound(&view.votes[i])
                                          == _sound(&view.votes[found]))):
            found = i
    return found


cdef u32 _next_unsubmitted(const StepState* step, const StepView* view) noexcept nogil:
    cdef u32 i
    for i in range(view.n):
        if step.accept >> i & 1 and view.votes[i].state == UNSUBMITTED:
            return i
    return ENSEMBLE_TASKS_MAX


cdef bint _is_outstanding(const StepState* step, const StepView* view) noexcept nogil:
    """Return whether a task of the step is outstanding."""
    cdef u32 i
    for i in range(view.n):
        if step.accept >> i & 1 and view.votes[i].state == OUTSTANDING:
            return True
    return False


cdef RulingData _try_first(const StepState* step, const StepView* view,
                           bint may_submit) noexcept nogil:
    """Answer with the first that is confident enough. CASCADE submits the next task when none is
    outstanding, HEDGED when all have failed."""
    cdef u32 found = _first(step, view, True)
    if found < ENSEMBLE_TASKS_MAX:
        return _answer_one(found)
    if not may_submit or step.rule == FIRST or step.rule == TIED or _is_outstanding(step, view):
        return _wait()
    found = _next_unsubmitted(step, view)
    return _submit(_bit(found), False) if found < ENSEMBLE_TASKS_MAX else _wait()


cdef RulingData _try_best(const StepState* step, const StepView* view) noexcept nogil:
    cdef u32 found = _best(step, view, True)
    if found < ENSEMBLE_TASKS_MAX and view.coming & (_bit(found) - 1) == 0:
        return _answer_one(found)
    return _wait()


cdef RulingData _try_surest(const StepState* step, const StepView* view) noexcept nogil:
    cdef u32 found = _surest(view, False)
    if found == ENSEMBLE_TASKS_MAX or not _sure(step, &view.votes[found]):
        return _wait()
    if view.coming == 0 or (_sound(&view.votes[found]) >= 1
                            and view.coming & (_bit(found) - 1) == 0):
        return _answer_one(found)
    return _wait()


cdef RulingData _try_floor(const StepState* step, const StepView* view,
                           bint may_submit) noexcept nogil:
    if view.arrived >> step.which & 1:
        return _answer_one(step.which)
    if may_submit and step.which < view.n and view.votes[step.which].state == UNSUBMITTED:
        return _submit(_bit(step.which), False)
    return _wait()


# -- votes
# --------------------------------------------------------------------------------------------------

cdef struct Count:
    # the lowest task with the winning value; ENSEMBLE_TASKS_MAX: there are no votes
    u32 winner
    u32 votes                   # for it
    double weight
    double second               # the runner-up's
    double total                # weight of all that were or will be submitted
    double coming


cdef Count _count(const StepState* step, const StepView* view) noexcept nogil:
    cdef double[ENSEMBLE_TASKS_MAX] weight
    cdef double[ENSEMBLE_TASKS_MAX] sure
    cdef u32[ENSEMBLE_TASKS_MAX] votes
    # for each class, the lowest task with that value that the step considers
    cdef u32[ENSEMBLE_TASKS_MAX] leader
    cdef double one, top = 0
    cdef u32 i, k
    cdef Count c
    c.total = c.coming = c.weight = c.second = 0
    c.winner, c.votes = ENSEMBLE_TASKS_MAX, 0
    for i in range(view.n):
        weight[i] = sure[i] = 0
        votes[i] = 0
        leader[i] = ENSEMBLE_TASKS_MAX
    for i in range(view.n):
        if step.accept >> i & 1 == 0 or (view.votes[i].state == UNSUBMITTED
                                         and view.coming >> i & 1 == 0):
            continue
        one = view.votes[i].weight if step.rule == WEIGHTED else 1.0
        c.total += one
        if view.coming >> i & 1:
            c.coming += one
        elif view.arrived >> i & 1:
            k = leader[view.votes[i].klass]
            if k == ENSEMBLE_TASKS_MAX:
                k = leader[view.votes[i].klass] = i
            weight[k] += one
            sure[k] += _sound(&view.votes[i])
            votes[k] += 1
            top = max(top, weight[k])
    for i in range(view.n):
        if votes[i] and weight[i] >= top * (1 - 1e-12) and (c.winner == ENSEMBLE_TASKS_MAX
                                                            or sure[i] > sure[c.winner]):
            c.winner = i
    if c.winner < ENSEMBLE_TASKS_MAX:
        c.weight, c.votes = weight[c.winner], votes[c.winner]
    for i in range(view.n):
        if i != c.winner:
            c.second = max(c.second, weight[i])
    return c


cdef RulingData _try_votes(const StepState* step, const StepView* view) noexcept nogil:
    """Answer as soon as no other value can win, or all have arrived. A step that others follow also
    needs its quorum, or its majority."""
    cdef Count c = _count(step, view)
    if c.winner == ENSEMBLE_TASKS_MAX or c.weight < step.confidence_min * c.total:
        return _wait()
    if view.coming and c.weight - c.second <= c.coming + MARGIN * c.total:
        return _wait()
    if not view.last and (c.votes < step.need if step.need
                          else 2 * c.weight <= c.total * (1 + MARGIN)):
        return _wait()
    return _answer(view.arrived, c.winner)


# -- numbers
# --------------------------------------------------------------------------------------------------

cdef u32 _sorted(const StepView* view, double* x, double* weights, u64* mask) noexcept nogil:
    """Sort the numbers that arrived, with their weights. Return how many there are. mask: set to
    their tasks."""
    cdef u32 i, j, m = 0
    cdef double number
    mask[0] = 0
    for i in range(view.n):
        if view.arrived >> i & 1 == 0 or not view.votes[i].numeric:
            continue
        mask[0] |= _bit(i)
        number = view.votes[i].number
        j = m
        while j > 0 and x[j - 1] > number:
            x[j], weights[j] = x[j - 1], weights[j - 1]
            j -= 1
        x[j], weights[j] = number, view.votes[i].weight
        m += 1
    return m


cdef inline double _rank(const double* x, u32 m, u32 below, u32 above, double low, double high,
                         u32 j) noexcept nogil:
    """Return the j-th of m sorted numbers, with `below` times `low` before them and `above` times
    `high` after them."""
    return low if j < below else x[j - below] if j < below + m else high


cdef double _median(const double* x, u32 m, u32 below, u32 above, double low,
                    double high) noexcept nogil:
    cdef u32 all = m + below + above
    cdef double a = _rank(x, m, below, above, low, high, (all - 1) / 2)
    cdef double b = _rank(x, m, below, above, low, high, all / 2)
    return a if a == b else a / 2 + b / 2


cdef double _mean(const double* x, const double* weights, u32 m, double more,
                  double at) noexcept nogil:
    """Return the weighted mean, with `more` weight at `at` added. Numbers without any weight count
    equally."""
    cdef u32 i
    cdef double total = more, middle = more * at if more > 0 else 0
    for i in range(m):
        total += weights[i]
        middle += weights[i] * x[i]
    if total > 0:
        return middle / total
    middle = 0
    for i in range(m):
        middle += x[i] / m
    return middle


cdef bint _is_fixed(const StepState* step, const StepView* view, const double* x,
                    const double* weights,
                    u32 m) noexcept nogil:
    """Return whether no outstanding vote can move the result by more than the tolerance. Votes
    cannot lie beyond low and high."""
    cdef u32 i, coming = 0
    cdef double more = 0, low = min(step.low, x[0]), high = max(step.high, x[m - 1])
    for i in range(view.n):
        if view.coming >> i & 1:
            coming += 1
            more += view.votes[i].weight
    if step.rule == MEDIAN:
        return (fabs(_median(x, m, coming, 0, low, high)
                     - _median(x, m, 0, 0, 0, 0)) <= step.tolerance
                and fabs(_median(x, m, 0, coming, low, high)
                         - _median(x, m, 0, 0, 0, 0)) <= step.tolerance)
    if more <= 0:
        return False
    return (fabs(_mean(x, weights, m, more, low) - _mean(x, weights, m, 0, 0)) <= step.tolerance
            and fabs(_mean(x, weights, m, more, high)
                     - _mean(x, weights, m, 0, 0)) <= step.tolerance)


cdef RulingData _try_numbers(const StepState* step, const StepView* view) noexcept nogil:
    cdef double[ENSEMBLE_TASKS_MAX] x
    cdef double[ENSEMBLE_TASKS_MAX] weights
    cdef u64 mask
    cdef u32 m = _sorted(view, x, weights, &mask)
    if view.coming == 0 and view.arrived and m >= step.need:
        return _answer(mask if m else view.arrived, ENSEMBLE_TASKS_MAX)
    if m < max(step.need, <u32> 1) or view.coming == 0:
        return _wait()
    if (step.need > 1 and step.tolerance > 0
        and x[m - 1] - x[0] <= step.tolerance) or _is_fixed(step, view, x, weights, m):
        return _answer(mask, ENSEMBLE_TASKS_MAX)
    return _wait()


# -- steps
# --------------------------------------------------------------------------------------------------

cdef RulingData _try(const StepState* step, const StepView* view, bint may_submit) noexcept nogil:
    if step.rule == ALL:
        return _wait() if view.coming or view.arrived == 0 else _answer(view.arrived,
                ENSEMBLE_TASKS_MAX)
    if step.rule == QUORUM or step.rule == WEIGHTED:
        return _try_votes(step, view)
    if step.rule == BEST:
        return _try_best(step, view)
    if step.rule == SUREST:
        return _try_surest(step, view)
    if step.rule == MEAN or step.rule == MEDIAN:
        return _try_numbers(step, view)
    if step.rule == FLOOR:
        return _try_floor(step, view, may_submit)
    if step.rule == ROW:
        return _wait() if _best(step, view,
                                True) == ENSEMBLE_TASKS_MAX else _answer_one(_best(step, view,
                                    True))
    return _try_first(step, view, may_submit)


cdef RulingData _with_what_there_is(const StepState* step, const StepView* view) noexcept nogil:
    """Answer by the last step, when nothing more can arrive, whatever the confidence."""
    cdef bint ranked = step.rule == BEST or step.rule == ROW
    cdef u32 found
    cdef double[ENSEMBLE_TASKS_MAX] x
    cdef double[ENSEMBLE_TASKS_MAX] weights
    cdef u64 mask
    if view.arrived == 0 or (step.rule == FLOOR and view.arrived >> step.which & 1 == 0):
        return _answer(0, ENSEMBLE_TASKS_MAX)
    if step.rule == ALL:
        return _answer(view.arrived, ENSEMBLE_TASKS_MAX)
    if step.rule == QUORUM or step.rule == WEIGHTED:
        return _answer(view.arrived, _count(step, view).winner)
    if step.rule == MEAN or step.rule == MEDIAN:
        return _answer(mask if _sorted(view, x, weights, &mask) else view.arrived,
                       ENSEMBLE_TASKS_MAX)
    if step.rule == SUREST or step.rule == CASCADE:
        return _answer_one(_surest(view, step.rule == CASCADE))
    if step.rule == FLOOR:
        return _answer_one(step.which)
    found = _best(step, view, True) if ranked else _first(step, view, True)
    if found == ENSEMBLE_TASKS_MAX:
        found = _best(step, view, False) if ranked else _first(step, view, False)
    return _answer_one(found)


cdef u64 _next_us(const VoteData* votes, u32 n, u64 elapsed_us, u64* due) noexcept nogil:
    """Return when the next task must be submitted; `due`: the tasks to submit now."""
    cdef u32 i
    cdef u64 at = NEVER_US
    due[0] = 0
    for i in range(n):
        if votes[i].state == UNSUBMITTED and votes[i].start_us != NEVER_US:
            if votes[i].start_us <= elapsed_us:
                due[0] |= _bit(i)
            else:
                at = min(at, votes[i].start_us)
    return at


cdef RulingData decide(const DeciderState* d, const VoteData* votes, u32 n, u64 elapsed_us,
                       u64 slo_us) noexcept nogil:
    cdef RulingData ruling
    cdef StepView view
    cdef u32 i, s = 0
    cdef u64 due, next_us = _next_us(votes, n, elapsed_us, &due)
    cdef bint over, coming = False
    slo_us = _until(&d.steps[d.count - 1], slo_us)
    over = elapsed_us >= slo_us
    for i in range(n):
        coming |= _to_come(&votes[i], slo_us)
    while s + 1 < d.count and _until(&d.steps[s], slo_us) <= elapsed_us:
        s += 1
    while True:
        view = _view_of(&d.steps[s], votes, n, slo_us, s + 1 == d.count)
        ruling = _try(&d.steps[s], &view, not over)
        if ruling.kind == WAIT and coming and not over:
            if due:
                ruling = _submit(due, d.steps[s].rule == HEDGED)
            else:
                ruling.until_us = min(_until(&d.steps[s], slo_us), next_us)
        elif ruling.kind == WAIT and view.last:
            ruling = _with_what_there_is(&d.steps[s], &view)
        elif ruling.kind == WAIT:
            s += 1
            continue
        ruling.step = <u8> s
        return ruling


# -- the schedule, which queries share
# -------------------------------------------------------------------

cdef DeciderState* decider_hold(DeciderState* d) noexcept nogil:
    d.refs.fetch_add(1, relaxed)
    return d


cdef void decider_drop(DeciderState* d) noexcept nogil:
    if d.refs.fetch_sub(1, acq_rel) == 1:
        free(d)


cdef void decider_query(DeciderState* d) noexcept nogil:
    if d.bounded:
        spin_lock(d.lock)
        d.tokens = min(d.tokens + d.extra, BURST)
        spin_unlock(d.lock)


cdef bint decider_may_extra(DeciderState* d) noexcept nogil:
    cdef bint may
    spin_lock(d.lock)
    may = d.tokens >= 1
    if may:
        d.tokens -= 1
    spin_unlock(d.lock)
    return may


# -- in Python
# --------------------------------------------------------------------------------------------------

Step = namedtuple("Step",
                  ("rule", "until_us", "accept", "confidence_min", "need", "tolerance", "which",
                   "low", "high", "extra"),
                  defaults=(0, None, 0.0, 0, 0.0, 0, -INFINITY, INFINITY, 0.05))
Vote = namedtuple("Vote", ("state", "value", "confidence", "weight", "start_us", "order"),
                  defaults=(None, None, 1.0, 0, 0))
Ruling = namedtuple("Ruling", ("kind", "step", "mask", "until_us", "winner"))

cdef tuple _kinds = ("wait", "answer", "submit")


cdef object _bad(u32 i, object text):
    raise_for(BAD_INPUT, f"step {i} of the decider: {text}")


cdef int _read_step(u32 i, object step, StepState* to) except -1:
    cdef object name = "a step" if not 0 <= int(step.rule) <= ROW else _rule_name(int(step.rule))
    if not 0 <= int(step.rule) <= ROW:
        _bad(i, f"no rule has the number {step.rule}; see clipper_core.results.decider.Rule")
    if step.accept is not None and not 0 < int(step.accept) <= NEVER_US:
        _bad(i, f"accept is a set of tasks, one bit each, of {ENSEMBLE_TASKS_MAX} at most, not "
             f"{step.accept}")
    if not 0 <= step.need <= ENSEMBLE_TASKS_MAX or not 0 <= step.which < ENSEMBLE_TASKS_MAX:
        _bad(i, f"{name}: need and which count tasks, of which there are {ENSEMBLE_TASKS_MAX} at "
             f"most, not {step.need} and {step.which}")
    if not 0 <= step.confidence_min <= 1:
        _bad(i, f"{name}: confidence_min lies between 0 and 1, not {step.confidence_min}")
    if not 0 <= step.tolerance < INFINITY or not step.low <= step.high:
        _bad(i, f"{name}: tolerance is from 0 on, and low below high; not {step.tolerance}, "
             f"{step.low} and {step.high}")
    if not 0 <= step.extra <= 1:
        _bad(i, f"{name}: extra is a share of the queries, 0 to 1, not {step.extra}")
    if not 0 <= step.until_us < (<u64> 1 << 62):
        _bad(i, f"{name}: until_us is a time after receipt in microseconds, 0 for the deadline, "
             f"not {step.until_us}")
    to.rule, to.which, to.need, to.until_us = (<u8> int(step.rule), step.which, step.need,
                                               step.until_us)
    to.accept = NEVER_US if step.accept is None else step.accept
    to.confidence_min, to.tolerance, to.low, to.high = (step.confidence_min, step.tolerance,
            step.low, step.high)
    if to.rule == FLOOR and to.accept >> to.which & 1 == 0:
        _bad(i, f"FLOOR answers with task {to.which}, which accept leaves out")
    return 0


cdef str _rule_name(int rule):
    return ("ALL", "FIRST", "QUORUM", "WEIGHTED", "BEST", "SUREST", "CASCADE", "HEDGED", "TIED",
            "MEAN", "MEDIAN", "FLOOR",
            "ROW")[rule]


cdef int _read_steps(tuple steps, DeciderState* d) except -1:
    cdef u32 i
    cdef u64 before = 0
    for i in range(d.count):
        _read_step(i, steps[i], &d.steps[i])
        if i and d.steps[i].until_us and (before == 0 or d.steps[i].until_us <= before):
            _bad(i, f"steps end one after another; this one at {d.steps[i].until_us} us, the one "
                 f"before it at "
                    f"{f'{before} us' if before else 'the deadline'}")
        before = d.steps[i].until_us
        d.tied |= d.steps[i].rule == TIED
        if d.steps[i].rule == HEDGED:
            d.bounded = True
            d.extra = max(d.extra, <double> steps[i].extra)
    d.tokens = 1
    return 0


@cython.final
cdef class Decider:
    """A schedule of 1 to 16 steps that decides when an ensemble has an answer. Threads: any.

    `steps`: Step(rule, until_us, accept, ...): `until_us` microseconds after receipt, ascending, 0:
    the deadline; `accept`: a bit set of tasks, None: all; `confidence_min`: of a vote's share, or
    of the one that answers; `need`: votes, or numbers; `tolerance`, `low`, `high`: of numbers;
    `which`: FLOOR's task; `extra`: HEDGED's bound, extra tasks a query on average. Raises
    BAD_INPUT. Source: docs/design.md, "Deciders in the core".
    """

    def __cinit__(self, steps):
        self.steps = tuple([step if isinstance(step, Step) else Step(**step)
                            if isinstance(step, Mapping) else Step(*step)
                            for step in steps])
        if not 1 <= len(self.steps) <= STEPS_MAX:
            raise_for(BAD_INPUT, f"a decider has 1 to {STEPS_MAX} steps, not {len(self.steps)}")
        self.state = <DeciderState*> aligned_new(sizeof(DeciderState))
        if self.state == NULL:
            raise_for(NO_MEMORY, "no memory for a decider")
        self.state.refs.store(1, relaxed)
        self.state.count = <u32> len(self.steps)
        _read_steps(self.steps, self.state)

    def __dealloc__(self):
        if self.state != NULL:
            decider_drop(self.state)

    def decide(self, votes, u64 elapsed_us, slo_us=None):
        """Decide on votes (a Vote for each task, 64 at most) at a time after receipt. Return
        Ruling(kind, step, mask, until_us, winner).

        Vote(state, value, confidence, weight, start_us, order): `value`: what arrived, equal values
        count together (floats are numbers too); `start_us`: when an UNSUBMITTED task will be
        submitted, None: only if a rule needs it; `order` of arrival. kind: "wait" (until_us, None:
        for the next arrival), "answer" (mask: the tasks whose values are used) or "submit" (mask).
        """
        cdef VoteData[ENSEMBLE_TASKS_MAX] arrived
        cdef RulingData r
        cdef u32 i, n = <u32> len(votes)
        if not 1 <= len(votes) <= ENSEMBLE_TASKS_MAX:
            raise_for(BAD_INPUT,
                      f"a decider takes 1 to {ENSEMBLE_TASKS_MAX} tasks, not {len(votes)}")
        for i in range(n):
            _read_vote(votes, i, &arrived[i])
        r = decide(self.state, arrived, n, elapsed_us, NEVER_US if slo_us is None else slo_us)
        return Ruling(_kinds[r.kind], r.step, r.mask,
                      None if r.until_us == NEVER_US else r.until_us,
                      None if r.winner == ENSEMBLE_TASKS_MAX else r.winner)

    def replay(self, votes, u64 laps):
        """Take `votes` (all ARRIVED) one after another, in order, and decide after each, `laps`
        times, without the GIL.

        For benchmarks. Returns after how many votes there was an answer; 0 if there was none.
        """
        cdef VoteData[ENSEMBLE_TASKS_MAX] all
        cdef VoteData[ENSEMBLE_TASKS_MAX] arrived
        cdef u32 i, answered = 0, n = <u32> len(votes)
        if not 1 <= len(votes) <= ENSEMBLE_TASKS_MAX:
            raise_for(BAD_INPUT,
                      f"a decider takes 1 to {ENSEMBLE_TASKS_MAX} tasks, not {len(votes)}")
        for i in range(n):
            _read_vote(votes, i, &all[i])
        with nogil:
            for _lap in range(laps):
                for i in range(n):
                    arrived[i] = all[i]
                    arrived[i].state = OUTSTANDING
                answered = 0
                for i in range(n):
                    arrived[i] = all[i]
                    if decide(self.state, arrived, n, i, NEVER_US).kind == ANSWER and answered == 0:
                        answered = i + 1
        return answered

    def __repr__(self):
        return f"<Decider {', '.join([_rule_name(int(step.rule)) for step in self.steps])}>"


cdef int _read_vote(object votes, u32 i, VoteData* to) except -1:
    cdef object vote = votes[i]
    cdef u32 j
    memset(to, 0, sizeof(VoteData))
    to.state, to.order, to.weight = <u8> int(vote.state), <u8> vote.order, vote.weight
    to.confidence = -1 if vote.confidence is None else vote.confidence
    to.start_us = NEVER_US if vote.start_us is None else vote.start_us
    to.klass = i
    to.numeric = isinstance(vote.value, (int, float))
    to.number = vote.value if to.numeric else 0
    for j in range(<u32> len(votes)):           # the first to arrive, as in an ensemble call
        if (int(votes[j].state) == ARRIVED and type(votes[j].value) is type(vote.value)
            and votes[j].value == vote.value
                and (votes[j].order, j) < (votes[to.klass].order, to.klass)):
            to.klass = j
    return 0
