// A schedule-exploring model checker: runs the core's own headers under every interleaving of a few
// threads, and every value that the memory model of C++ lets a load return, up to a bound of each.
//
// One system thread. A scenario's threads are fibers; before each atomic step, each kernel call and
// each wait, the explorer chooses who goes on. Depth first over the list of choices, first choice
// first: to go on with the same thread, to read the newest value. A switch away from a thread that
// could go on is a preemption, of which a schedule has at most `preemptions`; a load of an older
// value, or a store that takes its place before others made earlier, is a stale access, of which it
// has at most `stale`.
//
// What a load may return. Each location keeps its modification order. Each thread has a view: for
// each location, the oldest store that it may still read, which is the newest that it has read or
// written itself or knows of by synchronisation. A release store carries its writer's view, an
// acquire load joins what it reads to its thread's. A store goes to the end of the order, or before
// others that its thread does not know of; a read-modify-write directly after what it read, whose
// release it carries on, and nothing ever comes between the two. A sequentially consistent access
// reads nothing older, and writes nothing before, the last sequentially consistent access to that
// location. Vector clocks travel along, and Data<T>, a plain variable, reports two accesses that no
// synchronisation orders.
//
// What is not explored: loads that return stores of the future (load buffering), spurious failure
// of a weak compare-exchange, and the plain fields of the headers themselves (those that only one
// side uses). After "Kang et al., A promising semantics for relaxed-memory concurrency" (POPL 2017,
// views) and Musuvathi and Qadeer, "Iterative context bounding" (PLDI 2007, preemption bound).
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace schedules {

using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr int kThreads = 5;      // the scenario's, and number 0: who sets it up and looks at its
                                 // end
constexpr int kLocations = 112;  // atomics alive in one scenario
constexpr int kSteps = 1500;     // a schedule that is longer does not end
using Mo = std::memory_order;

// An order as the headers spell it, with its place in the list of all of them: the copy of a header
// that is compiled here says order(17, std::memory_order_acquire) where the header says
// std::memory_order_acquire.
struct Order {
    int site;
    Mo mo;
    operator Mo() const { return mo; }  // for what is compiled over std::atomic as well, and never
                                        // run here
};
Order order(int site, Mo mo);  // weaker, when it is this site's turn

struct Clock {
    uint8_t view[kLocations];
    uint16_t time[8];
    void join(const Clock& other) {
        for (int i = 0; i < kLocations; ++i) view[i] = view[i] > other.view[i] ? view[i] : other.view[i];
        for (int i = 0; i < 8; ++i) time[i] = time[i] > other.time[i] ? time[i] : other.time[i];
    }
};

// -- what the model classes below ask of the explorer (checker.cpp)

int location_new(uint64_t value);
void location_name(int id, const char* name, int index);
void location_ordered(int id);
uint64_t newest_value(int id);
uint64_t step_load(int id, Order order);
void step_store(int id, uint64_t value, Order order);
enum class Rmw { exchange, add, sub, bit_or, bit_and };
uint64_t step_rmw(int id, Rmw what, uint64_t operand, uint64_t mask, Order order);
bool step_cas(int id, uint64_t* expected, uint64_t desired, Order order);
// stands for pause(): until somebody changes something
void spin();
int me();
[[noreturn]] void fail(const char* what);
void say(const char* what, uint64_t value);                  // a line in the trace of a failure
void check_failed_here(bool ok, const char* what);

template <class T>
struct Atomic {
    int id;
    Atomic() : id(location_new(0)) {}
    explicit Atomic(T value) : id(location_new(uint64_t(value))) {}
    Atomic(const Atomic&) = delete;
    Atomic& operator=(const Atomic&) = delete;

    T peek() const { return T(newest_value(id)); }  // no step: for what a scenario itself asserts
    T load(Order o) const { return T(step_load(id, o)); }
    void store(T v, Order o) { step_store(id, uint64_t(v), o); }
    T exchange(T v, Order o) { return T(step_rmw(id, Rmw::exchange, v, T(~T(0)), o)); }
    T fetch_add(T v, Order o) { return T(step_rmw(id, Rmw::add, v, T(~T(0)), o)); }
    T fetch_sub(T v, Order o) { return T(step_rmw(id, Rmw::sub, v, T(~T(0)), o)); }
    T fetch_or(T v, Order o) { return T(step_rmw(id, Rmw::bit_or, v, T(~T(0)), o)); }
    T fetch_and(T v, Order o) { return T(step_rmw(id, Rmw::bit_and, v, T(~T(0)), o)); }
    bool compare_exchange_strong(T& expected, T desired, Order o) {
        uint64_t seen = expected;
        bool done = step_cas(id, &seen, desired, o);
        expected = T(seen);
        return done;
    }
    bool compare_exchange_weak(T& expected, T desired, Order o) { return compare_exchange_strong(expected, desired, o); }
};
template <class T>
void name(Atomic<T>& a, const char* text, int index = -1) { location_name(a.id, text, index); }

// Relaxed accesses whose order the structure promises: from here on two of them, one a write, that
// nothing orders are a race.
template <class T>
void ordered(Atomic<T>& a) { location_ordered(a.id); }

struct Model {  // the Atomics policy of a scenario
    template <class T> using atomic = Atomic<T>;
};

// A plain variable that threads share: two accesses, one of them a write, that nothing orders are a
// race.
struct Shadow {
    uint16_t reads[8] = {};
    uint16_t write_time = 0;
    int writer = 0;
    void on_read(const char* name);
    void on_write(const char* name);
};
template <class T>
struct Data {
    T value{};
    mutable Shadow shadow;
    const char* name = "a plain variable";
    Data() = default;
    explicit Data(T v) : value(v) {}
    Data(const Data&) = delete;
    Data& operator=(const Data&) = delete;
    Data& operator=(T v) {
        shadow.on_write(name);
        value = v;
        return *this;
    }
    operator T() const {
        shadow.on_read(name);
        return value;
    }
};

// The kernel's side of a sleep. Both have a lock inside, so their calls are ordered among
// themselves and synchronise.
struct Kernel {
    Clock lock{};
    const char* name;
    explicit Kernel(const char* name_);
    Kernel(const Kernel&) = delete;
    void pass();  // takes and gives the lock
};
struct Futex : Kernel {
    uint32_t asleep = 0;  // threads, a bit each
    Futex() : Kernel("futex") {}
    void wait(Atomic<uint32_t>& word, uint32_t expected);
    void wake_all();
};
struct EventFd : Kernel {
    uint32_t count = 0;
    explicit EventFd(const char* name_ = "eventfd") : Kernel(name_) {}
    void signal();
    void wait();   // until it is readable
    void drain();
};

// -- scenarios

struct Scenario {
    virtual ~Scenario() = default;
    virtual int threads() const = 0;
    virtual void run(int thread) = 0;  // thread 1, 2, ...
    virtual void finish() {}           // after all of them
};
struct Entry {
    const char* name;
    const char* says;
    const char* headers;  // whose orders it exercises, in words apart
    bool broken;          // a planted bug: it must fail
    int size;             // 0: always; 1: only where CLIPPER_SCHEDULES=deep
    std::function<Scenario*()> make;
};
std::vector<Entry>& entries();
struct Register {
    Register(const char* name, const char* says, const char* headers, bool broken, int size, std::function<Scenario*()> make) {
        entries().push_back({name, says, headers, broken, size, std::move(make)});
    }
};
#define SCENARIO(type, headers, name, says, ...) \
    static Register register_##name(#name, says, headers, false, 0, [] { return static_cast<Scenario*>(new type{__VA_ARGS__}); })
#define DEEP(type, headers, name, says, ...) \
    static Register register_##name(#name, says, headers, false, 1, [] { return static_cast<Scenario*>(new type{__VA_ARGS__}); })
#define BROKEN(type, headers, name, says, ...) \
    static Register register_##name(#name, says, headers, true, 0, [] { return static_cast<Scenario*>(new type{__VA_ARGS__}); })
#define EXPECT(ok, what) \
    do { if (!(ok)) ::schedules::fail(what); } while (0)

}  // namespace schedules
