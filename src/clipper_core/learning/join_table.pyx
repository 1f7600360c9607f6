"""Answers that feedback may still come for, by id."""
cimport cython
from collections import deque

from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from numpy import ndarray

cdef enum:
    ANSWER_BYTES = 1024         # what keeping an answer costs beside its outputs


cdef i64 _bytes_of(object output) except -1:
    if isinstance(output, ndarray):
        return output.nbytes
    return len(output) if isinstance(output, (str, bytes)) else 0


@cython.final
cdef class Joined:
    """An answered query that feedback may still come for.

    arrived: predictions by model.  late: futures of observers, and of nobody else.  until_s: on the
    table's clock.  has_feedback: whether its feedback has come.
    """

    def __init__(self, learner, str user, plan, arrived, answer, tuple late, double until_s,
                 bint has_feedback=False):
        self.learner, self.user, self.plan, self.arrived = learner, user, plan, arrived
        self.answer, self.late, self.until_s = answer, late, until_s
        self.has_feedback = has_feedback

    def claim(self):
        """Set `has_feedback`. -> whether it was not set before."""
        cdef bint before = self.has_feedback
        self.has_feedback = True
        return not before


@cython.final
cdef class JoinTable:
    """The last `size_max` answers, each for `window_s` seconds. Threads: any.

    bytes_max: of what is kept, estimated; beyond it the oldest are forgotten.  answer_type: objects
    of this type name an answer by their `id`.  clock: in seconds; None: the system's.
    """

    def __init__(self, i64 size_max, double window_s, i64 bytes_max, answer_type, clock=None):
        self.size_max, self.window_s, self.bytes_max = size_max, window_s, bytes_max
        self.answer_type, self.clock = answer_type, clock
        self.known, self.order = {}, deque()

    cdef double now_s(self) except -1:
        cdef timespec now
        if self.clock is not None:
            return self.clock()
        clock_gettime(CLOCK_MONOTONIC, &now)
        return <double> now.tv_sec + 1e-9 * <double> now.tv_nsec

    cdef Joined find(self, object id):
        cdef PyObject* at = PyDict_GetItem(self.known, id)
        return None if at == NULL else <Joined> <object> at

    def __len__(self):
        return len(self.known)

    def get(self, str id not None):
        """Return the answer of that id, or None if it is not here or its time is over."""
        cdef Joined joined = self.find(id)
        return None if joined is None or joined.until_s < self.now_s() else joined

    def items(self):
        """Return the ids and answers, oldest first."""
        return list(self.known.items())

    def add(self, str id not None, learner, str user, plan, arrived, answer, tuple late=()):
        """Remember an answer. -> what is remembered; it is another one if the id is known."""
        cdef double now = self.now_s()
        cdef Joined joined = Joined(learner, user, plan, arrived, answer, late, now + self.window_s)
        cdef Joined oldest
        joined.nbytes = ANSWER_BYTES + _bytes_of(answer)
        for prediction in arrived.values():
            joined.nbytes += _bytes_of(prediction.output)
        oldest = self.find(id)
        if oldest is not None:
            return oldest
        self.known[id] = joined
        self.order.append(id)
        self.nbytes += joined.nbytes
        while len(self.known):
            oldest = self.find(self.order[0])
            if (len(self.known) <= self.size_max and self.nbytes <= self.bytes_max
                    and oldest.until_s >= now):
                break
            self.nbytes -= oldest.nbytes
            del self.known[self.order.popleft()]
        return joined
