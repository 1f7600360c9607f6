// loop_owner.hpp, with the waiters of completion.hpp: who runs the turns of the loop, and that somebody does whenever somebody needs it.
// Nothing here has a clock: what these scenarios end without, no tick of the parked thread was needed for.
#include "block.hpp"
#include "results/completion.hpp"
#include "runtime/loop_owner.hpp"

namespace schedules {
namespace {

constexpr Order kSc{-1, Mo::memory_order_seq_cst};

enum Planted { nothing, left_unseen, forgot_waiters, bell_read_late, bell_read_twice, slept_unseen, stop_unseen,
               touched_late, closed_early };

// A letter a thread. Of the loop thread: L runs turns; P is about to park; F is parked, and nobody leads; T is, and its tick comes.
// Of the others:
//     A  asks: submits a row, and blocks until it is answered          W  blocks for a row that was sent before
//     S  submits, and blocks on nothing of ours: its row must be sent  N  submits, and cares no more
//     R  submits while so many are open that it cannot step itself     C  cancels what thread 2 waits for
//     X  stops the loop, whatever the others are at
// Without an X the loop is stopped when all others have ended. A container answers as soon as a row is sent, or never (mute).
struct Led : Scenario {
    std::string roles;
    Planted planted;
    bool mute;
    clipper::LoopOwner<Model> lead{};
    Completion d;
    Futex bell_futex;
    EventFd epoll{"epoll"};           // the eventfd and the containers' sockets
    EventFd sent[kThreads];
    Atomic<uint32_t> news[kThreads];  // a row is published
    Atomic<uint32_t> done[kThreads];  // its slot has ended
    Atomic<uint32_t> stopped;
    Data<uint32_t> engine;            // what the holder of the ownership alone touches
    Data<uint32_t> memory;            // what must be there while anybody is inside
    bool taken_in[kThreads] = {}, in_air[kThreads] = {};
    int ended = 0;

    Led(const char* r, Planted p = nothing, bool m = false) : roles(r), planted(p), mute(m) {
        name(lead.state, "state"), name(lead.wakeups, "wakeups"), name(lead.inside, "inside"), name(lead.taken, "taken");
        name(stopped, "stopped");
        engine.name = "the engine", memory.name = "the engine's memory";
        if (role(1) == 'F' || role(1) == 'T') lead.leave();
        for (int t = 1; t <= threads(); ++t) {
            name(news[t - 1], "news", t), name(done[t - 1], "done", t);
            if (role(t) == 'W') reply(t);
        }
    }
    int threads() const override { return int(roles.size()); }
    char role(int t) const { return roles[size_t(t - 1)]; }
    bool submits(int t) const { return std::strchr("ASNR", role(t)) != nullptr; }

    // -- the engine
    void reply(int t) {
        in_air[t - 1] = true;
        if (!mute) ++epoll.count;
    }
    bool idle() const {
        EXPECT(memory == 0, "it looks into an engine that is gone");
        for (int t = 1; t <= threads(); ++t)
            if (submits(t) && !taken_in[t - 1] && news[t - 1].load(kSc)) return false;
        return true;
    }
    void step(bool reads) {
        engine = engine + 1;
        EXPECT(memory == 0, "it steps an engine that is gone");
        bool touched = false;
        if (reads && epoll.count) {
            epoll.drain();
            for (int t = 1; t <= threads(); ++t)
                if (in_air[t - 1] && !mute) in_air[t - 1] = false, done[t - 1].store(1, kSc), touched = true;
        }
        for (int t = 1; t <= threads(); ++t)
            if (submits(t) && !taken_in[t - 1] && news[t - 1].load(kSc)) {
                taken_in[t - 1] = true;
                reply(t);
                if (role(t) != 'A') sent[t - 1].signal();
            }
        if (touched && clipper::epoch_ends(d) > uint32_t(lead.by_waiter)) d.futex.wake_all();
    }

