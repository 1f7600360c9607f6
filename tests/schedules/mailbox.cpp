// completion.hpp's mailboxes, with Spsc of ring.hpp: no notice is lost, whoever ends the slot and however full the ring is.
#include "block.hpp"
#include "results/completion.hpp"
#include "runtime/ring.hpp"

namespace schedules {
namespace {

enum Planted { nothing, no_look_after_arming, woken_before_told, asks_after_looking };

// As future.pyx reads and completion.pyx writes. A lost notice is a reader that sleeps for ever.
struct News : Scenario {
    int slots, cancels;  // slot 0 .. slots - 1; the first `cancels` are cancelled by a third thread, unless the loop comes first
    uint64_t size;       // of the ring
    Planted planted;
    bool batched;        // one wake-up for all slots, or one for each
    bool awake;          // the reader is, at first
    Block block{2};
    Atomic<uint32_t> armed, overflow, writing;
    EventFd fd{"the mailbox's eventfd"};
    clipper::Spsc<Model> ids;
    Atomic<uint64_t> words[2];
    bool waiting[2] = {}, told[2] = {};
    News(int n, int c, uint64_t s, Planted p, bool b, bool a)
        : slots(n), cancels(c), size(s), planted(p), batched(b), awake(a), armed(!a) {
        name(armed, "armed");
        name(overflow, "overflow");
        name(writing, "writing");
        ids.init(words, size);
        name(ids.head, "ids' head");
        name(ids.tail, "ids' tail");
        for (int i = 0; i < 2; ++i) name(words[i], "ids", i);
    }
    int threads() const override { return cancels ? 3 : 2; }
    void wake() {
        if (clipper::mailbox_to_wake(*this)) fd.signal();
    }
    void loop(bool beside = false, uint32_t from = 0, uint32_t to = 2) {
        bool dirty = false;
        for (uint32_t i = from; i < uint32_t(slots) && i < to; ++i) {
            uint32_t boxes = 0;
            if (!clipper::slot_try_end(block, i, kOk, value_of(i), 7, &boxes) || !boxes) continue;
            if (planted == woken_before_told) wake();
            beside ? clipper::mailbox_put_beside(*this, ids, i) : clipper::mailbox_put(*this, ids, i);
            if (planted != woken_before_told && !batched) wake();
            dirty = true;
        }
        if (dirty && batched) wake();
    }
    void cancel() {
        for (uint32_t i = 0; i < uint32_t(cancels); ++i) {
            if (!clipper::slot_try_cancel(block, i, kCancelled)) continue;
            if (!clipper::slot_boxes(block, i)) continue;
            clipper::mailbox_overflow(*this);
            fd.signal();
        }
    }
    bool ask(uint32_t slot) {
        waiting[slot] = true;
        if (planted == asks_after_looking) {
            bool open = clipper::slot_state(block, slot) == clipper::kSlotPending;
            if (open) clipper::slot_watch(block, slot, 0);
            if (open) return true;
        } else if (clipper::slot_watch(block, slot, 0)) {
            return true;
        }
        waiting[slot] = false;
        return false;
    }
    void collect(uint32_t slot) {
        if (!waiting[slot]) return;
        waiting[slot] = false;
        if (ask(slot)) return;
        read(slot);
    }
    void read(uint32_t slot) {
        told[slot] = true;
        if (clipper::slot_state(block, slot) == kOk) block.read(slot);
    }
    bool drain_once() {
        bool any = false;
        uint64_t slot;
        while (ids.pop(&slot)) {
            EXPECT(slot < uint64_t(slots), "a notice of no slot");
            collect(uint32_t(slot));
            any = true;
        }
        if (clipper::mailbox_must_rescan(*this)) {
            for (uint32_t i = 0; i < uint32_t(slots); ++i) collect(i);
            any = true;
        }
        return any;
    }
    bool missing() const {
        for (int i = 0; i < slots; ++i)
            if (!told[i]) return true;
        return false;
    }
    void reader() {
        for (uint32_t i = 0; i < uint32_t(slots); ++i)
            if (!ask(i)) read(i);
        for (bool first = awake; missing(); first = false) {
            if (!first) fd.wait();
            fd.drain();
            for (;;) {
                if (drain_once()) continue;
                bool more = clipper::mailbox_arm(*this, ids);
                if (!more || planted == no_look_after_arming) break;
            }
        }
    }
    void run(int t) override { t == 1 ? reader() : t == 2 ? loop() : cancel(); }
    void finish() override { EXPECT(!missing(), "a notice is lost"); }
};
SCENARIO(News, "completion ring", mailbox_one, "news of one slot", 1, 0, 2, nothing, false, false);
SCENARIO(News, "completion ring", mailbox_batch, "news of two slots in one batch", 2, 0, 2, nothing, true, false);
SCENARIO(News, "completion ring", mailbox_two, "news of two slots, one after the other", 2, 0, 2, nothing, false, false);
SCENARIO(News, "completion ring", mailbox_awake, "the same, while the reader is awake at first", 2, 0, 2, nothing, false, true);
SCENARIO(News, "completion ring", mailbox_overflow, "news of two slots, and room for one notice", 2, 0, 1, nothing, false, false);
SCENARIO(News, "completion ring", mailbox_cancel, "a slot that is cancelled while the loop ends it", 1, 1, 2, nothing, false, false);
SCENARIO(News, "completion ring", mailbox_cancel_two, "one of two cancelled, room for one notice", 2, 1, 1, nothing, false, false);
BROKEN(News, "completion ring", planted_no_look_after_arming, "a reader sleeps once it has armed, without another look", 2, 0, 2,
       no_look_after_arming, false, false);
BROKEN(News, "completion ring", planted_woken_before_told, "a reader is woken before it has its notice", 2, 0, 2,
       woken_before_told, false, false);
BROKEN(News, "completion ring", planted_asks_after_looking, "a reader looks at the slot before it asks for news of it", 1, 0, 2,
       asks_after_looking, false, false);

// The loops of two engines end a slot of the same future each.
struct Beside : News {
    using News::News;
    int threads() const override { return 3; }
    void run(int t) override { t == 1 ? reader() : loop(true, uint32_t(t - 2), uint32_t(t - 1)); }
};
SCENARIO(Beside, "completion ring", mailbox_beside, "two loops end a slot each", 2, 0, 2, nothing, true, false);
SCENARIO(Beside, "completion ring", mailbox_beside_awake, "the same, while the reader is awake at first", 2, 0, 2, nothing, true, true);

// Two readers ask for news of one slot: whoever was told to wait is in the list that the loop tells.
struct Asked : Scenario {
    Block block{1};
    uint32_t boxes = 0;
    bool asked[3] = {};
    int threads() const override { return 3; }
    void run(int t) override {
        if (t == 3) clipper::slot_try_end(block, 0, kOk, value_of(0), 7, &boxes);
        else asked[t] = clipper::slot_watch(block, 0, uint32_t(t));
    }
    void finish() override {
        for (int t = 1; t <= 2; ++t) EXPECT(!asked[t] || (boxes >> t & 1), "a reader waits, and will not be told");
    }
};
SCENARIO(Asked, "completion", slot_two_ask, "two readers ask for news of a slot while it ends");

}  // namespace
}  // namespace schedules
