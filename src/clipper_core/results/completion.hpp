// The steps on result slots, their blocks and the mailboxes that threads race on, as templates over
// the atomics of what they are given, so that a schedule-exploring checker runs this very source
// (tests/schedules).
//
// Never to miss each other, each side writes, then reads what the other wrote, all of it
// sequentially consistent:
//
// a blocked thread    waiters + 1, reads epoch, reads the slot; sleeps only if epoch is still what
// it read
//   whoever ends        the slot, epoch + 1, reads waiters
//   who waits for it    its bit into boxes, reads the slot
//   who ends            the slot, reads boxes
//   a mailbox's reader  armed, reads the ring and overflow; sleeps on its eventfd
//   its writer          the ring or overflow, takes armed; writes the eventfd if it was set
//
// Whichever comes first in the single order, the other sees it.
#pragma once
#include "runtime/machine.hpp"

namespace clipper {

constexpr std::uint8_t kSlotPending = 0;  // Status.PENDING
constexpr std::uint8_t kSlotNoValue = 0;  // TAG_NONE
constexpr std::uint32_t kSlotInEnsemble = 1u << 31;  // in the bits of mailboxes: ensemble call

// -- the allocator's lock: a few instructions per claim

template <class Word>
inline void claims_lock(Word& lock) {
    while (lock.exchange(1, std::memory_order_acquire) != 0) pause();
}
template <class Word>
inline void claims_unlock(Word& lock) {
    lock.store(0, std::memory_order_release);
}

// -- blocks

template <class Block>
inline void block_hold(Block& block, std::uint32_t refs) {  // of a block that nobody else has yet
    block.refs.store(refs, std::memory_order_relaxed);
}
// True for exactly one caller, the last: it retires the block, and sees whatever the others wrote
// there.
template <class Block>
inline bool block_release(Block& block, std::uint32_t refs) {
    return block.refs.fetch_sub(refs, std::memory_order_acq_rel) == refs;
}

// -- ending a slot

// By the loop, which alone writes values. False: cancelled before; nobody reads the value. `boxes`:
// the mailboxes to notify.
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
// By whoever holds the future.
template <class Block>
inline bool slot_try_cancel(Block& block, std::uint32_t slot, std::uint8_t cancelled) {
    std::uint8_t pending = kSlotPending;
    return block.state[slot].compare_exchange_strong(pending, cancelled, std::memory_order_seq_cst);
}
// At submit, before anyone can wait.
template <class Block, class Value>
inline void slot_answer(Block& block, std::uint32_t slot, std::uint8_t status, const Value& value) {
    block.word[slot] = value.word;
    block.tag[slot] = value.tag;
    block.state[slot].store(status, std::memory_order_release);
}

// -- looking at slots

template <class Block>
inline std::uint8_t slot_state(const Block& block, std::uint32_t slot) {
    return block.state[slot].load(std::memory_order_acquire);
}
// The first of a future's slots that is pending, from 0; count: none is. Several threads may look
// at once: each stores into `cursor` only what it has seen to be done itself.
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
inline std::uint32_t waiter_epoch(Completion& d) {  // before it looks at what it waits for
    return d.epoch.load(std::memory_order_seq_cst);
}
template <class Completion>
inline std::uint32_t waiter_dead(Completion& d) {  // after waiter_epoch, which carries it
    return d.dead.load(std::memory_order_relaxed);
}
template <class Completion>
inline void waiter_leaves(Completion& d) {
    d.waiters.fetch_sub(1, std::memory_order_relaxed);
}
// After something ended: how many may sleep and are to be woken; who leads (loop_owner.hpp) is
// counted, but awake.
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
// and then everybody is woken
inline void completion_mark_dead(Completion& d, std::uint32_t status) {
    d.dead.store(status, std::memory_order_relaxed);
    // order: acq_rel would do, whoever sleeps is woken, not only those who are counted
    d.epoch.fetch_add(1, std::memory_order_seq_cst);
}

// -- mailboxes

// Watches a slot, so that the mailbox gets its id when it ends; false: it has ended already.
template <class Block>
inline bool slot_watch(Block& block, std::uint32_t slot, std::uint32_t box) {
    block.boxes[slot].fetch_or(std::uint32_t(1) << box, std::memory_order_seq_cst);
    return block.state[slot].load(std::memory_order_seq_cst) == kSlotPending;
}
template <class Block>
// the mailboxes to notify, for one who cancelled it
inline std::uint32_t slot_boxes(const Block& block, std::uint32_t slot) {
    return block.boxes[slot].load(std::memory_order_seq_cst);
}
template <class Mailbox>
inline void mailbox_overflow(Mailbox& box) {  // a notice that has no place in the ring: look at
                                              // everything
    box.overflow.store(1, std::memory_order_seq_cst);
}
template <class Mailbox, class Ids>
// the loop only: the ring has one producer
inline void mailbox_put(Mailbox& box, Ids& ids, std::uint64_t slot_id) {
    if (!ids.push(slot_id)) mailbox_overflow(box);
}
// The same where several loops write one mailbox: the ring is for one of them at a time, and who
// finds another there does not wait.
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
inline bool mailbox_to_wake(Mailbox& box) {  // after the notices of a batch: true if its reader
                                             // sleeps
    return box.armed.exchange(0, std::memory_order_seq_cst);
}
template <class Mailbox, class Ids>
// Arms the mailbox, so that its reader is woken; true if something arrived in the meantime.
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
