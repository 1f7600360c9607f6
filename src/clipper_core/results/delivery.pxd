# Results, from the task that ends to whoever waits for it. They live in blocks of consecutive
# slots; a slot is the place of one prediction, and is seen done once only.
#
# Ending a task is one compare-and-swap PENDING -> status, on one byte. The loop writes the value
# before it; whoever else ends a slot (cancel) writes no value. A block is recycled by whoever drops
# its last reference: two a slot, its future's and its task's, all of them there from the start, so
# that handing a slot out touches no counter.
#
# Nobody who completes a slot takes the GIL. Blocked threads share one futex (epoch), bumped once
# per batch; event loops and the callback thread have a mailbox each: a ring of slot ids and one
# eventfd, written only while its reader is asleep. A thread that waits alone may be the loop itself
# (lead.hpp).
#
# Several engines of one server (`peers`) have a delivery each and share nothing but the futures
# over models of both: all slots of such a future lie in the delivery of its first model, its home.
# A peer's loop that ends one does what a thread that cancels does: it counts for the home, ends the
# home's epoch and wakes, once a step; the home's loop is not asked. The home's mailboxes then have
# several writers: whoever finds another at the ring leaves the notice that has no place in it.
from clipper_core.runtime.lead cimport Lead
from clipper_core.runtime.machine cimport atomic, u8, u32, u64
from clipper_core.runtime.ring cimport Spsc
from clipper_core.runtime.status cimport Status
from clipper_core.wire.prediction cimport Value

cdef enum:
    BLOCK_SLOTS = 256
    MAILBOXES_MAX = 31          # the last bit of a slot's boxes is HEARD
    LED_TASKS_MAX = 4           # with more of them open the loop thread runs the turns itself
    ENGINES_MAX = 64            # of one server
    ENGINE_ID_BITS = 56         # ids of the engines' slots differ above them

cdef cppclass Block:
    atomic[u32] refs
    u32 count                   # slots
    u32 used                    # slots handed out; under the delivery's lock
    u32 home                    # number of its delivery
    u64 first_id                # id of slot 0; ids are never used twice
    Block* next                 # free list
    atomic[u8]* state           # Status, per slot
    atomic[u32]* boxes          # mailboxes to tell, one bit each, per slot; HEARD: there is a
                                # hearing to tell
    u64* word                   # value, written before state leaves PENDING; until then its hearing
    u8* tag
    u32* latency_us             # submit to completion; 0 for a cache hit

cdef cppclass Mailbox:
    atomic[u32] armed           # the reader sleeps on fd
    atomic[u32] overflow        # a notice was lost: look at everything
    Spsc* ids
    atomic[u32] writing         # with peers: somebody is at `ids`
    int fd
    bint taken

cdef cppclass DeliveryState:
    atomic[u32] epoch           # bumped once per flush; the futex of blocked threads
    atomic[u32] waiters
    atomic[u32] lock            # guards current, free, next_id: a few instructions per claim
    atomic[u32] dead            # Status.CLOSED or FORKED: nothing will complete any more
    atomic[u64] issued          # tasks handed out, tasks ended: equal when nothing is in flight
    atomic[u64] answered        # at submit and by cancel
    atomic[u64] ended           # in the loop, its only writer
    atomic[u64] batches         # of news; loop only, as the two below
    atomic[u64] mailbox_writes  # eventfds written for them: at most one a mailbox and batch
    atomic[u64] futex_wakes     # system calls to wake blocked threads: at most one a batch
    Block* current
    Block* free
    u64 next_id
    Mailbox* boxes[31]
    u32 dirty                   # loop only: mailboxes with news since the last flush
    bint touched                # loop only: something ended since the last flush
    u32 number                  # of its engine, among its peers
    bint accompanied            # there are peers
    DeliveryState* peers[64]    # by number; each outlives the engine of this delivery
    atomic[u64] guests          # tasks of peers' futures that are open in this engine
    u64 away                    # loop only: peers with news of ours since the last flush, one bit
                                # each
    u32 away_dirty[64]          # loop only: their mailboxes with such news
    atomic[u64] hearings        # verdicts handed out, which `issued` counts too
    atomic[u64] hearings_freed
    atomic[u64] calls           # list of hearings that the loop is to look at; written under the
                                # lock
    bint calls_end              # under the lock: the loop will look at none any more
    void (*heard)(DeliveryState* d, void* hearing, u32 slot, bint first, u8 status,
                  u32 latency_us) noexcept nogil
    #           a task of a hearing is over; `first`: its slot has ended with `status` just now
    Lead lead                   # who is "the loop" now
    int wake_fd                 # wakes it from epoll
    void* mover                 # the IO loop, and what it does for who holds the baton; NULL
                                # without one
    # True: look for signals, or the loop is to stop
    bint (*turn)(void* mover, u64 until_us, u32 epoch) noexcept nogil
    # `epoch`: read before the leader looked at its slots; it sleeps only if that has not changed
    # not for good: to look for signals
    void (*leave)(void* mover, bint for_good) noexcept nogil
    void (*tend)(void* mover) noexcept nogil                        # step, send, leave

