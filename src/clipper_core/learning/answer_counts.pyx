"""Counts of an application's answers."""
cimport cython
from cpython.dict cimport PyDict_GetItemWithError, PyDict_Next
from cpython.object cimport PyObject
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from time import monotonic

from numpy import ndarray

from clipper_core.learning.label_feedback cimport Mean
from clipper_core.runtime.histogram cimport count_held, histogram_record
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.wire.comparison cimport key_closeness, key_of_output

from clipper_core.runtime.status import Status as StatusName

cdef double ARRAY_PRICE = 20.0  # comparisons of labels that one of arrays costs

cdef ObjectMember OUTPUT        # of a prediction
OUTPUT.name = b"output"


@cython.final
cdef class Bucket:
    """A token bucket: at most `rate` tokens a second, and `burst` at once. Threads: any."""

    def __cinit__(self, double rate, double burst, double now_s):
        self.rate, self.burst = rate, burst
        self.tokens, self.at_s = burst, now_s

    cdef bint take_tokens(self, double now_s, double tokens) noexcept:
        cdef double have = min(self.burst, self.tokens + (now_s - self.at_s) * self.rate)
        cdef bint enough = have >= tokens
        self.at_s = now_s
        self.tokens = have - tokens if enough else have
        return enough

    def take(self, double now_s, double tokens=1.0):
        """Take tokens; return whether there were enough."""
        return self.take_tokens(now_s, tokens)


@cython.final
cdef class StatusCounts:
    """Counts of tasks by the status with which they ended. Threads: any."""

    @cython.binding(False)
    def add(self, int status):
        """Count a task. status: a Status, or its code. Raises IndexError for what is none."""
        if not 0 <= status < STATUSES_MAX:
            raise IndexError(f"status {status}")
        self.counts[status] += 1

    def by_name(self):
        """Return the counts that are not 0, by the name of the status in lower case."""
        return {status.name.lower(): self.counts[status.value]
                for status in StatusName if self.counts[status.value]}


@cython.final
cdef class DefaultCounts:
    """Counts of default answers by reason. Threads: any."""

    def __init__(self):
        self.unsure = Counter()
        self.not_finite = Counter()
        self.policy_failed = Counter()
        self.ended = StatusCounts()

    def by_reason(self):
        """Return the counts that are not 0, by reason."""
        found = self.ended.by_name()
        for name in ("unsure", "not_finite", "policy_failed"):
            if getattr(self, name).value:
                found[name] = getattr(self, name).value
        return found


