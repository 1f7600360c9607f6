# The part that the loops of containers, of HTTP and of shards share: an epoll, with a tag for each
# descriptor, and functions that accept and close connections. Declared from reactor.hpp.
#
# Threads: watch any; listen one at a time; the rest the loop's.
from clipper_core.runtime.machine cimport u32, u64

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        u64 u64
    cdef struct epoll_event:
        u32 events
        epoll_data_t data
    u32 EPOLLIN
    u32 EPOLLOUT
    u32 EPOLLHUP
    u32 EPOLLERR

cdef extern from "runtime/reactor.hpp" namespace "clipper" nogil:
    cdef enum TagKind:
        CONNECTION_TAG "clipper::kConnection"
        LISTENER_TAG "clipper::kListener"
        WAKE_UP_TAG "clipper::kWakeUp"
        RELAY_TAG "clipper::kRelay"
    u64 tag_of(TagKind kind, u32 number) noexcept
    # generation: counts the connections with this number, or all; 30 bits of it
    u64 connection_tag(u32 number, u32 generation) noexcept
    u64 relay_tag(u32 number, u32 generation) noexcept
    TagKind tag_kind(u64 tag) noexcept
    u32 tag_number(u64 tag) noexcept            # of a listener: its descriptor
    cdef cppclass Reactor:
        epoll_event[256] events                 # those of the last wait()
        bint open() noexcept                    # False: no descriptor is free
        bint watch(int fd, u32 events, u64 tag) noexcept
        void change(int fd, u32 events, u64 tag) noexcept
        void unwatch(int fd) noexcept
        void close(int fd) noexcept             # unwatches it first
        bint listen(int fd) noexcept            # makes it non-blocking. False: it is no socket
        void close_listeners() noexcept
        int wait(u64 timeout_us) noexcept       # number of events; -1 after a signal
        int accept(u32 listener) noexcept       # -1: none waits
    int REJECTED "clipper::Reactor::kRejected"  # by accept(): no descriptor was free