# -- the steps that threads race on: future.hpp, the source that tests/schedules checks
cdef extern from "results/future.hpp" namespace "clipper" nogil:
    u32 HEARD "clipper::kSlotHeard"
    void claims_lock(atomic[u32]& lock) noexcept
    void claims_unlock(atomic[u32]& lock) noexcept
    void block_hold(Block& block, u32 refs) noexcept
    bint block_let_go(Block& block, u32 refs) noexcept
    bint slot_try_end(Block& block, u32 slot, u8 status, const Value& value, u32 latency_us,
                      u32* boxes) noexcept
    bint slot_try_cancel(Block& block, u32 slot, u8 cancelled) noexcept
    void slot_answer(Block& block, u32 slot, u8 status, const Value& value) noexcept
    u8 slot_state(const Block& block, u32 slot) noexcept
    u32 slots_first_open(Block& block, atomic[u32]& cursor, u32 first, u32 count) noexcept
    void waiter_enters(DeliveryState& d) noexcept
    u32 waiter_epoch(DeliveryState& d) noexcept
    u32 waiter_dead(DeliveryState& d) noexcept
    void waiter_leaves(DeliveryState& d) noexcept
    u32 epoch_ends(DeliveryState& d) noexcept
    u32 waiters_now(DeliveryState& d) noexcept
    void delivery_dies(DeliveryState& d, u32 status) noexcept
    bint slot_ask(Block& block, u32 slot, u32 box) noexcept
    u32 slot_boxes(const Block& block, u32 slot) noexcept
    void mailbox_overflow(Mailbox& box) noexcept
    void mailbox_put(Mailbox& box, Spsc& ids, u64 slot_id) noexcept
    void mailbox_put_beside(Mailbox& box, Spsc& ids, u64 slot_id) noexcept
    bint mailbox_to_wake(Mailbox& box) noexcept
    bint mailbox_arm(Mailbox& box, const Spsc& ids) noexcept
    bint mailbox_look_at_all(Mailbox& box) noexcept

# -- slots. Threads: any.
# False: no memory
cdef bint slots_claim(DeliveryState* d, u32 count, Block** block, u32* first) noexcept nogil
cdef void block_drop(DeliveryState* d, Block* block, u32 refs) noexcept nogil
cdef inline DeliveryState* home_of(DeliveryState* d, const Block* block) noexcept nogil:
    return d if block.home == d.number else d.peers[block.home]

# -- ending a task, a peer's too. Threads: loop only. Takes over the value's reference and the
# task's reference to the block.
cdef Status slot_end(DeliveryState* d, Block* block, u32 slot, Status status, Value* value,
                     u32 latency_us) noexcept nogil
# ^ -> how it ended: this way, or as somebody else said before
# a slot has ended that these mailboxes watch
cdef void slot_notify(DeliveryState* d, u64 slot_id, u32 boxes) noexcept nogil
cdef void delivery_tell(DeliveryState* d, DeliveryState* home, u64 slot_id,
                        u32 boxes) noexcept nogil
# ^ a slot of d's or of a peer's has ended, and was counted
# once per step: wakes whoever waits for what ended
cdef void delivery_flush(DeliveryState* d) noexcept nogil
cdef u64 delivery_open(DeliveryState* d) noexcept nogil       # tasks that are open, of the moment
# nothing will complete any more. Threads: any
cdef void delivery_kill(DeliveryState* d, int status) noexcept nogil

# -- getting the loop's attention, by whoever is the loop now. Threads: any.
# rows or commands were published: they are taken in now
cdef void delivery_news(DeliveryState* d) noexcept nogil
# a leader that sleeps is to look at its future
cdef void delivery_rouse(DeliveryState* d) noexcept nogil
# somebody waits who cannot lead: the loop thread is needed
cdef void delivery_ring(DeliveryState* d) noexcept nogil
# news from another engine's loop: the loop itself is needed
cdef void delivery_call(DeliveryState* d) noexcept nogil
# a slot was ended without the loop, and counted
cdef void delivery_tell_outside(DeliveryState* d, u32 boxes) noexcept nogil
# a waiter: True: be the loop now, by turn(), then leave()
cdef bint delivery_lead(DeliveryState* d) noexcept nogil

# -- ending at submit, before anyone can wait; d: the block's home. Threads: any.
cdef void slot_fill(DeliveryState* d, Block* block, u32 slot, Status status,
                    Value* value) noexcept nogil

cdef class Delivery:
    cdef DeliveryState* state
    cdef public object on_await        # (Future) -> an asyncio.Future of the running event loop;
                                       # set by the asyncio face
    cdef public object on_callback     # (Future, fn) -> None