@cython.final
cdef class AnswerCounts:
    """Counts the answers of an application to queries of these models. Threads: any.

    models: sorted.  counts: of each model, an object with a Counter `used`, `unused` and `wins`,
    a Mean `agreement` and StatusCounts `missing`.  pairs: a Mean by (model, model), the first of
    them before the second in `models`; it is not read for more than 16 models.  answered, duration:
    of answers that are no default, and of all.  defaults: of the others.  comparing: how many
    outputs may be compared.  clock: in seconds.
    """

    def __init__(self, tuple models not None, list counts not None, dict pairs not None,
                 Counter answered not None, DefaultCounts defaults not None,
                 LatencyHistogram duration not None, Bucket comparing not None, clock):
        cdef Py_ssize_t i, j, k = len(models)
        self.models = models
        self.used = [<Counter?> one.used for one in counts]
        self.unused = [<Counter?> one.unused for one in counts]
        self.wins = [<Counter?> one.wins for one in counts]
        self.agreement = [<Mean?> one.agreement for one in counts]
        self.missing = [<StatusCounts?> one.missing for one in counts]
        self.answered = answered
        self.defaults = defaults
        self.duration = duration
        self.comparing = comparing
        self.clock = None if clock is monotonic else clock
        if k > COMPARED_MAX:
            return
        self.pairs = [None] * (k * k)
        for i in range(k):
            for j in range(i + 1, k):
                self.pairs[i * k + j] = <Mean?> pairs[models[i], models[j]]

    cdef Py_ssize_t place(self, object model) except -1:
        """Return the place of a model. Raises KeyError if it has none."""
        cdef Py_ssize_t i
        for i in range(len(self.models)):
            if self.models[i] is model:
                return i
        if model not in self.models:
            raise KeyError(model)
        return self.models.index(model)

    @cython.binding(False)
    def add(self, u64 took_us, dict arrived not None, used, answer, bint is_default):
        """Count an answer. Return whether Python has to compare the outputs, for which the budget
        has been taken.

        took_us: its duration.  arrived: the predictions by model, objects with `output`.  used: the
        models that it is made of.  Raises KeyError for a model that is not among the models.
        """
        cdef PyObject* model
        cdef PyObject* prediction
        cdef Py_ssize_t at = 0
        cdef Py_ssize_t n = len(arrived)
        cdef tuple picked = used if type(used) is tuple else tuple(used)
        histogram_record(self.duration.h, took_us)
        if not is_default:
            count_held(self.answered, 1)
        for one in picked:
            count_held(<Counter> self.used[self.place(one)], 1)
        if len(picked) == 1 and not is_default:
            count_held(<Counter> self.wins[self.place(picked[0])], 1)
        if n > len(picked):
            while PyDict_Next(arrived, &at, &model, &prediction):
                if <object> model not in picked:
                    count_held(<Counter> self.unused[self.place(<object> model)], 1)
        if n < 2 or not self.comparing.take_tokens(
                self.now_s(), (ARRAY_PRICE if isinstance(answer, ndarray) else 1.0)
                * n * (n + 1) / 2):
            return False
        return not self.compare(arrived, answer)

    cdef double now_s(self) except? -1:
        cdef timespec now
        if self.clock is not None:
            return self.clock()
        clock_gettime(CLOCK_MONOTONIC, &now)
        return <double> now.tv_sec + 1e-9 * <double> now.tv_nsec

    cdef bint compare(self, dict arrived, object answer) except -1:
        """Compare each output with the answer, and with the others. Return False, and count
        nothing, if Python has to do it."""
        cdef ValueKey[COMPARED_MAX] keys
        cdef ValueKey right
        cdef u32[COMPARED_MAX] places
        cdef Py_ssize_t i, n = 0, k = len(self.models)
        # keys borrow their bytes
        cdef list outputs = []
        cdef PyObject* found
        if self.pairs is None or not key_of_output(answer, &right):
            return False
        for i in range(k):
            found = PyDict_GetItemWithError(arrived, self.models[i])
            if found == NULL:
                continue
            outputs.append(read_member(&OUTPUT, <object> found))
            if not key_of_output(outputs[n], &keys[n]):
                return False
            places[n] = <u32> i
            n += 1
        if n < len(arrived):
            return False
        self.compare_keys(<u32> n, places, keys, &right)
        return True

    cdef void compare_keys(self, u32 n, const u32* places, const ValueKey* keys,
                           const ValueKey* right) noexcept:
        cdef u32 i, j
        cdef Py_ssize_t k = len(self.models)
        for i in range(n):
            (<Mean> self.agreement[places[i]]).add_one(key_closeness(&keys[i], right), 1.0)
            for j in range(i + 1, n):
                (<Mean> self.pairs[places[i] * k + places[j]]).add_one(
                    key_closeness(&keys[i], &keys[j]), 1.0)

    cdef int add_answer(self, double now_s, u64 took_us, u32 n, const u32* places, u64 used,
                        bint is_default, const ValueKey* keys, const ValueKey* right) except -1:
        cdef u32 i
        histogram_record(self.duration.h, took_us)
        if not is_default:
            count_held(self.answered, 1)
        for i in range(n):
            if used >> i & 1:
                count_held(<Counter> self.used[places[i]], 1)
                if used == <u64> 1 << i and not is_default:
                    count_held(<Counter> self.wins[places[i]], 1)
            else:
                count_held(<Counter> self.unused[places[i]], 1)
        if n < 2:
            return 0
        return self._compare_within_budget(now_s, n, places, keys, right)

    cdef int _compare_within_budget(self, double now_s, u32 n, const u32* places,
                                    const ValueKey* keys, const ValueKey* right) except -1:
        """Compare the outputs if the budget allows it."""
        if self.clock is not None:
            now_s = self.now_s()
        if not self.comparing.take_tokens(now_s, <double> (n * (n + 1)) / 2.0):
            return 0
        if self.pairs is None:
            return 1
        self.compare_keys(n, places, keys, right)
        return 0


@cython.final
cdef class SideCounts:
    """Counts of the answers of one side of a rollout. Threads: any.

    limits_us: durations whose excess is counted.
    """

    def __init__(self, limits_us):
        self.answers = Counter()
        self.defaults = Counter()
        self.duration = LatencyHistogram()
        self.slower = {limit: Counter() for limit in sorted(set(limits_us))}
        self.limits = list(self.slower)
        self.beyond = list(self.slower.values())

    def add(self, u64 took_us, bint is_default):
        """Count an answer. took_us: its duration.  is_default: whether it is the default."""
        self.add_answer(took_us, is_default)

    cdef void add_answer(self, u64 took_us, bint is_default) noexcept:
        cdef u64 limit
        cdef Py_ssize_t i
        for i in range(len(self.limits)):
            limit = self.limits[i]
            if took_us > limit:
                count_held(<Counter> self.beyond[i], 1)
        count_held(self.defaults, is_default)
        histogram_record(self.duration.h, took_us)
        count_held(self.answers, 1)
