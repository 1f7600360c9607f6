# Memory that a worker shares with a shard, to have the rows it pulls written there:
# shard_region.hpp says why.
#
# Threads: the loop's.
from clipper_core.runtime.machine cimport u64, u8

cdef extern from "params/shard_region.hpp" namespace "clipper" nogil:
    cdef enum RegionFault:
        REGION_MAPPED
        REGION_ABSENT           # no descriptor came
        REGION_UNSEALED         # no memory file of ordinary pages whose size is sealed
        REGION_TOO_LARGE
        REGION_UNMAPPED
    cdef cppclass Region:
        u8* memory
        u64 bytes
        int descriptor
        void take(int fd) noexcept
        RegionFault map(u64 most) noexcept
        void unmap() noexcept
        void drop() noexcept
        u8* at(u64 offset, u64 n) noexcept      # NULL: not all of it lies inside, or not at the
                                                # start of a line of 64 bytes
    bint is_local(int fd) noexcept
    void calm_loopback(int fd) noexcept     # no congestion control between two ends of one host
    ssize_t receive_with(int fd, void* to, size_t n, Region& region) noexcept
