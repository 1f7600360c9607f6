// row_lock.hpp: the lock of a bucket of rows, and what its holder writes into the same word.
#include "checker.hpp"
#include "row_lock.hpp"

namespace schedules {
namespace {

// Each thread adds its number to a row, and itself to the bucket; what it finds there is whole.
struct Rows : Scenario {
    int writers, rounds;
    clipper::RowLock<Model> lock{};
    Data<uint64_t> row, ids[6];
    Rows(int n, int times) : writers(n), rounds(times) {
        name(lock.word, "word");
        row.name = "the row";
        for (auto& id : ids) id.name = "an id";
    }
    int threads() const override { return writers; }
    void run(int t) override {
        for (int i = 0; i < rounds; ++i) {
            while (!lock.take()) spin();
            uint32_t n = lock.count();
            for (uint32_t k = 0; k < n; ++k) EXPECT(ids[k] != 0, "an id is counted before it is there");
            ids[n] = uint64_t(t);
            lock.more(1);
            if (n == 1) lock.overflow();
            EXPECT(lock.overflowed() == (n >= 1), "the mark is there from the second id on");
            row = row + uint64_t(t);
            lock.give();
        }
    }
    void finish() override {
        EXPECT(row == uint64_t(rounds * writers * (writers + 1) / 2), "an update is lost");
        EXPECT(lock.count() == uint32_t(writers * rounds), "an id is lost");
        EXPECT(lock.take(), "the lock is free");
        EXPECT(!lock.take(), "and now it is not");
    }
};
SCENARIO(Rows, "row_lock", rows_two, "two threads, a row", 2, 1);
SCENARIO(Rows, "row_lock", rows_two_rounds, "two threads, twice each", 2, 2);
SCENARIO(Rows, "row_lock", rows_two_thrice, "two threads, three times each", 2, 3);
DEEP(Rows, "row_lock", rows_three, "three threads", 3, 1);

}  // namespace
}  // namespace schedules
