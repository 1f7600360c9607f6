# Results, from the task that ends to the code that waits for it. They are stored in blocks of
# consecutive slots; a slot holds one prediction and ends exactly once.
#
# A task is ended by one compare-and-swap of one byte, from PENDING to its status. The loop writes
# the value before it; other threads that end a slot (cancel) write no value. A block is recycled
# with its last reference. Each slot counts as two references from the start, one of its future and
# one of its task, so claiming a slot changes no counter.
#
# No thread that ends a slot takes the GIL. Blocked threads share one futex (`epoch`), incremented
# once per batch. Event loops and the callback thread have a mailbox each: a queue of slot ids and
# an eventfd that is written only while its reader sleeps. A thread that waits alone may run the
# loop itself (runtime/loop_owner.hpp).
#
# Each engine of a server has a CompletionState; `peers` lists the others. They share only futures
# over models of several engines: all slots of such a future are in the engine of its first model,
# its home. A peer's loop that ends one of them acts like a thread that cancels: once per step it
# updates the home's counters, increments the home's epoch and wakes its waiters, without the home's
# loop. The home's mailboxes then have several writers: a writer that finds another one at work sets
# the overflow flag instead.
from clipper_core.runtime.loop_owner cimport LoopOwner
from clipper_core.runtime.machine cimport atomic, u32, u64, u8
from clipper_core.runtime.ring cimport Spsc
from clipper_core.runtime.status cimport Status
from clipper_core.wire.prediction cimport Value

cdef enum:
    BLOCK_SLOTS = 256
    MAILBOXES_MAX = 31          # the last bit of a slot's boxes is IN_ENSEMBLE
    LED_TASKS_MAX = 4           # with more open tasks the loop thread runs the turns itself
    ENGINES_MAX = 64            # of one server
    ENGINE_ID_BITS = 56         # ids of the engines' slots differ above them

cdef cppclass Block:
    atomic[u32] refs
    u32 count                   # slots
    u32 used                    # slots handed out; under the completion's lock
    u32 home                    # number of its completion
    u64 first_id                # id of slot 0; ids are never used twice
    Block* next                 # free list
    atomic[u8]* state           # Status, per slot
    atomic[u32]* boxes          # mailboxes to notify, one bit each, per slot; IN_ENSEMBLE: there is
                                # an ensemble call
    # value, written before state leaves PENDING; before, the ensemble call
    u64* word
    u8* tag
    u32* latency_us             # submit to completion; 0 for a cache hit

cdef cppclass Mailbox:
    atomic[u32] armed           # the reader sleeps on fd
    atomic[u32] overflow        # a notification was dropped: the reader scans all slots
    Spsc* ids
    atomic[u32] writing         # with peers: a loop is writing to `ids`
    int fd
    bint taken

cdef cppclass CompletionState:
    atomic[u32] epoch           # incremented once per flush; the futex of blocked threads
    atomic[u32] waiters
    atomic[u32] lock            # guards current, free, next_id: a few instructions per claim
    atomic[u32] dead            # Status.CLOSED or FORKED: no task completes any more
    atomic[u64] issued          # tasks handed out, tasks ended: equal when nothing is in flight
    atomic[u64] answered        # ended at submit or by cancel
    atomic[u64] ended           # ended by the loop, the only writer
    atomic[u64] batches         # of notifications; loop only, as the two below
    atomic[u64] mailbox_writes  # eventfds written for them: at most one a mailbox and batch
    atomic[u64] futex_wakes     # system calls to wake blocked threads: at most one a batch
    Block* current
    Block* free
    u64 next_id
    Mailbox* boxes[31]
    u32 dirty                   # loop only: mailboxes written since the last flush
    bint touched                # loop only: something ended since the last flush
    u32 number                  # of its engine, among its peers
    bint has_peers              # there are peers
    CompletionState* peers[64]  # by number; each outlives the engine of this completion
    atomic[u64] tasks_of_peers  # tasks of peers' futures that are open in this engine
    u64 away                    # loop only: peers with mailboxes written since the last flush, one
                                # bit each
    u32 peers_dirty[64]         # loop only: those mailboxes
    atomic[u64] ensemble_calls  # ensemble calls created; `issued` counts their verdict slots too
    atomic[u64] ensemble_calls_freed
    # list of ensemble calls that the loop has to handle; written under the lock
    atomic[u64] calls
    bint calls_end              # under the lock: the loop handles no more of them
    # Function pointers, set by modules of higher layers (docs/architecture.md, "Up-calls").
    # Called when a task of an ensemble call has ended. first: its slot has just ended with
    # `status`.
    void (*task_ended)(CompletionState* d, void* ensemble_call, u32 slot, bint first, u8 status,
                       u32 latency_us) noexcept nogil
    LoopOwner loop_owner        # which thread runs the turns of the loop
    int wake_fd                 # eventfd that wakes the loop from epoll
    void* loop                  # the IO loop, an argument of the three calls below; NULL: none
    # Run one turn. Return True if the caller has to check for signals, or the loop has to stop.
    # epoch: read before the owner checked its slots; the turn sleeps only if it has not changed.
    bint (*run_turn)(void* loop, u64 until_us, u32 epoch) noexcept nogil
    # Give up the ownership of the loop. for_good: False if the caller only checks for signals and
    # takes it again.
    void (*leave_loop)(void* loop, bint for_good) noexcept nogil
    # Run one step, send what it made, and give up the ownership.
    void (*step_and_leave)(void* loop) noexcept nogil

