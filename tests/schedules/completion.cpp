// completion.hpp: slots, blocks and blocked threads. (mailbox.cpp has the mailboxes.)
#include "results/completion.hpp"

#include "block.hpp"
#include "runtime/ring.hpp"

namespace schedules {
namespace {

// The loop ends a slot, a caller cancels it, a third looks: one of the two wins, and a value that is seen is whole.
struct Ending : Scenario {
    bool cancels;
    Block block{2};
    Atomic<uint32_t> cursor;
    bool ended = false, cancelled = false;
    explicit Ending(bool c) : cancels(c) { name(cursor, "cursor"); }
    int threads() const override { return 3; }
    void look() {
        uint8_t state = clipper::slot_state(block, 0);
        if (state == kOk) block.read(0);
        if (state != kCancelled && state != clipper::kSlotPending) EXPECT(block.latency_us[0] == 7, "the latency");
    }
    void run(int t) override {
        uint32_t boxes;
        if (t == 1) ended = clipper::slot_try_end(block, 0, kOk, value_of(0), 7, &boxes);
        else if (t == 2 && cancels) cancelled = clipper::slot_try_cancel(block, 0, kCancelled);
        else look();
    }
    void finish() override {
        EXPECT(ended != cancelled, "exactly one ends a slot");
        EXPECT(clipper::slot_state(block, 0) == (ended ? kOk : kCancelled), "the slot says who ended it");
        EXPECT(block.tag[0] == (ended ? value_of(0).tag : clipper::kSlotNoValue), "a value of a cancelled slot stays behind");
    }
};
SCENARIO(Ending, "completion", slot_end_or_cancel, "the loop and a cancel end one slot while another thread looks", true);
SCENARIO(Ending, "completion", slot_two_look, "the loop ends a slot while two threads look", false);

// Two threads look at a future of two slots, by its cursor, while the loop ends both: whoever finds it done reads whole values,
// also of a slot that only the other has looked at.
struct Cursor : Scenario {
    Block block{2};
    Atomic<uint32_t> cursor;
    Cursor() { name(cursor, "cursor"); }
    int threads() const override { return 3; }
    void run(int t) override {
        uint32_t boxes;
        if (t == 1) {
            for (uint32_t i = 0; i < 2; ++i)
                EXPECT(clipper::slot_try_end(block, i, kOk, value_of(i), 7, &boxes), "nobody else ends it");
            return;
        }
        uint32_t open = clipper::slots_first_open(block, cursor, 0, 2);
        for (uint32_t i = 0; i < open; ++i) block.read(i);
    }
};
SCENARIO(Cursor, "completion", slots_cursor, "two threads share the cursor of a future of two slots");

// A slot that is answered at submit, seen by another thread.
struct Answered : Scenario {
    Block block{2};
    int threads() const override { return 2; }
    void run(int t) override {
        if (t == 1) clipper::slot_answer(block, 0, kOk, value_of(0));
        else if (clipper::slot_state(block, 0) == kOk) block.read(0);
    }
};
SCENARIO(Answered, "completion", slot_answered, "a slot answered at submit is looked at by another thread");

// References: the last to let go retires the block, once, and nobody touches it afterwards.
struct Retire : Scenario {
    int holders;
    bool twice;  // planted: one lets go twice
    Block block{2};
    int retired = 0;
    Retire(int n, bool t) : holders(n), twice(t) { clipper::block_hold(block, uint32_t(n)); }
    int threads() const override { return holders; }
    void run(int t) override {
        if (t == 1) block.word[0] = 5;  // the loop's last word to it
        else if (t == 2) block.tag[1] = 5;
        for (int times = twice && t == 1 ? 2 : 1; times; --times) {
            if (!clipper::block_release(block, 1)) continue;
            ++retired;
            block.word[0] = 0, block.tag[1] = 0;
        }
    }
    void finish() override { EXPECT(retired == 1, "a block is retired exactly once"); }
};
SCENARIO(Retire, "completion", block_two_holders, "two let go of a block", 2, false);
SCENARIO(Retire, "completion", block_three_holders, "three let go of a block", 3, false);
BROKEN(Retire, "completion", planted_let_go_twice, "a holder lets go of a block twice", 2, true);

// A task and its future, as the loop and the future's owner leave them: each lets go once it has done with the slot.
struct Life : Scenario {
    bool cancels;
    Block block{2};
    int retired = 0;
    explicit Life(bool c) : cancels(c) { clipper::block_hold(block, 3); }
    int threads() const override { return 3; }
    void run(int t) override {
        uint32_t boxes;
        if (t == 1) clipper::slot_try_end(block, 0, kOk, value_of(0), 7, &boxes);
        if (t == 2 && cancels) clipper::slot_try_cancel(block, 0, kCancelled);
        if (t == 2 && clipper::slot_state(block, 0) == kOk) {
            block.read(0);
            block.tag[0] = clipper::kSlotNoValue;  // the future has dropped the value
        }
        if (!clipper::block_release(block, 1)) return;  // the third is the allocator
        ++retired;
        block.word[0] = 0, block.tag[0] = 0, block.latency_us[0] = 0;
    }
    void finish() override { EXPECT(retired == 1, "a block is retired exactly once"); }
};
SCENARIO(Life, "completion", block_task_and_future, "a task ends while its future is dropped", false);
SCENARIO(Life, "completion", block_cancelled, "a task ends while its future is cancelled and dropped", true);

// Blocked threads: the order of the steps is future.pyx's (_wait, completion_flush, cancel, completion_close). A lost wake-up is a
// thread that sleeps for ever.
struct Blocked : Scenario {
    enum By { end, cancel, kill, both, kill_and_end };
    By by;
    int waiters_count;
    bool looks_first;  // planted: looks at the slot before it counts itself
    Block block{2};
    Completion d;
    Atomic<uint32_t> cursor[3];
    Blocked(By b, int n, bool l) : by(b), waiters_count(n), looks_first(l) {}
    int threads() const override { return waiters_count + (by >= both ? 2 : 1); }
    bool done(int t) { return clipper::slots_first_open(block, cursor[t], 0, 1) == 1; }
    void wait(int t) {
        uint32_t early = looks_first ? clipper::waiter_epoch(d) : 0;
        if (looks_first && done(t)) return;
        clipper::waiter_enters(d);
        for (;;) {
            uint32_t epoch = looks_first ? early : clipper::waiter_epoch(d);
            if (!looks_first && (done(t) || clipper::waiter_dead(d))) break;
            d.futex.wait(d.epoch, epoch);
            if (looks_first) break;
        }
        clipper::waiter_leaves(d);
        if (by < kill || by == both) EXPECT(done(t), "it was woken for nothing");
        else EXPECT(clipper::waiter_dead(d) == 10, "the reason");
        if (clipper::slot_state(block, 0) == kOk) block.read(0);
    }
    void run(int t) override {
        uint32_t boxes;
        if (t <= waiters_count) return wait(t - 1);
        if (by == kill_and_end && t == waiters_count + 2) {  // another slot of the same engine
            if (clipper::slot_try_end(block, 1, kOk, value_of(1), 7, &boxes) && clipper::epoch_ends(d)) d.futex.wake_all();
            return;
        }
        if (by == kill || by == kill_and_end) {
            clipper::completion_mark_dead(d, 10);
            return d.futex.wake_all();
        }
        bool loop = by == end || (by == both && t == waiters_count + 1);
        bool first = loop ? clipper::slot_try_end(block, 0, kOk, value_of(0), 7, &boxes)
                          : clipper::slot_try_cancel(block, 0, kCancelled);
        if (first && clipper::epoch_ends(d)) d.futex.wake_all();
    }
    void finish() override { EXPECT(d.waiters.load(kPlain) == 0, "everybody who came has left"); }
};
SCENARIO(Blocked, "completion", blocked_one, "a thread blocks while the loop ends its slot", Blocked::end, 1, false);
SCENARIO(Blocked, "completion", blocked_two, "two threads block while the loop ends their slot", Blocked::end, 2, false);
SCENARIO(Blocked, "completion", blocked_cancel, "a thread blocks while another cancels", Blocked::cancel, 1, false);
SCENARIO(Blocked, "completion", blocked_kill, "a thread blocks while the engine dies", Blocked::kill, 1, false);
SCENARIO(Blocked, "completion", blocked_kill_and_end, "the same, while another slot ends", Blocked::kill_and_end, 1, false);
SCENARIO(Blocked, "completion", blocked_both, "a thread blocks while the loop and a cancel race", Blocked::both, 1, false);
BROKEN(Blocked, "completion", planted_looks_first, "a thread looks before it says that it waits", Blocked::end, 1, true);

// A thread that waits for room in a full queue (model.pyx) sleeps on the same futex, but looks at the ring.
struct Room : Scenario {
    bool cancels;  // another thread ends an epoch at the same time, for a reason of its own
    clipper::Cells<Model> cells;
    Atomic<uint64_t> turns[2];
    Completion d;
    explicit Room(bool c) : cancels(c) {
        uint64_t pos;
        cells.init(turns, 2);
        name(cells.tail, "tail");
        for (int i = 0; i < 2; ++i) {
            name(turns[i], "turns", i);
            cells.claim(&pos);
            cells.publish(pos);
        }
    }
    int threads() const override { return cancels ? 3 : 2; }
    void run(int t) override {
        if (t == 1) {
            while (cells.full()) {
                clipper::waiter_enters(d);
                uint32_t epoch = clipper::waiter_epoch(d);
                if (cells.full()) d.futex.wait(d.epoch, epoch);
                clipper::waiter_leaves(d);
            }
            uint64_t pos;
            EXPECT(cells.claim(&pos), "the room that it saw is gone");
        } else {
            if (t == 2) cells.release(0);
            if (clipper::epoch_ends(d)) d.futex.wake_all();
        }
    }
};
SCENARIO(Room, "completion ring", blocked_for_room, "a submitter waits for room in a full queue", false);
SCENARIO(Room, "completion ring", blocked_for_room_and_cancel, "the same, while another thread cancels", true);

}  // namespace
}  // namespace schedules
