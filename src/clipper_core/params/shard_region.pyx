"""See shard_region.hpp. What Python has of it is for tests: `SharedRegion`, `calm`."""
from libc.string cimport memcpy
from posix.unistd cimport dup

from clipper_core.runtime.machine cimport u64, u8
from clipper_core.runtime.status cimport BAD_INPUT, TOO_LARGE, raise_for

_WHY = {
    REGION_ABSENT: "no descriptor", REGION_UNSEALED: "no memory file whose size is sealed",
    REGION_UNMAPPED: "it cannot be mapped",
}


def calm(int fd):
    """What a shard does with a connection over TCP: calm_loopback."""
    calm_loopback(fd)


cdef class SharedRegion:
    """Threads: one. What a shard makes of a descriptor that came with a connection.

    fd: stays the caller's.  bytes_max: of the memory. Raises what raise_for makes of BAD_INPUT (no
    sealed memory) and TOO_LARGE.
    """
    cdef Region one

    def __cinit__(self, int fd, u64 bytes_max):
        cdef RegionFault fault
        self.one.take(dup(fd))
        fault = self.one.map(bytes_max)
        if fault == REGION_TOO_LARGE:
            raise_for(TOO_LARGE, f"shared memory of more than {bytes_max} bytes")
        elif fault != REGION_MAPPED:
            raise_for(BAD_INPUT, f"shared memory: {_WHY[fault]}")

    @property
    def nbytes(self):
        return self.one.bytes

    def write(self, u64 offset, const u8[::1] data not None):
        """False: not all of it lies inside, or it begins at no multiple of 64; nothing is written
        then."""
        cdef u8* to = self.one.at(offset, <u64> data.shape[0])
        if to == NULL:
            return False
        if data.shape[0]:
            memcpy(to, &data[0], data.shape[0])
        return True

    def lies_inside(self, u64 offset, u64 n):
        return self.one.at(offset, n) != NULL
