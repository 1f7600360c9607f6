"""Learned states: immutable blocks of numbers, and the cells that have the newest one."""
cimport cython
cimport numpy as cnp
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

import numpy as np

from clipper_core.runtime.machine cimport relaxed
from clipper_core.runtime.object_member cimport ObjectMember, read_member
from clipper_core.runtime.status cimport BAD_INPUT, raise_for

cnp.import_array()

cdef extern from "learning/finite.hpp" namespace "clipper" nogil:
    bint doubles_are_copied_finite(double* to, const double* source, size_t n) noexcept

cdef ObjectMember MODELS, TRACKED, DIFFERENCES      # of a state
MODELS.name = b"models"
TRACKED.name = b"tracked"
DIFFERENCES.name = b"differences"
cdef StateNumbers* SPARE = NULL     # a block of SPARE_BYTES that nobody has; the GIL guards it
cdef u64 SPARE_BYTES = 0


# -- blocks

@cython.final
cdef class StateBlock:
    """The numbers of a learned state as one immutable block of memory: an owner of it, made by
    `state_block`. Threads: any."""

    def __dealloc__(self):
        if self.numbers != NULL and state_release(self.numbers[0]):
            numbers_dropped(self.numbers)

    @property
    def seen(self):
        """Return the summed weight of the observations."""
        return _numbers(self).seen

    @property
    def labels(self):
        """Return the bit set of the labels seen."""
        return _numbers(self).labels

    @property
    def rows(self):
        """Return f64[rows, columns], read-only."""
        return block_rows(self)

    @property
    def sure(self):
        """Return f64[bins, 2], read-only."""
        return block_sure(self)


cdef StateBlock block_with(cnp.ndarray rows, cnp.ndarray sure, double seen, u64 labels):
    cdef StateBlock block = StateBlock.__new__(StateBlock)
    cdef StateNumbers* numbers = <StateNumbers*> malloc(
        sizeof(StateNumbers) + cnp.PyArray_NBYTES(rows) + cnp.PyArray_NBYTES(sure))
    if numbers == NULL:
        raise MemoryError()
    numbers.refs.store(1, relaxed)
    numbers.seen, numbers.labels = seen, labels
    numbers.rows, numbers.columns = <u32> rows.shape[0], <u32> rows.shape[1]
    numbers.bins = <u32> sure.shape[0]
    memcpy(state_rows(numbers), cnp.PyArray_DATA(rows), cnp.PyArray_NBYTES(rows))
    memcpy(state_sure(numbers), cnp.PyArray_DATA(sure), cnp.PyArray_NBYTES(sure))
    block.numbers = numbers
    return block


cdef StateBlock block_owned(StateNumbers* numbers):
    cdef StateBlock block = StateBlock.__new__(StateBlock)
    numbers.refs.fetch_add(1, relaxed)
    block.numbers = numbers
    return block


def state_block(rows, sure, double seen, u64 labels):
    """Return a block with copies of f64[rows, columns] and f64[bins, 2]."""
    cdef cnp.ndarray numbers = np.ascontiguousarray(rows, np.float64)
    cdef cnp.ndarray calibration = np.ascontiguousarray(sure, np.float64)
    if numbers.ndim != 2 or calibration.ndim != 2 or calibration.shape[1] != 2:
        raise_for(BAD_INPUT, "rows must be f64[rows, columns], and sure f64[bins, 2]")
    return block_with(numbers, calibration, seen, labels)


def block_of(array):
    """Return the block whose view an array is; None: it is of none."""
    return _block_of(array)


cdef StateBlock _block_of(object array):
    cdef object base
    if not isinstance(array, cnp.ndarray) or cnp.PyArray_BASE(array) == NULL:
        return None
    base = <object> cnp.PyArray_BASE(array)
    return base if type(base) is StateBlock else None


cdef cnp.ndarray block_rows(StateBlock block):
    cdef StateNumbers* numbers = _numbers(block)
    return _view(block, numbers.rows, numbers.columns, state_rows(numbers))


