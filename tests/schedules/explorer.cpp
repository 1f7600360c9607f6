// The explorer behind checker.hpp: fibers, the memory model, the search.
#include "explorer.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>

// CLIPPER_UCONTEXT: as on machines for which no switch is written here
#if !defined(__x86_64__) || defined(CLIPPER_UCONTEXT)
#include <ucontext.h>
#endif

namespace schedules {

extern const char* const kSites[] = {
#include "sites.inc"  // "ring.hpp:31" and so on, in the order of their numbers
    nullptr};

bool failed;
std::string failure;
std::vector<std::string> trace;
Mutant mutant;

std::vector<Entry>& entries() {
    static std::vector<Entry> all;
    return all;
}

namespace {

// -- fibers: a stack each, and a switch that saves what a call must keep

constexpr std::size_t kStack = 128 * 1024;
#if defined(__x86_64__) && !defined(CLIPPER_UCONTEXT)
extern "C" void schedules_switch(void** save, void* to);
asm(R"(
.text
.globl schedules_switch
schedules_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
struct Fiber {
    void* at = nullptr;
    void start(char* stack, void (*entry)()) {
        void** top = reinterpret_cast<void**>(stack + kStack - 64);
        *--top = nullptr;                            // where entry would return to: it never does; keeps the stack aligned
        *--top = reinterpret_cast<void*>(entry);
        for (int i = 0; i < 6; ++i) *--top = nullptr;
        at = top;
    }
    static void go(Fiber& from, Fiber& to) { schedules_switch(&from.at, to.at); }
};
#else
struct Fiber {
    ucontext_t at;
    void start(char* stack, void (*entry)()) {
        getcontext(&at);
        at.uc_stack.ss_sp = stack;
        at.uc_stack.ss_size = kStack;
        at.uc_link = nullptr;
        makecontext(&at, entry, 0);
    }
    static void go(Fiber& from, Fiber& to) { swapcontext(&from.at, &to.at); }
};
#endif

struct Message {
    uint64_t value;
    bool releases;
    bool rmw;  // it read the store before it, and nothing may come between the two
    Clock clock;
};
struct Location {
    std::vector<Message> order;  // modification order
    int sc;                      // the newest store that a sequentially consistent access has made or seen
    const char* name;
    int index;
    bool ordered;
    Shadow shadow;  // where `ordered`
};
enum class State { ready, done, spinning, on_futex, on_event };
struct Thread {
    Fiber fiber;
    Clock clock;
    State state;
    EventFd* event;
    uint64_t changed, mark;  // changes that it made; changes by others when it last spun
    bool read_stale;
};
struct Choice {
    int options, taken;
};
struct Failed {};

alignas(64) char stacks[kThreads][kStack];
Thread threads[kThreads];
Location locations[kLocations];
int thread_count, location_count, current, steps, preemptions_left, stale_left;
uint64_t changes;
std::vector<Choice> choices;
std::size_t depth;
bool tracing;
std::vector<Kernel*> kernels;
Scenario* scenario;

// -- words for the trace

const char* mo_name(Mo mo) {
    switch (mo) {
        case Mo::memory_order_relaxed: return "relaxed";
        case Mo::memory_order_acquire: return "acquire";
        case Mo::memory_order_release: return "release";
        case Mo::memory_order_acq_rel: return "acq_rel";
        default: return "seq_cst";
    }
}
std::string place(int id) {
    const Location& l = locations[id];
    std::string text = l.name ? l.name : "atomic " + std::to_string(id);
    return l.index < 0 ? text : text + "[" + std::to_string(l.index) + "]";
}
void note(const std::string& what) { trace.push_back("thread " + std::to_string(current) + "  " + what); }
void note_step(int id, const char* what, const std::string& value, Order o, const char* more = "") {
    if (!tracing) return;
    char line[256];
    std::snprintf(line, sizeof line, "%-18s %-9s %-14s %-8s %s%s", place(id).c_str(), what, value.c_str(), mo_name(o.mo),
                  o.site >= 0 ? kSites[o.site] : "", more);
    note(line);
}

// -- choosing

int choose(int options) {
    if (options == 1) return 0;
    if (depth == choices.size()) choices.push_back({options, 0});
    Choice& c = choices[depth++];
    if (c.options == 0 && c.taken < options) c.options = options;  // of a schedule that is replayed
    if (c.options != options) {
        std::fprintf(stderr, "a scenario is not deterministic: %d options where there were %d\n", options, c.options);
        std::exit(3);
    }
    return c.taken;
}
uint64_t others(const Thread& t) { return changes - t.changed; }
bool can_go(const Thread& t) {
    switch (t.state) {
        case State::ready: return true;
        case State::spinning: return others(t) != t.mark;
        case State::on_event: return t.event->count > 0;
        default: return false;
    }
}
void go_to(int next) {
    if (next == current) return;
    Thread &from = threads[current], &to = threads[next];
    current = next;
    if (next) to.state = State::ready;
    Fiber::go(from.fiber, to.fiber);
}
int able(int* list) {
    int n = 0;
    for (int t = 1; t <= thread_count; ++t)
        if (t != current && can_go(threads[t])) list[n++] = t;
    return n;
}
void point() {  // before each step
    if (current == 0) return;
    if (++steps > kSteps) fail("it does not end: a thread makes no progress");
    if (preemptions_left == 0) return;
    int list[kThreads], n = able(list);
    if (n == 0) return;
    int c = choose(n + 1);
    if (c == 0) return;
    --preemptions_left;
    go_to(list[c - 1]);
}
void leave() {  // the current thread cannot go on, or has ended
    int list[kThreads], n = able(list);
    if (n) return go_to(list[choose(n)]);
    if (can_go(threads[current])) {
        threads[current].state = State::ready;
        return;
    }
    std::string who;
    for (int t = 1; t <= thread_count; ++t)
        if (threads[t].state != State::done) {
            const char* on = threads[t].state == State::on_futex ? "the futex" : threads[t].state == State::on_event
                ? threads[t].event->name : "a lock";
            who += (who.empty() ? "thread " : ", thread ") + std::to_string(t) + " waits on " + on;
        }
    if (!who.empty()) fail(("nobody wakes it: " + who).c_str());
    go_to(0);
}

// -- the memory model

bool is_sc(Mo mo) { return mo == Mo::memory_order_seq_cst; }
bool acquires(Mo mo) { return mo == Mo::memory_order_acquire || mo == Mo::memory_order_acq_rel || is_sc(mo); }
bool releases(Mo mo) { return mo == Mo::memory_order_release || mo == Mo::memory_order_acq_rel || is_sc(mo); }

void see(int id, int index, Mo mo) {
    Clock& clock = threads[current].clock;
    const Message& m = locations[id].order[std::size_t(index)];
    if (clock.view[id] < index) clock.view[id] = uint8_t(index);
    if (acquires(mo) && m.releases) clock.join(m.clock);
    if (is_sc(mo) && locations[id].sc < index) locations[id].sc = index;
}
// Everybody's view of a location into which a store was put at `index`, before others made earlier.
void renumber(int id, int index) {
    auto shift = [=](Clock& clock) { clock.view[id] = uint8_t(clock.view[id] + (clock.view[id] >= index)); };
    for (int t = 0; t <= thread_count; ++t) shift(threads[t].clock);
    for (int i = 0; i < location_count; ++i)
        for (Message& m : locations[i].order) shift(m.clock);
    for (Kernel* k : kernels) shift(k->lock);
    if (locations[id].sc >= index) ++locations[id].sc;
}
void write(int id, int after, uint64_t value, Mo mo, bool carries_on) {
    Location& l = locations[id];
    Thread& t = threads[current];
    int index = after + 1, size = int(l.order.size());
    if (size > 250) fail("too many stores to one location: make the scenario smaller");
    if (l.order.back().value != value) ++changes, ++t.changed;
    if (index < size) renumber(id, index);
    t.clock.view[id] = uint8_t(index);
    l.order.insert(l.order.begin() + index, {value, releases(mo), carries_on, t.clock});
    Message& m = l.order[std::size_t(index)];
    const Message& before = l.order[std::size_t(after)];
    if (carries_on && before.releases) {
        if (m.releases) m.clock.join(before.clock);
        else m.clock = before.clock, m.releases = true;
        m.clock.view[id] = uint8_t(index);
    }
    if (releases(mo)) ++t.clock.time[current];
    if (is_sc(mo) && l.sc < index) l.sc = index;
}
int oldest(int id, Mo mo) {
    int seen = threads[current].clock.view[id];
    return is_sc(mo) && locations[id].sc > seen ? locations[id].sc : seen;
}
int newest(int id) { return int(locations[id].order.size()) - 1; }
int read_index(int id, Mo mo) {
    int last = newest(id), first = oldest(id, mo);
    if (stale_left == 0 || first == last || current == 0) return last;
    int back = choose(last - first + 1);
    if (back) --stale_left, threads[current].read_stale = true;
    return last - back;
}
// The stores after which a new one may be put, the newest first.
int places(int id, Mo mo, int* list) {
    const Location& l = locations[id];
    int n = 0, last = newest(id);
    list[n++] = last;
    if (stale_left && current)
        for (int i = last - 1; i >= oldest(id, mo); --i)
            if (!l.order[std::size_t(i) + 1].rmw) list[n++] = i;
    return n;
}
int place_for_store(int id, Mo mo) {
    int list[256], c = choose(places(id, mo, list));
    if (c) --stale_left, threads[current].read_stale = true;
    return list[c];
}
uint64_t apply(Rmw what, uint64_t a, uint64_t b) {
    switch (what) {
        case Rmw::exchange: return b;
        case Rmw::add: return a + b;
        case Rmw::sub: return a - b;
        case Rmw::bit_or: return a | b;
        default: return a & b;
    }
}
bool split(Order o) { return mutant.split && o.site == mutant.site; }

// -- one schedule

void body() {
    scenario->run(current);
    threads[current].state = State::done;
    leave();
}
void reset() {
    for (int i = 0; i < location_count; ++i) locations[i].order.clear();
    location_count = current = steps = 0;
    kernels.clear();
    changes = 0;
    depth = 0;
    failed = false;
    failure.clear();
    trace.clear();
    std::memset(&threads[0].clock, 0, sizeof(Clock));
    threads[0].clock.time[0] = 1;
    threads[0].state = State::ready;
}
void run_once(const Entry& entry, int preemptions, int stale) {
    reset();
    preemptions_left = preemptions, stale_left = stale;
    std::unique_ptr<Scenario> owned(entry.make());
    scenario = owned.get();
    thread_count = scenario->threads();
    for (int i = 1; i <= thread_count; ++i) {
        Thread& t = threads[i];
        t.clock = threads[0].clock;
        t.clock.time[i] = 1;
        t.state = State::ready;
        t.changed = t.mark = 0;
        t.read_stale = false;
        t.fiber.start(stacks[i], body);
    }
    ++threads[0].clock.time[0];
    try {
        leave();
        if (failed) return;
        for (int i = 1; i <= thread_count; ++i) threads[0].clock.join(threads[i].clock);
        scenario->finish();
    } catch (const Failed&) {
    }
}
bool next_schedule() {
    while (!choices.empty() && choices.back().taken + 1 == choices.back().options) choices.pop_back();
    if (choices.empty()) return false;
    ++choices.back().taken;
    return true;
}

}  // namespace

// -- what checker.hpp declares

Order order(int site, Mo mo) {
    if (site != mutant.site || mutant.split) return {site, mo};
    return {site, mutant.mo};
}

int me() { return current; }

void fail(const char* what) {
    failed = true;
    failure = what;
    if (tracing) note(std::string("FAILS: ") + what);
    if (current == 0) throw Failed();
    int from = current;
    current = 0;
    Fiber::go(threads[from].fiber, threads[0].fiber);
    std::abort();  // nobody comes back to a failed schedule
}
void check_failed_here(bool ok, const char* what) {
    if (!ok) fail(what);
}
void say(const char* what, uint64_t value) {
    if (tracing) note(std::string(what) + " " + std::to_string(value));
}

int location_new(uint64_t value) {
    if (location_count == kLocations) {
        std::fprintf(stderr, "more than %d atomics in one scenario\n", kLocations);
        std::exit(3);
    }
    Location& l = locations[location_count];
    l.order.clear();
    l.order.push_back({value, false, false, {}});
    l.sc = 0;
    l.name = nullptr;
    l.index = -1;
    l.ordered = false;
    l.shadow = Shadow();
    threads[0].clock.view[location_count] = 0;
    return location_count++;
}
void location_name(int id, const char* name, int index) {
    locations[id].name = name;
    locations[id].index = index;
}
uint64_t newest_value(int id) { return locations[id].order.back().value; }
void location_ordered(int id) { locations[id].ordered = true; }

uint64_t step_load(int id, Order o) {
    point();
    if (locations[id].ordered) locations[id].shadow.on_read(place(id).c_str());
    int index = read_index(id, o.mo);
    see(id, index, o.mo);
    uint64_t value = locations[id].order[std::size_t(index)].value;
    if (tracing) note_step(id, "load", std::to_string(value), o, index < newest(id) ? "   stale" : "");
    return value;
}
void step_store(int id, uint64_t value, Order o) {
    point();
    if (locations[id].ordered) locations[id].shadow.on_write(place(id).c_str());
    int last = newest(id), after = place_for_store(id, o.mo);
    write(id, after, value, o.mo, false);
    if (tracing) note_step(id, "store", std::to_string(value), o, after < last ? "   before a store made earlier" : "");
}
uint64_t step_rmw(int id, Rmw what, uint64_t operand, uint64_t mask, Order o) {
    static const char* const names[] = {"exchange", "add", "sub", "or", "and"};
    point();
    int last = newest(id), at = split(o) ? last : place_for_store(id, o.mo);
    see(id, at, o.mo);
    uint64_t before = locations[id].order[std::size_t(at)].value, after = apply(what, before, operand) & mask;
    if (split(o)) {
        if (tracing) note_step(id, "load", std::to_string(before), o, "   split");
        point();
    }
    write(id, split(o) ? newest(id) : at, after, o.mo, !split(o));
    if (tracing) note_step(id, names[int(what)], std::to_string(before) + " -> " + std::to_string(after), o,
                           at < last ? "   before a store made earlier" : "");
    return before;
}
bool step_cas(int id, uint64_t* expected, uint64_t desired, Order o) {
    point();
    Location& l = locations[id];
    int candidates[256], n = 0, last = newest(id);
    candidates[n++] = last;
    if (stale_left && current)
        for (int i = last - 1; i >= oldest(id, o.mo); --i)
            if (l.order[std::size_t(i)].value != *expected || !l.order[std::size_t(i) + 1].rmw) candidates[n++] = i;
    int c = choose(n), index = candidates[c];
    if (c) --stale_left, threads[current].read_stale = true;
    uint64_t seen = l.order[std::size_t(index)].value;
    see(id, index, o.mo);
    if (seen != *expected) {
        if (tracing) note_step(id, "cas", std::to_string(seen) + ", not " + std::to_string(*expected), o, c ? "   stale" : "");
        *expected = seen;
        return false;
    }
    if (split(o)) {
        if (tracing) note_step(id, "load", std::to_string(seen), o, "   split");
        point();
    }
    write(id, split(o) ? newest(id) : index, desired, o.mo, !split(o));
    if (tracing) note_step(id, "cas", std::to_string(seen) + " -> " + std::to_string(desired), o,
                           c ? "   before a store made earlier" : "");
    return true;
}
void spin() {
    Thread& t = threads[current];
    if (current == 0) fail("whoever sets the scenario up waits for itself");
    if (++steps > kSteps) fail("it does not end: a thread spins");
    bool again = t.read_stale || others(t) != t.mark;
    t.read_stale = false;
    t.mark = others(t);
    t.state = again ? State::ready : State::spinning;
    if (tracing) note(again ? "looks again" : "spins until something changes");
    leave();
}

void Shadow::on_read(const char* name) {
    const Clock& clock = threads[current].clock;
    if (write_time > clock.time[writer] && writer != current)
        fail((std::string("a race: reads ") + name + " while thread " + std::to_string(writer) + " writes it").c_str());
    reads[current] = clock.time[current];
}
void Shadow::on_write(const char* name) {
    const Clock& clock = threads[current].clock;
    if (write_time > clock.time[writer] && writer != current)
        fail((std::string("a race: writes ") + name + " while thread " + std::to_string(writer) + " writes it").c_str());
    for (int t = 0; t < kThreads; ++t)
        if (t != current && reads[t] > clock.time[t])
            fail((std::string("a race: writes ") + name + " while thread " + std::to_string(t) + " reads it").c_str());
    writer = current;
    write_time = clock.time[current];
}

Kernel::Kernel(const char* name_) : name(name_) { kernels.push_back(this); }
void Kernel::pass() {
    Thread& t = threads[current];
    t.clock.join(lock);
    lock = t.clock;
    ++t.clock.time[current];
}
void Futex::wait(Atomic<uint32_t>& word, uint32_t expected) {
    point();
    pass();
    int index = read_index(word.id, Mo::memory_order_relaxed);
    see(word.id, index, Mo::memory_order_relaxed);
    uint64_t value = locations[word.id].order[std::size_t(index)].value;
    if (tracing) note("futex wait for " + place(word.id) + " = " + std::to_string(expected) +
                      (value == expected ? ": sleeps" : ": it is " + std::to_string(value)));
    if (value != expected) return;
    asleep |= 1u << current;
    threads[current].state = State::on_futex;
    leave();
    pass();
}
void Futex::wake_all() {
    point();
    pass();
    if (tracing) note("futex wake all");
    for (int t = 1; t <= thread_count; ++t)
        if (asleep >> t & 1) threads[t].state = State::ready;
    asleep = 0;
}
void EventFd::signal() {
    point();
    pass();
    ++count;
    if (tracing) note(std::string("writes ") + name);
}
void EventFd::wait() {
    point();
    if (tracing) note(std::string(count ? "finds readable " : "sleeps on ") + name);
    if (count) return;
    Thread& t = threads[current];
    t.state = State::on_event;
    t.event = this;
    leave();
}
void EventFd::drain() {
    point();
    pass();
    count = 0;
    if (tracing) note(std::string("drains ") + name);
}

// -- the search

Result explore(const Entry& entry, int preemptions, int stale, uint64_t executions_max) {
    Result r;
    r.preemptions = preemptions, r.stale = stale;
    auto begun = std::chrono::steady_clock::now();
    choices.clear();
    do {
        run_once(entry, preemptions, stale);
        ++r.executions;
        if (failed) {
            r.failed = true;
            r.failure = failure;
            for (std::size_t i = 0; i < depth; ++i) r.taken.push_back(choices[i].taken);
            break;
        }
        if (r.executions == executions_max) break;
    } while (next_schedule());
    r.exhausted = choices.empty();
    r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    return r;
}
// The failure with the fewest preemptions and stale reads.
Result explore_simplest_first(const Entry& entry, int preemptions, int stale, uint64_t executions_max) {
    Result last;
    uint64_t executions = 0;
    double seconds = 0;
    for (int p = 0; p <= preemptions; ++p)
        for (int s = p == preemptions ? stale : 0; s <= stale; s += stale ? stale : 1) {
            last = explore(entry, p, s, executions_max);
            executions += last.executions, seconds += last.seconds;
            last.executions = executions, last.seconds = seconds;
            if (last.failed) return last;
        }
    return last;
}
void replay(const Entry& entry, int preemptions, int stale, const std::vector<int>& taken) {
    choices.clear();
    for (int c : taken) choices.push_back({0, c});
    tracing = true;
    run_once(entry, preemptions, stale);
    tracing = false;
}

}  // namespace schedules
