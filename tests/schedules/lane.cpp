// lane.hpp, with Cells of ring.hpp and the ownership of loop_owner.hpp: how a submitter's row reaches a loop that may be asleep.
#include "checker.hpp"
#include "scheduling/lane.hpp"
#include "runtime/loop_owner.hpp"
#include "runtime/ring.hpp"

namespace schedules {
namespace {

using Cells = clipper::Cells<Model>;

enum Planted { nothing, heard_late, no_second_look, announced_early };

struct Lane {
    Atomic<uint32_t> dirty;
    Cells cells;
    Atomic<uint64_t> turns[4];
    Data<uint64_t> rows[4];
    uint64_t seen = 0;  // the loop's
    void start(int id) {
        cells.init(turns, 4);
        name(dirty, "dirty", id);
        name(cells.tail, "lane's tail", id);
        for (int i = 0; i < 4; ++i) name(turns[i], "lane's turns", 4 * id + i);
    }
};

// As lane.pyx submits and io_loop.pyx runs: nobody sleeps while a row waits. A lost wake-up is a loop that never wakes.
struct Submit : Scenario {
    int submitters, rows, lanes_used;
    Planted planted;
    clipper::LoopOwner<Model> lead{};
    EventFd wake_fd{"wake_fd"};
    Lane lanes[2];
    Cells ready;
    Atomic<uint64_t> ready_turns[2];
    Data<uint64_t> ready_ids[2];
    uint64_t ready_head = 0;
    int taken = 0;
    Submit(int s, int r, int l, Planted p) : submitters(s), rows(r), lanes_used(l), planted(p) {
        name(lead.state, "state");
        for (int i = 0; i < lanes_used; ++i) lanes[i].start(i);
        ready.init(ready_turns, 2);
        name(ready.tail, "ready's tail");
        for (int i = 0; i < 2; ++i) {
            name(ready_turns[i], "ready's turns", i);
            ready_ids[i].name = "a lane's id in the ready ring";
        }
    }
    int threads() const override { return submitters + 1; }
    void announce(Lane& lane, uint64_t id) {
        if (clipper::lane_announce(lane, ready, ready_ids, id) && lead.wake_owner()) wake_fd.signal();
    }
    void submit(Lane& lane, uint64_t id) {
        uint64_t pos;
        EXPECT(lane.cells.claim(&pos), "the lane has room");
        if (planted == announced_early) announce(lane, id);
        lane.rows[pos & 3] = 1;
        lane.cells.publish(pos);
        if (planted != announced_early) announce(lane, id);
    }
    void take_in(Lane& lane) {
        while (lane.cells.published(lane.seen)) {
            EXPECT(lane.rows[lane.seen & 3] == 1, "a row");
            lane.cells.release(lane.seen);
            ++lane.seen, ++taken;
        }
    }
    void step() {
        uint64_t id;
        while (clipper::lane_next(ready, ready_ids, &ready_head, &id)) {
            EXPECT(id < uint64_t(lanes_used), "a lane's id");
            bool next = ready_turns[ready_head & 1].peek() == ready.base(ready_head) + 1;
            EXPECT(lanes_used > 1 || !next, "a lane is in the ready ring twice");
            if (planted == heard_late) take_in(lanes[id]);
            clipper::lane_clear_dirty(lanes[id]);
            if (planted != heard_late) take_in(lanes[id]);
        }
    }
    bool idle() { return !ready.published(ready_head); }
    void loop() {
        for (step(); taken < submitters * rows; step()) {
            bool quiet = planted == no_second_look && idle();
            lead.mark_asleep();
            if (quiet || idle()) wake_fd.wait();
            lead.mark_awake();
            if (wake_fd.count) wake_fd.drain();
        }
    }
    void run(int t) override {
        if (t > submitters) return loop();
        uint64_t id = uint64_t(t - 1) % uint64_t(lanes_used);
        for (int i = 0; i < rows; ++i) submit(lanes[id], id);
    }
    void finish() override { EXPECT(taken == submitters * rows, "a row is lost"); }
};
SCENARIO(Submit, "lane ring", submit_one, "one submitter, one row, and a loop that goes to sleep", 1, 1, 1, nothing);
SCENARIO(Submit, "lane ring", submit_again, "one submitter, two rows: the second while the first is taken in", 1, 2, 1, nothing);
SCENARIO(Submit, "lane ring", submit_two, "two submitters to one lane", 2, 1, 1, nothing);
SCENARIO(Submit, "lane ring", submit_two_lanes, "two submitters, a lane each", 2, 1, 2, nothing);
SCENARIO(Submit, "lane ring", submit_often, "one submitter, three rows: the ready ring goes round", 1, 3, 1, nothing);
BROKEN(Submit, "lane ring", planted_heard_late, "the loop clears dirty after it has taken the rows in", 1, 2, 1, heard_late);
BROKEN(Submit, "lane ring", planted_no_second_look, "the loop says that it sleeps, and does not look again", 1, 1, 1,
       no_second_look);
BROKEN(Submit, "lane ring", planted_announced_early, "a row is announced before it is published", 1, 1, 1, announced_early);

enum Early { in_order, said_first };

// As lane.pyx takes rows in and admission.pyx looks for an equal one: a lane whose rows are all taken in has them in the table.
struct TakenIn : Scenario {
    int rows;
    Early planted;
    Atomic<uint64_t> taken, flights[2];
    TakenIn(int n, Early p) : rows(n), planted(p) {
        name(taken, "rows taken in");
        for (int i = 0; i < 2; ++i) name(flights[i], "an evaluation in flight", i);
    }
    int threads() const override { return 2; }
    void run(int t) override {
        if (t == 1) {
            for (int i = 0; i < rows; ++i) {
                if (planted == said_first) clipper::lane_took_in(*this, i + 1);
                flights[i].store(1, Order{-1, Mo::memory_order_relaxed});
                if (planted == in_order) clipper::lane_took_in(*this, i + 1);
            }
        } else if (clipper::lane_all_taken_in(*this, rows)) {
            for (int i = 0; i < rows; ++i)
                EXPECT(flights[i].load(Order{-1, Mo::memory_order_relaxed}) == 1, "a row that was taken in is not found");
        }
    }
    void finish() override {}
};
SCENARIO(TakenIn, "lane", taken_in_one, "a row is taken in while another thread looks for an equal one", 1, in_order);
SCENARIO(TakenIn, "lane", taken_in_two, "two rows are taken in while another thread looks for equal ones", 2, in_order);
BROKEN(TakenIn, "lane", planted_taken_in_early, "a lane says that a row is taken in before it is found", 1, said_first);

enum Hasty { patient, uncounted, looks_first };

// As submit.pyx takes arrays in and engine.pyx ends: what one who entered has put into a lane is there when its rows are ended.
struct Submitters : Scenario {
    int callers, times;
    Hasty planted;
    bool another;  // an Engine.refuse_new came first: some may still be inside
    Atomic<uint32_t> submitters, refusing;
    Data<uint32_t> rows[2];
    uint32_t put[2] = {0, 0}, ended = 0;
    Submitters(int s, int n, Hasty p, bool a) : callers(s), times(n), planted(p), another(a) {
        name(submitters, "submitters");
        name(refusing, "refusing");
        for (int i = 0; i < 2; ++i) rows[i].name = "rows of an array";
    }
    int threads() const override { return callers + 1; }
    void take(int i) {
        bool early = planted == looks_first && refusing.load(Order{-1, Mo::memory_order_seq_cst}) == 0;
        if (planted == patient ? !clipper::submitter_enter(*this, refusing) : planted == looks_first ? !early : false) return;
        if (planted == looks_first) submitters.fetch_add(1, Order{-1, Mo::memory_order_seq_cst});
        rows[i] = ++put[i];
        if (planted != uncounted) clipper::submitter_leave(*this);
    }
    void run(int t) override {
        if (t <= callers) {
            for (int k = 0; k < times; ++k) take(t - 1);
            return;
        }
        if (another) refusing.store(1, Order{-1, Mo::memory_order_seq_cst});
        clipper::submitters_stop(*this, refusing, 1);
        for (int i = 0; i < callers; ++i) ended += rows[i];
    }
    void finish() override {
        EXPECT(ended == put[0] + put[1], "a row is put into a lane that has ended");
        EXPECT(submitters.peek() == 0, "the count of submitters is wrong");
    }
};
SCENARIO(Submitters, "lane", takers_one, "one submitter at work while the engine ends", 1, 1, patient, false);
SCENARIO(Submitters, "lane", takers_two, "two submitters at work while the engine ends", 2, 1, patient, false);
SCENARIO(Submitters, "lane", takers_again, "one submitter, twice", 1, 2, patient, false);
SCENARIO(Submitters, "lane", takers_after_refusing, "it takes nothing new already when it ends", 2, 1, patient, true);
BROKEN(Submitters, "lane", planted_uncounted, "a submitter does not count itself", 1, 1, uncounted, false);
BROKEN(Submitters, "lane", planted_takers_look_first, "a submitter looks before it counts itself", 1, 1, looks_first, false);

}  // namespace
}  // namespace schedules