cdef cnp.ndarray block_sure(StateBlock block):
    cdef StateNumbers* numbers = _numbers(block)
    return _view(block, numbers.bins, 2, state_sure(numbers))


cdef StateNumbers* _numbers(StateBlock block) except NULL:
    if block.numbers == NULL:
        raise_for(BAD_INPUT, "a block is made by state_block()")
    return block.numbers


cdef cnp.ndarray _view(StateBlock block, cnp.npy_intp n, cnp.npy_intp m, double* at):
    cdef cnp.npy_intp[2] shape
    shape[0], shape[1] = n, m
    cdef cnp.ndarray view = cnp.PyArray_SimpleNewFromData(2, shape, cnp.NPY_DOUBLE, at)
    cnp.PyArray_CLEARFLAGS(view, cnp.NPY_ARRAY_WRITEABLE)
    # PyArray_SetBaseObject takes a reference over
    Py_INCREF(block)
    cnp.PyArray_SetBaseObject(view, block)
    return view


# -- copies that learn: the block that a learned one replaces is kept for the next copy

cdef inline u64 _bytes_of(const StateNumbers* block) noexcept nogil:
    cdef u64 doubles = <u64> block.rows * block.columns + 2 * <u64> block.bins
    return sizeof(StateNumbers) + doubles * sizeof(double)


