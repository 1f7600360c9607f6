# What a shard has changed since each of its followers last heard of it, and which pushes it has
# seen: shard_log.hpp.
#
# Threads: any, under `guard`.
from libcpp.deque cimport deque
from libcpp.vector cimport vector
from clipper_core.runtime.machine cimport i64, u32, u64

cdef extern from "<mutex>" namespace "std" nogil:
    cdef cppclass mutex:
        void lock() noexcept
        void unlock() noexcept

cdef extern from "params/shard_log.hpp" namespace "clipper" nogil:
    cdef enum Sighting:
        NEW_PUSH
        SEEN_PUSH
        OLD_PUSH
    cdef cppclass Sequences:
        u64 high
        Sighting look(u64 n) noexcept
        void mark(u64 n) noexcept
    cdef cppclass Change:
        u32 table
        u32 n
        u64 worker
        u64 sequence
    cdef cppclass Held:
        u64 position
        u32 conn
        u32 generation
        u64[10] words
    cdef cppclass Follower:
        bint on
        bint waited             # pushes are answered when it has them
        bint lost               # too far behind: it must begin anew
        u64 taken
        u64 acknowledged
        bint streams            # its connection is sent changes as they come; set by the loop
        bint ends               # that is to end
        bint replays            # it is sent pushes, and applies them; set by the loop
        bint apart              # it reads on a thread of its own
        u32 conn                # the connection
        u32 heard               # messages of it there
        u64 clock               # that its last message has; it is told it with what follows
        bint asks               # to be told, even if nothing has changed
    cdef cppclass ShardLog:
        mutex guard
        deque[Change] changes
        deque[i64] ids
        u64 first
        u64 ids_max
        u64 held_max
        u64 workers_max
        Follower[11] followers
        deque[Held] held
        int fd
        int wake_fd             # written at the next change if `asleep`
        bint asleep
        u64 position() noexcept
        bint waits() noexcept
        bint polled() noexcept      # a follower that is waited for asks, and is not sent changes
        Sighting look(u64 worker, u64 sequence) noexcept
        bint mark(u64 worker, u64 sequence) noexcept    # False: no memory
        Sequences* window(u64 worker) noexcept  # NULL: no memory
        u64 highest(u64 worker) noexcept        # sequence seen of it; 0: none
        bint known(vector[u64]& into) noexcept  # False: no memory
        bint append(u32 table, const i64* ids, u32 n, u64 worker, u64 sequence) noexcept
        # ^ False: no memory to tell this push from its repetition; without memory for the ids every
        # follower is lost
        # False: no memory
        bint gather(Follower& one, vector[vector[i64]]& ids, vector[u64]& told, u64 most) noexcept
        void trim() noexcept
        u64 sure() noexcept
