# What connections are made of: bytes that come and go, posts between threads, and tables. Declared
# from byte_buffer.hpp.
#
# Threads: Bytes and Lookup: one. Post: put any, take_all one.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport u64, u8

cdef extern from "runtime/byte_buffer.hpp" namespace "clipper" nogil:
    cdef cppclass Bytes:
        bint lost                       # memory ran out: something that was put is not there
        u64 size() noexcept
        const u8* at() noexcept         # the first of them; until the next put
        u8* reserve(u64 n) noexcept     # where n more can be written, then counted by `end`; NULL:
                                        # no memory
        u64 end
        u64 room
        void put(const void* data, u64 n) noexcept
        void put_byte(u8 byte) noexcept
        void put_text(const char* text) noexcept
        void put_decimal(u64 n) noexcept
        void put_hex(u64 n) noexcept
        void drop(u64 n) noexcept       # from the front
        void clear() noexcept
        void take(Bytes& other) noexcept
        void shrink(u64 most) noexcept
    cdef cppclass Post:
        int fd                          # an eventfd
        bint closed                     # nobody takes any more
        bint put(void* item) noexcept   # False: closed, or no memory
        void take_all(vector[void*]& into) noexcept
        bint append_to(vector[void*]& into) noexcept    # False: no memory, nothing was taken
        void close() noexcept
    cdef cppclass Lookup:
        bint put(u64 key, void* item) noexcept          # False: no memory
        void* take(u64 key) noexcept
        void* get(u64 key) noexcept
        u64 size() noexcept
        const vector[u64]* all() noexcept               # the keys, until the next call