cdef StateNumbers* numbers_copied(const StateNumbers* block, bint* is_finite) noexcept:
    global SPARE
    cdef u64 nbytes = _bytes_of(block)
    cdef StateNumbers* copy = SPARE
    if copy != NULL and SPARE_BYTES == nbytes:
        SPARE = NULL
    else:
        copy = <StateNumbers*> malloc(nbytes)
        if copy == NULL:
            return NULL
    copy.refs.store(0, relaxed)
    copy.labels, copy.seen = block.labels, block.seen
    copy.rows = block.rows
    copy.columns = block.columns
    copy.bins = block.bins
    is_finite[0] = doubles_are_copied_finite(state_rows(copy), <const double*> (block + 1),
                                             (nbytes - sizeof(StateNumbers)) // sizeof(double))
    return copy


cdef void numbers_dropped(StateNumbers* numbers) noexcept:
    global SPARE, SPARE_BYTES
    free(SPARE)
    SPARE, SPARE_BYTES = numbers, _bytes_of(numbers)


# -- cells

@cython.final
cdef class StateParts:
    """The part of a state that is no numbers. Immutable; threads: any, with the GIL."""


cdef inline StateNumbers* _at(u64 address) noexcept nogil:
    return <StateNumbers*> <void*> address


cdef inline void _replaced(u64 before) noexcept nogil:
    """Let the block go that a cell had in its word `before`."""
    cdef StateNumbers* block = _at(before & ADDRESS)
    if block != NULL and block_replaced(block[0], before):
        free(block)


@cython.final
cdef class Held:
    """The state of a context in memory, and the cell of its newest block. Threads: any, with the
    GIL; changed under the lock of the states.

    state: the newest one. After the core has learned it is made of the block when it is read, one
    object for each block.

    base: the state as the store has it, at this revision.  applied: by server, the number of the
    last of its observations that is in the state.  since: journal number of the first observation
    that the store lacks; 0: none.

    prior: the state that this one is a beginning of, until its first observation; None afterwards.
    origin: where `prior` comes from; None while that is to be searched again.  doubts: what was
    written without an answer, by the number of its last observation.  own: up to which of this
    server's observations are in `base`; none between that and `since` is in here, as when it began
    while the store did not answer.  is_late: whether it began while the store did not answer.
    touched: whether it was used since the hand of the clock was here.  is_listed: True only if it
    is among those that wait to be written.
    """

    def __init__(self, state, base, i64 revision, dict applied not None, *, u64 own=0):
        self.base = base
        self.revision = revision
        self.numbers = applied
        self.own = own
        self.touched = True
        self.doubts = {}
        self.publish(state)

    def __dealloc__(self):
        _replaced(cell_empty(self.word))

    @property
    def state(self):
        """Return the newest state."""
        return self.known if self.known is not None else self._made()

    @property
    def applied(self):
        """Return the numbers by server; a dict that may be changed under the lock."""
        if self.last:
            self.numbers[self.parts.node] = self.last
            self.last = 0
        return self.numbers

    @applied.setter
    def applied(self, dict numbers not None):
        self.numbers = numbers
        self.last = 0

    cpdef publish(self, object state):
        """Make a state the newest one. Threads that read the block of the one before keep it until
        they give it back."""
        cdef StateBlock block = _block_of(getattr(state, "rows", None))
        if block is None:
            _replaced(cell_empty(self.word))
        else:
            _replaced(cell_publish(self.word, block.numbers[0], <u64> block.numbers))
        self.known = state

    cdef StateNumbers* newest(self) noexcept:
        return _at(self.word.load(relaxed) & ADDRESS)

    cdef StateParts beside(self, object make, str node, StateParts like):
        cdef StateParts parts
        cdef object state = self.known
        if state is None:
            return self.parts
        models = read_member(&MODELS, state)
        tracked = read_member(&TRACKED, state)
        differences = read_member(&DIFFERENCES, state)
        for parts in (self.parts, like):
            if (parts is not None and parts.models is models and parts.tracked is tracked
                    and parts.differences is differences and parts.make is make):
                return parts
        parts = StateParts.__new__(StateParts)
        parts.make, parts.node = make, node
        parts.models = models
        parts.tracked = tracked
        parts.differences = differences
        return parts

    cdef void learned(self, StateNumbers* numbers, StateParts parts, u64 number) noexcept:
        # what these free may run Python, which then finds all of the new state
        cdef object _state = self.known
        cdef StateParts _parts = self.parts
        cdef u64 before = cell_publish(self.word, numbers[0], <u64> numbers)
        cdef StateNumbers* block = _at(before & ADDRESS)
        if block != NULL and block_replaced(block[0], before):
            numbers_dropped(block)
        self.known = None
        self.parts = parts
        self.last = number

    cdef u64 applied_to(self, str node) except? 0xFFFFFFFFFFFFFFFF:
        cdef PyObject* found
        if self.last:
            return self.last
        found = PyDict_GetItem(self.numbers, node)
        return 0 if found == NULL else <u64> <object> found

    cdef object _made(self):
        """Make the state of the newest block, unless Python has published one without a block."""
        cdef StateBlock block
        cdef StateParts parts
        cdef StateNumbers* numbers
        while self.known is None and self.newest() != NULL:
            parts = self.parts
            numbers = self.newest()
            # the cell has it: nobody frees it meanwhile
            block = block_owned(numbers)
            state = parts.make(parts.models, block_rows(block), numbers.seen, numbers.labels,
                               block_sure(block), parts.tracked, parts.differences)
            if self.known is None and self.newest() == numbers:
                self.known = state
        return self.known

    def copied(self):
        """Return copies of the newest block's (rows, sure), read as threads of the core do, without
        the GIL; None: there is no block."""
        cdef u64 address
        cdef StateNumbers* block
        cdef cnp.ndarray rows, sure
        cdef cnp.npy_intp[2] shape
        address = cell_hold(self.word)
        if address == 0:
            return None
        block = _at(address)
        try:
            shape[0], shape[1] = block.rows, block.columns
            rows = cnp.PyArray_SimpleNew(2, shape, cnp.NPY_DOUBLE)
            shape[0], shape[1] = block.bins, 2
            sure = cnp.PyArray_SimpleNew(2, shape, cnp.NPY_DOUBLE)
            with nogil:
                memcpy(cnp.PyArray_DATA(rows), state_rows(block), cnp.PyArray_NBYTES(rows))
                memcpy(cnp.PyArray_DATA(sure), state_sure(block), cnp.PyArray_NBYTES(sure))
        finally:
            if cell_give_back(self.word, block[0], address):
                free(block)
        return rows, sure
