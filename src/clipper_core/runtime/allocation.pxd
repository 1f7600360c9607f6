# Memory on paths that a peer can make grow: allocated without exceptions. Declared from
# allocation.hpp.
#
# Threads: any; a vector, one at a time.
from libcpp.deque cimport deque
from libcpp.vector cimport vector

cdef extern from "runtime/allocation.hpp" namespace "clipper" nogil:
    T* make[T]() noexcept       # NULL: no memory
    # False: no memory, and nothing has changed
    bint try_push[T](deque[T]& items, const T& one) noexcept
    # push_back up to n items cannot fail then; False: no memory
    bint make_room[T](vector[T]& items, size_t n) noexcept