# -- Functions that run concurrently without a lock (completion.hpp; tests/schedules checks them).
cdef extern from "results/completion.hpp" namespace "clipper" nogil:
    u32 IN_ENSEMBLE "clipper::kSlotInEnsemble"
    void block_hold(Block& block, u32 refs) noexcept
    bint block_release(Block& block, u32 refs) noexcept
    bint slot_try_end(Block& block, u32 slot, u8 status, const Value& value, u32 latency_us,
                      u32* boxes) noexcept
    bint slot_try_cancel(Block& block, u32 slot, u8 cancelled) noexcept
    void slot_answer(Block& block, u32 slot, u8 status, const Value& value) noexcept
    u8 slot_state(const Block& block, u32 slot) noexcept
    u32 slots_first_open(Block& block, atomic[u32]& cursor, u32 first, u32 count) noexcept
    void waiter_enters(CompletionState& d) noexcept
    u32 waiter_epoch(CompletionState& d) noexcept
    u32 waiter_dead(CompletionState& d) noexcept
    void waiter_leaves(CompletionState& d) noexcept
    u32 epoch_ends(CompletionState& d) noexcept
    u32 waiters_now(CompletionState& d) noexcept
    void completion_mark_dead(CompletionState& d, u32 status) noexcept
    bint slot_watch(Block& block, u32 slot, u32 box) noexcept
    u32 slot_boxes(const Block& block, u32 slot) noexcept
    void mailbox_overflow(Mailbox& box) noexcept
    void mailbox_put(Mailbox& box, Spsc& ids, u64 slot_id) noexcept
    void mailbox_put_beside(Mailbox& box, Spsc& ids, u64 slot_id) noexcept
    bint mailbox_to_wake(Mailbox& box) noexcept
    bint mailbox_arm(Mailbox& box, const Spsc& ids) noexcept
    bint mailbox_must_rescan(Mailbox& box) noexcept

# -- slots. Threads: any.
# False: no memory.
cdef bint slots_claim(CompletionState* d, u32 count, Block** block, u32* first) noexcept nogil
cdef void block_drop(CompletionState* d, Block* block, u32 refs) noexcept nogil
# Return an id for a query that needs no slot. Threads: any.
cdef u64 id_claim(CompletionState* d) noexcept nogil
cdef inline CompletionState* home_of(CompletionState* d, const Block* block) noexcept nogil:
    return d if block.home == d.number else d.peers[block.home]

# -- ending a task, a peer's too. Threads: loop only. Takes over the value's reference and the
# task's reference to the block.
#
# Return the status with which it ended: this one, or an earlier one.
cdef Status slot_end(CompletionState* d, Block* block, u32 slot, Status status, Value* value,
                     u32 latency_us) noexcept nogil
# Notify the mailboxes that watch a slot that has ended.
cdef void slot_notify(CompletionState* d, u64 slot_id, u32 boxes) noexcept nogil
# Notify the mailboxes that watch a slot of d or of a peer that has ended and was counted.
cdef void completion_notify(CompletionState* d, CompletionState* home, u64 slot_id,
                        u32 boxes) noexcept nogil
# Wake the waiters of all slots that have ended. Called once per step.
cdef void completion_flush(CompletionState* d) noexcept nogil
# Return the number of open tasks at this moment.
cdef u64 completion_open_tasks(CompletionState* d) noexcept nogil
# Wake all waiters: no task completes any more. Threads: any.
cdef void completion_close(CompletionState* d, int status) noexcept nogil

# -- waking the loop, whichever thread owns it. Threads: any.
# Wake the loop: rows or commands were published.
cdef void completion_notify_loop(CompletionState* d) noexcept nogil
# Wake an owner that sleeps, so that it checks its future.
cdef void completion_wake_owner(CompletionState* d) noexcept nogil
# Wake the loop thread, because the waiter cannot own the loop.
cdef void completion_wake_loop_thread(CompletionState* d) noexcept nogil
# Wake the loop on behalf of another engine's loop.
cdef void completion_wake_loop(CompletionState* d) noexcept nogil
# Notify waiters of a slot that another thread than the loop has ended and counted.
cdef void completion_notify_outside(CompletionState* d, u32 boxes) noexcept nogil
# True: the calling waiter owns the loop now; it calls run_turn(), then leave_loop().
cdef bint completion_try_own_loop(CompletionState* d) noexcept nogil

# -- Ending a slot at submit, before any thread can wait for it. d: the block's home. Threads: any.
cdef void slot_fill(CompletionState* d, Block* block, u32 slot, Status status,
                    Value* value) noexcept nogil

cdef class Completion:
    cdef CompletionState* state
    cdef public object on_await        # returns an asyncio.Future of the running event loop for a
                                       # Future; set by the asyncio interface
    cdef public object on_callback     # called with a Future and a function
