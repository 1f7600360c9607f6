# The hearing of one query on several models: what has arrived of its tasks, and who is told when
# its decider has an answer.
#
# A future with a hearing is gated: behind its n task slots lies one more, the verdict slot, and the
# future is done when that has ended. The verdict is a snapshot: which tasks had arrived, which of
# them are used. A task's slot says by one bit of its `boxes` that it is heard, and holds the
# hearing where its value will be, so nothing is asked of slots that are not.
#
# Threads: any, under a spin lock that is held for the time of one decision. Whoever ends a task's
# slot brings the news and, if that decides, ends the verdict slot itself: a peer's loop, the
# home's, the submitter. Only the home's loop sets times and asks more models (asking.pxd); others
# call it.
#
# A hearing is held by its future, by each task that is on its way, by its submitter, by a timer, by
# the list of those called; whoever lets go last frees it.
from libcpp.vector cimport vector
from clipper_core.results.decider cimport DeciderState, RulingData, VoteData
from clipper_core.results.delivery cimport Block, DeliveryState
from clipper_core.runtime.machine cimport atomic, u8, u32, u64
from clipper_core.runtime.status cimport Status

cdef cppclass Hearing:
    atomic[u32] lock            # guards all that changes below
    atomic[u32] refs
    atomic[u32] asking          # the home's loop is at one of its models
    DeliveryState* home
    Block* block
    u32 first                   # slot of task 0; the verdict's is first + n
    u32 n
    DeciderState* decider
    u64 received_us
    u64 slo_us
    u64 elapsed_us              # since receipt, when it last heard something
    u64 timer_us                # a timer is set for then; 0: none
    u64 sent                    # TIED: tasks whose rows have left
    bint learn                  # tasks on their way go on after the verdict
    bint over                   # the verdict has fallen, or nobody wants it
    bint called                 # on the home's list
    u8 arrivals
    u8 step                     # the verdict
    u64 used
    u64 arrived
    Hearing* next_called
    VoteData* votes
    atomic[u64]** unneeded      # counters of tasks that were never asked, one a task
    void* asks                  # Ask[n] (asking.pxd)
    void* models                # its future's: a tuple that keeps them alive

cdef u64 NO_TICKET             # of no timer

cdef cppclass Timers:           # of the home's loop: hearings that wait for a time. Loop only
    vector[Hearing*]* hearings  # by index; NULL: free
    vector[u32]* uses           # of an index: an old ticket names nothing
    vector[u32]* unused

cdef inline u64 task_bit(u32 i) noexcept nogil:
    return <u64> 1 << i

# -- making one. The submitter alone has it, until it submits a task of it.
cdef Hearing* hearing_new(DeliveryState* home, Block* block, u32 first, u32 n,
                          DeciderState* decider, u64 now_us, u64 slo_us,
                          bint learn, u64 more_bytes) noexcept nogil    # NULL: no memory. `more_bytes` for `asks` and rows
# a task has ended; with the lock, or alone
cdef void hearing_note(Hearing* h, u32 i, Status status) noexcept nogil
cdef RulingData hearing_decide(Hearing* h) noexcept nogil               # the same
# the same
cdef void hearing_rule(Hearing* h, DeliveryState* by, u32 step, u64 used) noexcept nogil
# ^ by: whose loop says so; NULL: no loop
# before its row is published
cdef void hearing_submits(Hearing* h, u32 i) noexcept nogil
# it was not published after all; with the lock
cdef void hearing_refused(Hearing* h, u32 i, Status status) noexcept nogil
cdef void hearing_lock(Hearing* h) noexcept nogil
cdef void hearing_unlock(Hearing* h) noexcept nogil
cdef void hearing_let_go(Hearing* h) noexcept nogil
# all that starts at once is; the submitter lets go
cdef void hearing_submitted(Hearing* h) noexcept nogil

# -- what happens to it. Threads: any.
cdef void hearing_heard(DeliveryState* d, void* hearing, u32 slot, bint first, u8 status,
                        u32 latency_us) noexcept nogil
cdef void hearing_sent(Hearing* h, u32 slot) noexcept nogil             # a task's row leaves
cdef u32 hearing_cancel(Hearing* h) noexcept nogil                      # -> slots that it ended
cdef void hearing_drop(Hearing* h) noexcept nogil                       # its future is gone
# from Python: 1; 0: too late; -1: used
cdef int hearing_ruled(Hearing* h, u32 step, u64 used, u64 elapsed_us) noexcept nogil
#                                                                         has not arrived
# the home's loop is to look at it
cdef void hearing_call(Hearing* h, bint submitter) noexcept nogil
# nothing more will come: with what there is
cdef void hearing_close(Hearing* h) noexcept nogil

# -- the home's loop
# a list; for good: none is called any more
cdef Hearing* hearings_called(DeliveryState* d, bint for_good) noexcept nogil
cdef Timers* timers_new() noexcept nogil
cdef void timers_free(Timers* t) noexcept nogil
# -> its ticket, below 2^48; NO_TICKET: no memory
cdef u64 timers_add(Timers* t, Hearing* h) noexcept nogil
cdef bint timers_has(Timers* t, u64 ticket) noexcept nogil              # False: forget the ticket
cdef Hearing* timers_take(Timers* t, u64 ticket) noexcept nogil         # NULL: gone
