// ring.hpp: Cells (many producers, one consumer, by ticket) and Spsc (one producer, one consumer).
#include "checker.hpp"
#include "runtime/ring.hpp"

namespace schedules {
namespace {

using Cells = clipper::Cells<Model>;
using Spsc = clipper::Spsc<Model>;

struct Ring {
    static constexpr uint64_t size = 2;
    Cells cells;
    Atomic<uint64_t> turns[size];
    Data<uint64_t> rows[size];
    Ring() {
        cells.init(turns, size);
        name(cells.tail, "tail");
        for (int i = 0; i < int(size); ++i) {
            name(turns[i], "turns", i);
            rows[i].name = "a row";
        }
    }
    uint64_t push(uint64_t row) {  // waits while the ring is full
        uint64_t pos;
        while (!cells.claim(&pos)) spin();
        rows[pos % size] = row;
        cells.publish(pos);
        return pos;
    }
    uint64_t take(uint64_t pos) {  // waits until it is there; does not release
        while (!cells.published(pos)) spin();
        return rows[pos % size];
    }
};

// Producers push rows 10 p, 10 p + 1, ...; the consumer sees each once, and each producer's in order.
struct CellsOrder : Scenario {
    int producers, rows;
    bool backwards;  // the consumer keeps two cells and releases the second first
    Ring ring;
    uint64_t next[4] = {};
    int seen = 0;
    CellsOrder(int p, int r, bool b) : producers(p), rows(r), backwards(b) {}
    int threads() const override { return producers + 1; }
    void look(uint64_t row) {
        uint64_t p = row / 10;
        EXPECT(p >= 1 && p <= uint64_t(producers), "a row that nobody pushed");
        EXPECT(row % 10 == next[p], "a row is lost, doubled or out of order");
        ++next[p], ++seen;
    }
    void run(int t) override {
        if (t <= producers) {
            for (int i = 0; i < rows; ++i) ring.push(uint64_t(10 * t + i));
            return;
        }
        uint64_t end = uint64_t(producers * rows);
        for (uint64_t pos = 0; pos < end; ++pos) {
            look(ring.take(pos));
            if (!backwards) ring.cells.release(pos);
            else if (pos % 2 == 1) ring.cells.release(pos), ring.cells.release(pos - 1);
        }
    }
    void finish() override { EXPECT(seen == producers * rows, "not all rows came"); }
};
SCENARIO(CellsOrder, "ring", cells_two_producers, "two producers, a row each, and a consumer", 2, 1, false);
SCENARIO(CellsOrder, "ring", cells_wrap, "one producer, three rows round a ring of two", 1, 3, false);
SCENARIO(CellsOrder, "ring", cells_out_of_order, "cells released second first, and claimed again", 1, 4, true);
DEEP(CellsOrder, "ring", cells_two_producers_wrap, "two producers, two rows each, round a ring of two", 2, 2, false);
DEEP(CellsOrder, "ring", cells_three_producers, "three producers and a consumer", 3, 1, false);

// Claims that do not wait: exactly as many succeed as there are cells, and a ring that has room never says full.
struct CellsFull : Scenario {
    int claimers, taken;  // cells that are taken at first
    Ring ring;
    Atomic<uint32_t> claimed;
    uint64_t got[4] = {};
    CellsFull(int c, int used) : claimers(c), taken(used) {
        name(claimed, "claimed");
        for (uint64_t pos = 0; pos < 2; ++pos) {  // one lap lies behind
            ring.push(pos);
            ring.cells.release(pos);
        }
        for (int i = 0; i < taken; ++i) ring.push(7);
        EXPECT(ring.cells.full() == (taken == 2), "full() answers as claim() does");
    }
    int threads() const override { return claimers; }
    void run(int t) override {
        uint64_t pos;
        if (!ring.cells.claim(&pos)) return;
        ring.rows[pos % 2] = uint64_t(t);
        ring.cells.publish(pos);
        got[t] = pos + 1;
    }
    void finish() override {
        int all = 0;
        for (int t = 1; t <= claimers; ++t) {
            all += got[t] != 0;
            for (int u = 1; u < t; ++u) EXPECT(!got[t] || got[t] != got[u], "a cell was claimed twice");
        }
        int room = 2 - taken;
        EXPECT(all == (claimers < room ? claimers : room), "a claim was refused though there was room, or granted without");
    }
};
SCENARIO(CellsFull, "ring", cells_room_for_all, "two claims for two free cells of the second lap", 2, 0);
SCENARIO(CellsFull, "ring", cells_full_is_an_answer, "three claims for two free cells", 3, 0);
SCENARIO(CellsFull, "ring", cells_one_left, "two claims for one free cell", 2, 1);

struct Words {
    Spsc ids;
    Atomic<uint64_t> storage[2];
    explicit Words(uint64_t size) {
        ids.init(storage, size);
        name(ids.head, "head");
        name(ids.tail, "tail");
        for (int i = 0; i < 2; ++i) {
            name(storage[i], "words", i);
            ordered(storage[i]);
        }
    }
};

// Words arrive in order, none lost, none twice, and no cell is written while it may still be read.
struct SpscOrder : Scenario {
    int words;
    bool waits;  // the producer, while the ring is full; else it gives that word up
    uint64_t size;
    Words ring;
    uint64_t pushed = 0, popped = 0, last = 0;
    SpscOrder(int n, bool w, uint64_t s) : words(n), waits(w), size(s), ring(s) {}
    int threads() const override { return 2; }
    void produce() {
        for (int i = 1; i <= words; ++i) {
            if (!ring.ids.push(uint64_t(i))) {
                if (!waits) continue;
                do spin();
                while (!ring.ids.push(uint64_t(i)));
            }
            ++pushed;
        }
    }
    void consume() {
        uint64_t word;
        for (int tries = 0; tries < words; ++tries) {
            while (!ring.ids.pop(&word)) {
                if (!waits) return;
                spin();
            }
            EXPECT(word > last, "a word comes twice, or out of order");
            last = word, ++popped;
        }
    }
    void run(int t) override { t == 1 ? produce() : consume(); }
    void finish() override {
        uint64_t word;
        while (ring.ids.pop(&word)) {
            EXPECT(word > last, "a word comes twice, or out of order");
            last = word, ++popped;
        }
        EXPECT(popped == pushed, "a word is lost");
        EXPECT(!waits || popped == uint64_t(words), "not all words came");
        EXPECT(!ring.ids.tail_moved(), "an empty ring has nothing new");
    }
};
SCENARIO(SpscOrder, "ring", spsc_wrap, "three words round a ring of two", 3, true, 2);
SCENARIO(SpscOrder, "ring", spsc_one_cell, "two words through one cell", 2, true, 1);
SCENARIO(SpscOrder, "ring", spsc_full_is_an_answer, "three words into a ring of two, not waiting", 3, false, 2);
SCENARIO(SpscOrder, "ring", spsc_long, "five words round a ring of two", 5, true, 2);

// A producer that asks how much room there is, and then pushes that much without looking again.
struct SpscRoom : SpscOrder {
    SpscRoom(int n, uint64_t s) : SpscOrder(n, true, s) {}
    void run(int t) override {
        if (t != 1) return consume();
        uint64_t room = 0;
        for (int i = 1; i <= words; ++i) {
            while (!room) {
                room = ring.ids.room();
                if (!room) spin();
            }
            EXPECT(ring.ids.push(uint64_t(i)), "there was room");
            --room, ++pushed;
        }
    }
};
SCENARIO(SpscRoom, "ring", spsc_room, "four words round a ring of two, by its room", 4, 2);
SCENARIO(SpscRoom, "ring", spsc_room_of_one, "two words through one cell, by its room", 2, 1);

}  // namespace
}  // namespace schedules
