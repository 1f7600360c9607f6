# Allocation without exceptions, for memory whose size a peer determines. Declared from
# allocation.hpp.
#
# Threads: any; one at a time for the same vector.
from libcpp.deque cimport deque
from libcpp.vector cimport vector

cdef extern from "runtime/allocation.hpp" namespace "clipper" nogil:
    T* make[T]() noexcept       # NULL: no memory
    # Append an item. False: no memory, and nothing has changed.
    bint try_push[T](deque[T]& items, const T& one) noexcept
    # Reserve space, so that push_back up to n items cannot fail. False: no memory.
    bint make_room[T](vector[T]& items, size_t n) noexcept
