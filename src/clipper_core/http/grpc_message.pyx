"""Messages of gRPC. Where the frames of HTTP/2 end means nothing for them."""
cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize

from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.runtime.status cimport NO_MEMORY, raise_for


@cython.final
cdef class GrpcReader:
    """Reads the messages of one call, of at most `message_bytes_max` bytes each. After a larger
    one, or one whose first byte is neither 0 nor 1, it reads nothing more.

    Memory for a message is taken as its bytes come, and not by the length that it announces.
    """
    cdef Bytes input
    cdef u64 message_bytes_max
    cdef readonly bint is_too_large
    cdef readonly bint is_wrong

    def __cinit__(self, u64 message_bytes_max):
        self.message_bytes_max = message_bytes_max

    @property
    def held(self):
        """The bytes of a message that is not complete."""
        return self.input.size()

    def feed(self, bytes data):
        """Take bytes of the call. Return the messages that they complete: pairs (whether it is
        compressed, its bytes). Raises OutOfMemory."""
        cdef list found = []
        cdef const u8* at = <const u8*> (<const char*> data)
        cdef u64 n = <u64> len(data)
        cdef u64 used = 0, size
        cdef bint is_joined = self.input.size() != 0
        if is_joined:
            self.input.put(at, n)
            at = self.input.at()
            n = self.input.size()
        while n - used >= PREFIX_BYTES and not (self.is_wrong or self.is_too_large):
            size = _length(at + used)
            self.is_wrong = at[used] > 1
            self.is_too_large = size > self.message_bytes_max
            if self.is_wrong or self.is_too_large or n - used - PREFIX_BYTES < size:
                break
            found.append((at[used] == 1, PyBytes_FromStringAndSize(
                <const char*> at + used + PREFIX_BYTES, <Py_ssize_t> size)))
            used += PREFIX_BYTES + size
        if self.is_wrong or self.is_too_large:
            self.input.clear()
        elif is_joined:
            self.input.drop(used)
        else:
            self.input.put(at + used, n - used)
        if self.input.lost:
            raise_for(NO_MEMORY, "no memory for a message")
        return found


cdef u32 _length(const u8* at) noexcept nogil:
    return <u32> at[1] << 24 | <u32> at[2] << 16 | <u32> at[3] << 8 | at[4]
