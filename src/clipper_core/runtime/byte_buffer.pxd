# Parts of connections: byte buffers (Bytes), message queues between threads (Post), and hash tables
# (Lookup). Declared from byte_buffer.hpp.
#
# Threads: Bytes and Lookup: one thread. Post: put may be called by any thread, take_all by one.
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport u64, u8

cdef extern from "runtime/byte_buffer.hpp" namespace "clipper" nogil:
    cdef cppclass Bytes:
        bint lost                       # memory ran out: some bytes that were put are missing
        u64 size() noexcept
        const u8* at() noexcept         # address of the first byte; valid until the next put
        u8* reserve(u64 n) noexcept     # address for n more bytes, which the caller then adds to
                                        # `end`; NULL: no memory
        u64 end
        u64 room
        void put(const void* data, u64 n) noexcept
        void put_byte(u8 byte) noexcept
        void put_text(const char* text) noexcept
        void put_decimal(u64 n) noexcept
        void put_hex(u64 n) noexcept
        void drop(u64 n) noexcept       # remove n bytes from the front
        void clear() noexcept
        void take(Bytes& other) noexcept
        void shrink(u64 most) noexcept
    cdef cppclass Post:
        int fd                          # an eventfd
        bint closed                     # the receiver has closed it
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
