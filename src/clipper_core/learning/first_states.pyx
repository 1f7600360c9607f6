"""The state that all users without an observation read."""
cimport cython

from clipper_core.learning.bandit cimport MIXTURE, rows_limited
from clipper_core.learning.mixture cimport (
    RowShape, mixture_for_user, mixture_has_shape, mixture_limited,
)
from clipper_core.learning.policy_states cimport (
    block_owned, block_rows, block_sure, numbers_copied, state_rows,
)
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

cdef enum:
    COLUMNS_MAX = 16

cdef ObjectMember PRIOR_COUNTS                  # of the differences between users
PRIOR_COUNTS.name = b"prior_counts"


@cython.final
cdef class FirstState:
    """A state that users without an observation read. Threads: any; it never changes."""

    @property
    def state(self):
        """Return the state; it is made of the block when it is first read."""
        return self.made_state()

    cdef StateNumbers* numbers(self) noexcept:
        if self.block is None:
            return NULL
        return self.block.numbers

    cdef object made_state(self):
        cdef StateNumbers* numbers = self.numbers()
        if self.made is None:
            self.made = self.parts.make(self.models, block_rows(self.block), numbers.seen,
                                        numbers.labels, block_sure(self.block), self.parts.tracked)
        return self.made


@cython.final
cdef class FirstStates:
    """Makes the state of users without an observation, for one policy. Threads: any.

    models: of the policy.  init: its `init(models, shared state)`.  make: makes a state of (models,
    rows, seen, labels, sure, tracked).  rule: by which the core can do the same as `init`; None: it
    cannot.  columns, least: of its rows, those that count observations, at most 16, and the
    smallest value of such a count; a mixture knows its own.
    """

    def __init__(self, tuple models not None, init, make, Rule rule=None, columns=(),
                 double least=0.0):
        cdef u32 i
        if rule is None and len(columns):
            raise_for(BAD_INPUT, "columns are of a rule's rows")
        if len(columns) > COLUMNS_MAX:
            raise_for(BAD_INPUT, f"{len(columns)} columns count: at most {COLUMNS_MAX}")
        self.models = models
        self.init = init
        self.make = make
        self.rule = rule
        self.counts, self.least = <u32> len(columns), least
        for i in range(self.counts):
            self.columns[i] = columns[i]
            if self.columns[i] >= rule.state.columns:
                raise_for(BAD_INPUT, f"a row has {rule.state.columns} columns")

    def of(self, Held shared not None):
        """Return the state that begins from the shared one as it is now."""
        return self.newest(shared)

    cdef FirstState newest(self, Held shared):
        cdef StateNumbers* numbers = shared.newest()
        cdef StateParts parts
        cdef StateBlock source
        cdef FirstState first
        cdef object state
        if numbers == NULL:
            state = shared.state
            if self.last is None or self.source is not None or state is not self.state:
                self.last = self._by_policy(state)
                self.source = None
                self.state = state
            return self.last
        parts = shared.beside(self.make, "", self.parts)
        if (self.last is None or self.source is None or numbers != self.source.numbers
                or parts is not self.parts):
            # nobody else has its address while this is kept
            source = block_owned(numbers)
            # the next one takes over its memory
            self.last = None
            first = self._of_block(shared, source, parts)
            self.last = first
            self.source = source
            self.parts = parts
            self.state = None
            return first
        return self.last

    cdef FirstState _by_policy(self, object shared):
        """Return what the policy makes of a shared state."""
        cdef FirstState first = FirstState.__new__(FirstState)
        first.models = self.models
        first.made = self.init(self.models, shared)
        return first

    cdef FirstState _of_block(self, Held shared, StateBlock source, StateParts parts):
        """Return what begins from a block of the shared state, which is the newest one."""
        cdef FirstState first
        cdef StateNumbers* numbers
        cdef object counts
        cdef bint _is_finite = False
        if (self.rule is None or not self._fits(source.numbers)
                or (parts.models is not self.models and parts.models != self.models)):
            return self._by_policy(shared.state)
        counts = read_member(&PRIOR_COUNTS, parts.differences)
        numbers = numbers_copied(source.numbers, &_is_finite)
        if numbers == NULL:
            raise MemoryError()
        self._begin(numbers, counts)
        first = FirstState.__new__(FirstState)
        first.models = self.models
        first.parts = parts
        first.block = block_owned(numbers)
        return first

    cdef bint _fits(self, const StateNumbers* numbers) noexcept:
        """Return whether a block has rows of the rule."""
        cdef u32 k = <u32> len(self.models)
        cdef RowShape shape
        if self.rule.state.kind == MIXTURE:
            return numbers.rows == k + 1 and k > 0 and mixture_has_shape(
                state_rows(<StateNumbers*> numbers), numbers.rows, numbers.columns, &shape)
        return numbers.rows == k and numbers.columns == self.rule.state.columns

    cdef void _begin(self, StateNumbers* numbers, double counts) noexcept:
        """Make a copy of the shared state's block one of a user who begins with so many
        observations."""
        cdef double* rows = state_rows(numbers)
        numbers.seen = 0.0
        if self.rule.state.kind == MIXTURE:
            mixture_limited(rows, numbers.rows - 1, numbers.columns, counts)
            mixture_for_user(rows, numbers.rows - 1, numbers.columns)
        else:
            rows_limited(rows, numbers.rows, numbers.columns, self.columns, self.counts,
                         self.least, counts)