    // -- completion.pyx
    void rouse() {
        if (lead.wake_owner()) epoll.signal();
    }
    void ring() {
        if (!lead.is_free()) return;
        lead.wake_loop_thread();
        bell_futex.wake_all();
    }
    void tell(bool crowded) {
        if (lead.wake_owner()) return epoll.signal();
        if (!lead.is_free()) return;
        if (crowded || !lead.enter(false)) return ring();
        step(false);
        leave(false, false);
    }
    bool leads() {
        if (!lead.is_free()) return false;
        if (clipper::waiters_now(d) == 1 && lead.enter(true)) return true;
        ring();
        return false;
    }
    bool open() const {
        for (int t = 1; t <= threads(); ++t)
            if ((submits(t) ? news[t - 1].peek() : in_air[t - 1]) && !done[t - 1].peek()) return true;
        return false;
    }

    // -- io_loop.pyx
    void turn(bool led, uint32_t epoch) {
        lead.mark_asleep();
        if (idle() && !stopped.load(kSc) && (!led || planted == slept_unseen || clipper::waiter_epoch(d) == epoch)) epoll.wait();
        lead.mark_awake();
        step(true);
    }
    bool let_go(bool by_waiter) {
        for (;;) {
            bool quiet = planted == left_unseen && idle();
            lead.leave();
            if (quiet || idle()) return true;
            if (!lead.take()) return false;
            lead.by_waiter = by_waiter;
            step(false);
        }
    }
    bool waited_for(uint32_t mine) { return clipper::waiters_now(d) > mine && open(); }
    void leave(bool by_waiter, bool for_good) {
        bool early = planted == forgot_waiters && waited_for(by_waiter);
        if (planted == touched_late) {
            lead.gone();
            let_go(by_waiter);
            return;
        }
        bool free = let_go(by_waiter);
        bool waited = planted == forgot_waiters ? early : free && waited_for(by_waiter);
        if (free && (waited || (for_good && open()) || stopped.load(kSc))) ring();
        lead.gone();
    }
    bool hears(uint32_t* heard) {
        if (planted != bell_read_twice) return lead.was_woken(heard);
        uint32_t before = *heard, unheard = before;
        bool rung = lead.was_woken(&unheard);
        lead.was_woken(heard);
        return rung;
    }
    void park() {
        uint32_t heard = 0, taken = 0;
        bool rung = false, tick = role(1) == 'T';
        if (role(1) == 'P') {
            if (planted != bell_read_late) lead.was_woken(&heard);
            taken = lead.taken.load(kPlain);
            rung = !let_go(false) || waited_for(0) || (planted != stop_unseen && stopped.load(kSc));
            if (planted == bell_read_late) lead.was_woken(&heard);
        }
        for (;;) {
            if (!rung && !tick) bell_futex.wait(lead.wakeups, heard);
            tick = false;
            rung = hears(&heard) || rung || stopped.load(kSc);
            uint32_t now = lead.taken.load(kPlain);
            if (!rung && now != taken) taken = now;
            else if (lead.take()) break;
            rung = false;
        }
        lead.by_waiter = false;
        step(true);
    }
    void loop() {
        if (role(1) != 'L') park();
        while (!stopped.load(kSc)) turn(false, 0);
        lead.close();
        if (planted != closed_early)
            while (!lead.is_alone()) spin();
        memory = 1;
        clipper::completion_mark_dead(d, 10);
        d.futex.wake_all();
    }
    void stop() {
        stopped.store(1, kSc);
        epoll.signal();
        ring();
    }

