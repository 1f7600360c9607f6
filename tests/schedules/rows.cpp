// row_lock.hpp: the lock of a bucket of rows, what its holder writes into the same word, and the gate of a table of them.
#include <string>

#include "checker.hpp"
#include "params/row_lock.hpp"

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

enum Ill { well, comes_too_early, goes_on_alone };

// A letter a thread. All add themselves to a row:
//     S  twice, as the sole one for as long as it may be    T  under the lock
//     H  as the sole one, which it is no more when it leaves
//     G  moves all rows, between two times that it is inside: so it must be alone, and its own entries count too
struct Gate : Scenario {
    std::string roles;
    Ill ill;
    clipper::RowGate<Model> gate{};
    clipper::RowLock<Model> lock{};
    Data<uint64_t> row, place;
    uint64_t added = 0, moved = 0;
    Gate(const char* r, Ill i = well) : roles(r), ill(i) {
        name(gate.word, "gate"), name(lock.word, "lock");
        row.name = "the row", place.name = "where the rows are";
        for (char role : roles) added += role == 'S' ? 2 : 1;
    }
    int threads() const override { return int(roles.size()); }
    void come_in() {
        while (!gate.enter())
            while (gate.closed()) spin();
        while (ill != comes_too_early && !gate.shared()) spin();
    }
    void add(bool sole) {
        while (!sole && !lock.take()) spin();
        EXPECT(place <= 2, "the rows are where they are");
        row = row + 1;
        if (!sole) lock.give();
    }
    void run(int t) override {
        const char role = roles[size_t(t - 1)];
        bool sole = (role == 'S' || role == 'H') && gate.enter_sole();
        if (role == 'G') {
            if (gate.close()) {
                while (!gate.alone()) spin();
                place = place + 1;
                ++moved;
                gate.open();
            }
        }
        if (!sole) come_in();
        add(sole);
        if (role == 'S') {
            if (sole && gate.others()) {
                gate.share();
                sole = ill == goes_on_alone;
            }
            add(sole);
        }
        if (role == 'H' && sole) {
            gate.share();
            sole = false;
        }
        gate.leave(sole && ill != goes_on_alone);
    }
    void finish() override {
        EXPECT(row == added, "an update is lost");
        EXPECT(place == moved, "a move is lost");
        EXPECT(gate.enter_sole(), "nobody is inside");
    }
};
SCENARIO(Gate, "row_lock", gate_follows, "one has the table for itself, another one comes", "ST");
SCENARIO(Gate, "row_lock", gate_both, "two would have the table for themselves", "SS");
SCENARIO(Gate, "row_lock", gate_moves, "one has the table for itself, another one moves it", "SG");
SCENARIO(Gate, "row_lock", gate_moves_shared, "a row is added while another one moves it", "TG");
SCENARIO(Gate, "row_lock", gate_given_up, "one gives it up just as another one comes", "HT");
SCENARIO(Gate, "row_lock", gate_moves_twice, "two would move it", "GG");
DEEP(Gate, "row_lock", gate_three, "one has it for itself, one comes, one moves it", "STG");
BROKEN(Gate, "row_lock", gate_early, "comes in without waiting for the sole one", "ST", comes_too_early);
BROKEN(Gate, "row_lock", gate_stubborn, "goes on without locks after it let others in", "ST", goes_on_alone);

}  // namespace
}  // namespace schedules
