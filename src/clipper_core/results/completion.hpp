// Operations on result slots, blocks and mailboxes that run concurrently without a lock, as
// templates over the atomics of their arguments, so that the checker of schedules (tests/schedules)
// can run the same source.
//
// To miss no event, each side writes, then reads what the other side wrote, all of it sequentially
// consistent:
//
//   thread                         writes                 then reads
//   a thread that blocks           waiters + 1            epoch, slot; sleeps if epoch is the same
//   a thread that ends a slot      slot, epoch + 1        waiters
//   a thread that watches a slot   its bit in boxes       slot
//   a thread that ends a slot      slot                   boxes
//   the reader of a mailbox        armed                  ring, overflow; sleeps on its eventfd
//   a writer of a mailbox          ring or overflow       armed; signals the eventfd if it was set
//
// The side that comes second in the single order sees the other's write.
#pragma once
#include "runtime/machine.hpp"
#include "runtime/spin_lock.hpp"

namespace clipper {

constexpr std::uint8_t kSlotPending = 0;  // Status.PENDING
constexpr std::uint8_t kSlotNoValue = 0;  // TAG_NONE
constexpr std::uint32_t kSlotInEnsemble = 1u << 31;  // in the bits of mailboxes: ensemble call

// -- blocks

template <class Block>
inline void block_hold(Block& block, std::uint32_t refs) {  // of a block that no other thread has
                                                            // yet
    block.refs.store(refs, std::memory_order_relaxed);
}
// True for exactly one caller, the last, which then recycles the block and sees everything that the
// others wrote there.
template <class Block>
inline bool block_release(Block& block, std::uint32_t refs) {
    return block.refs.fetch_sub(refs, std::memory_order_acq_rel) == refs;
}

// -- ending a slot

// Called by the loop, which alone writes values. False: the slot was cancelled before, and the
// value is not read. boxes: set to the mailboxes to notify.
template <class Block, class Value>
inline bool slot_try_end(Block& block, std::uint32_t slot, std::uint8_t status, const Value& value,
                         std::uint32_t latency_us,
                         std::uint32_t* boxes) {
    std::uint8_t pending = kSlotPending;
    block.word[slot] = value.word;
    block.tag[slot] = value.tag;
    block.latency_us[slot] = latency_us;
    if (!block.state[slot].compare_exchange_strong(pending, status, std::memory_order_seq_cst)) {
        block.tag[slot] = kSlotNoValue;
        return false;
    }
    *boxes = block.boxes[slot].load(std::memory_order_seq_cst);
    return true;
}
// Called by a thread that has the future.
template <class Block>
inline bool slot_try_cancel(Block& block, std::uint32_t slot, std::uint8_t cancelled) {
    std::uint8_t pending = kSlotPending;
    return block.state[slot].compare_exchange_strong(pending, cancelled, std::memory_order_seq_cst);
}
// Called at submit, before any thread can wait.
template <class Block, class Value>
inline void slot_answer(Block& block, std::uint32_t slot, std::uint8_t status, const Value& value) {
    block.word[slot] = value.word;
    block.tag[slot] = value.tag;
    block.state[slot].store(status, std::memory_order_release);
}

// -- reading slots

template <class Block>
inline std::uint8_t slot_state(const Block& block, std::uint32_t slot) {
    return block.state[slot].load(std::memory_order_acquire);
}
// Return the index of the first pending slot of a future; `count` if none is. Several threads may
// call it at once: each stores into `cursor` only what it has found to be done itself.
template <class Block, class Word>
inline std::uint32_t slots_first_open(Block& block, Word& cursor, std::uint32_t first,
                                      std::uint32_t count) {
    std::uint32_t i = cursor.load(std::memory_order_acquire);
    // order: acquire would do, a blocked thread that reads the epoch before sees by it what ended
    // before
    while (i < count && block.state[first + i].load(std::memory_order_seq_cst) != kSlotPending) ++i;
    cursor.store(i, std::memory_order_release);
    return i;
}

// -- blocked threads, on the futex of `epoch`

template <class Completion>
inline void waiter_enters(Completion& d) {
    d.waiters.fetch_add(1, std::memory_order_seq_cst);
}
template <class Completion>
inline std::uint32_t waiter_epoch(Completion& d) {  // read before checking the slot
    return d.epoch.load(std::memory_order_seq_cst);
}
template <class Completion>
inline std::uint32_t waiter_dead(Completion& d) {  // read after waiter_epoch, which orders it
    return d.dead.load(std::memory_order_relaxed);
}
template <class Completion>
inline void waiter_leaves(Completion& d) {
    d.waiters.fetch_sub(1, std::memory_order_relaxed);
}
// Return, after a slot ended, how many waiters may sleep and have to be woken. The owner of the
// loop (loop_owner.hpp) is counted, but is awake.
template <class Completion>
inline std::uint32_t epoch_ends(Completion& d) {
    d.epoch.fetch_add(1, std::memory_order_seq_cst);
    return d.waiters.load(std::memory_order_seq_cst);
}
template <class Completion>
inline std::uint32_t waiters_now(Completion& d) {
    return d.waiters.load(std::memory_order_seq_cst);
}
template <class Completion>
// the caller then wakes all waiters
inline void completion_mark_dead(Completion& d, std::uint32_t status) {
    d.dead.store(status, std::memory_order_relaxed);
    // order: acq_rel would do, whoever sleeps is woken, not only those who are counted
    d.epoch.fetch_add(1, std::memory_order_seq_cst);
}

// -- mailboxes

// Watch a slot, so that the mailbox gets its id when it ends. False: it has ended already.
template <class Block>
inline bool slot_watch(Block& block, std::uint32_t slot, std::uint32_t box) {
    block.boxes[slot].fetch_or(std::uint32_t(1) << box, std::memory_order_seq_cst);
    return block.state[slot].load(std::memory_order_seq_cst) == kSlotPending;
}
template <class Block>
// the mailboxes to notify, for a thread that has cancelled the slot
inline std::uint32_t slot_boxes(const Block& block, std::uint32_t slot) {
    return block.boxes[slot].load(std::memory_order_seq_cst);
}
template <class Mailbox>
inline void mailbox_overflow(Mailbox& box) {  // the ring is full: the reader has to scan all slots
    box.overflow.store(1, std::memory_order_seq_cst);
}
template <class Mailbox, class Ids>
// called by the loop only: the ring has one producer
inline void mailbox_put(Mailbox& box, Ids& ids, std::uint64_t slot_id) {
    if (!ids.push(slot_id)) mailbox_overflow(box);
}
// As mailbox_put, where several loops write to one mailbox: one of them may write to the ring at a
// time; another one sets the overflow flag and does not wait.
template <class Mailbox, class Ids>
inline void mailbox_put_beside(Mailbox& box, Ids& ids, std::uint64_t slot_id) {
    if (box.writing.exchange(1, std::memory_order_acquire) == 0) {
        mailbox_put(box, ids, slot_id);
        box.writing.store(0, std::memory_order_release);
    } else {
        mailbox_overflow(box);
    }
}
template <class Mailbox>
inline bool mailbox_to_wake(Mailbox& box) {  // called after the notifications of a batch: true if
                                             // the reader sleeps
    return box.armed.exchange(0, std::memory_order_seq_cst);
}
template <class Mailbox, class Ids>
// Arm the mailbox, so that its reader is woken. True: something arrived in the meantime.
inline bool mailbox_arm(Mailbox& box, const Ids& ids) {
    box.armed.store(1, std::memory_order_seq_cst);
    return ids.tail_moved() || box.overflow.load(std::memory_order_seq_cst);
}
template <class Mailbox>
inline bool mailbox_must_rescan(Mailbox& box) {
    // order: relaxed would do, mailbox_arm() looks again before the reader sleeps, and slot_watch()
    // at the slot
    return box.overflow.exchange(0, std::memory_order_seq_cst);
}

}  // namespace clipper
