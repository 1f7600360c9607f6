// spin_lock.hpp: the lock of result slots, and of the answers that feedback may come for.
#include "runtime/spin_lock.hpp"

#include "block.hpp"

namespace schedules {
namespace {

// Claims: the lock gives each slot to one thread.
struct Claims : Scenario {
    int claimers;
    Atomic<uint32_t> lock;
    Data<uint32_t> used;
    uint32_t got[4] = {};
    explicit Claims(int n) : claimers(n) {
        name(lock, "claims' lock");
        used.name = "slots used";
    }
    int threads() const override { return claimers; }
    void run(int t) override {
        clipper::spin_lock(lock);
        got[t] = used;
        used = got[t] + 1;
        clipper::spin_unlock(lock);
    }
    void finish() override {
        EXPECT(used == uint32_t(claimers), "a slot is lost or given twice");
    }
};
SCENARIO(Claims, "spin_lock", claims_two, "two threads claim a slot each", 2);
SCENARIO(Claims, "spin_lock", claims_three, "three threads claim a slot each", 3);

}  // namespace
}  // namespace schedules
