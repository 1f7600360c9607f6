// What completion.hpp's steps work on, with the fields of future.pxd.
#pragma once
#include "checker.hpp"

namespace schedules {

constexpr uint8_t kOk = 1, kCancelled = 9;  // Status
constexpr Order kPlain{-1, Mo::memory_order_relaxed};

struct Value {
    uint64_t word;
    uint8_t tag;
};
inline Value value_of(uint32_t slot) { return {40 + slot, 3}; }

struct Block {
    Atomic<uint32_t> refs;
    Atomic<uint8_t> state[2];
    Atomic<uint32_t> boxes[2];
    Data<uint64_t> word[2];
    Data<uint8_t> tag[2];
    Data<uint32_t> latency_us[2];
    explicit Block(int slots) {
        schedules::name(refs, "refs");
        for (int i = 0; i < slots; ++i) {
            schedules::name(state[i], "state", i);
            schedules::name(boxes[i], "boxes", i);
            word[i].name = "word", tag[i].name = "tag", latency_us[i].name = "latency_us";
        }
    }
    void read(uint32_t slot) const {
        bool whole = word[slot] == value_of(slot).word && tag[slot] == value_of(slot).tag;
        EXPECT(whole, "a slot says that it ended, without its value");
    }
};

struct Completion {
    Atomic<uint32_t> epoch, waiters, dead;
    Futex futex;
    Completion() {
        schedules::name(epoch, "epoch");
        schedules::name(waiters, "waiters");
        schedules::name(dead, "dead");
    }
};

}  // namespace schedules