    // -- future.pyx
    void wait(int t) {
        clipper::waiter_enters(d);
        for (bool look = false; !look;) {
            uint32_t epoch = clipper::waiter_epoch(d);
            if (done[t - 1].load(kSc) || clipper::waiter_dead(d)) break;
            if (!leads()) {
                d.futex.wait(d.epoch, epoch);
                continue;
            }
            while (epoch = clipper::waiter_epoch(d), !done[t - 1].load(kSc) && !look) {
                turn(true, epoch);
                look = stopped.load(kSc);
            }
            leave(true, !look);
        }
        clipper::waiter_leaves(d);
    }
    void run(int t) override {
        if (t == 1) return loop();
        if (submits(t)) {
            news[t - 1].store(1, kSc);
            tell(role(t) == 'R');
        }
        if (role(t) == 'S' || role(t) == 'R') sent[t - 1].wait();
        if (role(t) == 'A' || role(t) == 'W') wait(t);
        if (role(t) == 'C') {
            done[1].store(1, kSc);
            if (clipper::epoch_ends(d)) d.futex.wake_all();
            rouse();
        }
        bool stops = roles.find('X') == std::string::npos;
        if (role(t) == 'X' || (++ended == threads() - 1 && stops)) stop();
    }
    void finish() override {
        EXPECT(lead.inside.peek() == 0, "everybody who came has left");
        EXPECT(d.waiters.peek() == 0, "everybody who waited has left");
    }
};
SCENARIO(Led, "loop_owner", lead_submit_holder_dozes, "a submitter, and a holder that goes to sleep", "LS");
SCENARIO(Led, "loop_owner", lead_two_submit_holder_dozes, "two submitters, and a holder that goes to sleep", "LSS");
SCENARIO(Led, "loop_owner", lead_submit_holder_parks, "a submitter, and a loop thread that parks", "PS");
SCENARIO(Led, "loop_owner", lead_submit_many_open, "the same, while too many are open for it to step", "PR");
SCENARIO(Led, "loop_owner", lead_submit_tick, "two submitters, one of whom rings, while the parked thread's tick comes", "TNR");
SCENARIO(Led, "loop_owner", lead_stop, "the loop is stopped while it parks", "PX");
SCENARIO(Led, "loop_owner", lead_two_take, "two submitters find the ownership free", "FSS");
SCENARIO(Led, "loop_owner completion", lead_ask_parks, "a thread asks and blocks, and the loop thread parks", "PA");
SCENARIO(Led, "loop_owner completion", lead_wait_parked, "a thread blocks and leads, while the loop thread is parked", "FW");
SCENARIO(Led, "loop_owner completion", lead_two_wait, "two block: one leads, the other is not forgotten", "FWW");
SCENARIO(Led, "loop_owner completion", lead_wait_and_submit, "one leads, another submits", "FWS");
SCENARIO(Led, "loop_owner completion", lead_cancel, "one leads, another cancels what it waits for", "FWC", nothing, true);
SCENARIO(Led, "loop_owner", lead_close, "a submitter comes while the loop stops", "PNX");
SCENARIO(Led, "loop_owner completion", lead_close_led, "the loop is stopped while a thread leads", "FWX", nothing, true);
BROKEN(Led, "loop_owner", planted_left_unseen, "who leaves looks for news before, not after", "PS", left_unseen);
BROKEN(Led, "loop_owner completion", planted_forgot_waiters, "who leaves looks for waiters before, not after", "FWS", forgot_waiters);
BROKEN(Led, "loop_owner", planted_bell_read_late, "the parked thread reads the wakeups after it has left", "PR", bell_read_late);
BROKEN(Led, "loop_owner", planted_bell_read_twice, "it reads the wakeups once to see whether it rang, once to remember", "TSR",
       bell_read_twice);
BROKEN(Led, "loop_owner completion", planted_slept_unseen, "who leads sleeps without another look at its own slot", "FWC", slept_unseen, true);
BROKEN(Led, "loop_owner", planted_stop_unseen, "the loop thread parks without another look whether it is stopped", "PX", stop_unseen);
BROKEN(Led, "loop_owner", planted_touched_late, "who leaves looks at the engine when it has gone", "PNX", touched_late);
BROKEN(Led, "loop_owner", planted_closed_early, "who closes does not wait for those inside", "PNX", closed_early);

}  // namespace
}  // namespace schedules
