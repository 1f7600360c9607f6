// What the explorer itself must know of the memory model: for each pattern of the literature, the outcome that an order forbids
// (it holds), and the same outcome where the orders allow it (it is found). After Alglave, Maranget and Tautschnig, "Herding
// cats" (TOPLAS 2014).
#include "checker.hpp"

namespace schedules {
namespace {

constexpr Order kRelaxed{-1, Mo::memory_order_relaxed}, kAcquire{-1, Mo::memory_order_acquire};
constexpr Order kRelease{-1, Mo::memory_order_release}, kAcqRel{-1, Mo::memory_order_acq_rel};
constexpr Order kSc{-1, Mo::memory_order_seq_cst};

struct Pair : Scenario {
    Atomic<uint32_t> x, y;
    uint32_t seen[8] = {};
    Pair() {
        name(x, "x");
        name(y, "y");
    }
};

struct StoreBuffer : Pair {
    Order store, load;
    StoreBuffer(Order s, Order l) : store(s), load(l) {}
    int threads() const override { return 2; }
    void run(int t) override {
        (t == 1 ? x : y).store(1, store);
        seen[t] = (t == 1 ? y : x).load(load);
    }
    void finish() override { EXPECT(seen[1] || seen[2], "both missed the other's store"); }
};
SCENARIO(StoreBuffer, "", litmus_store_buffer, "store, then load: sequentially consistent", kSc, kSc);
BROKEN(StoreBuffer, "", litmus_store_buffer_weak, "store, then load: release and acquire", kRelease, kAcquire);
BROKEN(StoreBuffer, "", litmus_store_buffer_store, "store, then load: only the loads sequentially consistent", kRelease, kSc);

// The same with an exchange on one side: a store that is not yet visible to it.
struct Exchange : Pair {
    Order store;
    explicit Exchange(Order s) : store(s) {}
    int threads() const override { return 2; }
    void run(int t) override {
        if (t == 1) x.store(1, store), seen[1] = y.load(kSc);
        else y.store(1, kSc), seen[2] = x.exchange(2, kSc);
    }
    void finish() override { EXPECT(seen[1] || seen[2], "both missed the other's store"); }
};
SCENARIO(Exchange, "", litmus_exchange, "store, then load; store, then exchange", kSc);
BROKEN(Exchange, "", litmus_exchange_weak, "the same, the first store a release", kRelease);

struct Passing : Pair {
    Order store, load;
    bool carried;  // over a read-modify-write of a third thread
    Data<uint32_t> data;
    Passing(Order s, Order l, bool c) : store(s), load(l), carried(c) {}
    int threads() const override { return carried ? 3 : 2; }
    void run(int t) override {
        if (t == 1) {
            data = 1;
            x.store(1, store);
        } else if (t == 3) {
            x.fetch_add(1, kRelaxed);
        } else if (x.load(load) >= (carried ? 2u : 1u)) {
            EXPECT(!carried || x.peek() == 2, "added");
            if (x.peek() == 2 || !carried) EXPECT(data == 1, "the message came without what it stands for");
        }
    }
};
SCENARIO(Passing, "", litmus_passing, "data, then a flag: release and acquire", kRelease, kAcquire, false);
BROKEN(Passing, "", litmus_passing_store, "data, then a flag: a relaxed store", kRelaxed, kAcquire, false);
BROKEN(Passing, "", litmus_passing_load, "data, then a flag: a relaxed load", kRelease, kRelaxed, false);
SCENARIO(Passing, "", litmus_release_sequence, "the flag is carried on by a relaxed read-modify-write", kRelease, kAcquire, true);

struct Readers : Pair {
    Order load;
    explicit Readers(Order l) : load(l) {}
    int threads() const override { return 4; }
    void run(int t) override {
        if (t == 1) x.store(1, kSc);
        if (t == 2) y.store(1, kSc);
        if (t == 3) seen[0] = x.load(load), seen[1] = y.load(load);
        if (t == 4) seen[2] = y.load(load), seen[3] = x.load(load);
    }
    void finish() override { EXPECT(!(seen[0] && !seen[1] && seen[2] && !seen[3]), "two readers disagree on the order"); }
};
SCENARIO(Readers, "", litmus_readers, "two stores, two readers: sequentially consistent", kSc);
BROKEN(Readers, "", litmus_readers_weak, "two stores, two readers: acquire", kAcquire);

struct Coherence : Pair {
    int threads() const override { return 2; }
    void run(int t) override {
        if (t == 1) x.store(1, kRelaxed), x.store(2, kRelaxed);
        else seen[0] = x.load(kRelaxed), seen[1] = x.load(kRelaxed);
    }
    void finish() override {
        EXPECT(seen[0] <= seen[1], "an older store after a newer one");
        EXPECT(x.load(kRelaxed) == 2, "the last store is lost");
    }
};
SCENARIO(Coherence, "", litmus_coherence, "two relaxed loads of one location never go back");

struct TwoWrites : Pair {
    Order store;
    explicit TwoWrites(Order s) : store(s) {}
    int threads() const override { return 2; }
    void run(int t) override {
        (t == 1 ? x : y).store(1, store);
        (t == 1 ? y : x).store(2, store);
    }
    void finish() override { EXPECT(!(x.peek() == 1 && y.peek() == 1), "each first store came last"); }
};
SCENARIO(TwoWrites, "", litmus_two_writes, "two locations written crosswise: sequentially consistent", kSc);
BROKEN(TwoWrites, "", litmus_two_writes_weak, "two locations written crosswise: release", kRelease);

struct Count : Pair {
    int threads() const override { return 3; }
    void run(int t) override {
        if (t < 3) {
            x.fetch_add(1, kRelaxed);
        } else {
            uint32_t zero = 0;
            seen[3] = x.compare_exchange_strong(zero, 1, kAcqRel);
        }
    }
    void finish() override { EXPECT(x.peek() == 2 + seen[3], "an addition is lost"); }
};
SCENARIO(Count, "", litmus_count, "relaxed read-modify-writes lose nothing");

}  // namespace
}  // namespace schedules
