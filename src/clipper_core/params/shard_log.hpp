// The log of a shard: the changes since its last message to each follower, and the pushes that it
// has seen.
//
// A follower copies whole rows, so the log keeps only the ids of rows that changed; the rows are
// read when they are sent. A row may therefore be sent twice. The order is kept because one thread
// sends. So the log is a list of ids, and each follower has a position in it. The same log serves
// followers that poll continuously, for which a push waits before it is answered, and followers
// that poll periodically, which are up to a period behind. Source: the parameter server's design
// document, "Embedding Replica" (updated key sets), with a position for each follower instead of
// one set of keys: a set that is cleared when one follower has read it would lose what the others
// have not read.
//
// A repetition of a push is recognized by (worker, sequence): for each worker, the log has the
// highest sequence and a window of 1024 below it.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>
#include "runtime/allocation.hpp"
#include "runtime/machine.hpp"

namespace clipper {

enum Sighting { NEW_PUSH = 0, SEEN_PUSH = 1, OLD_PUSH = 2 };

struct Sequences {  // of one worker
    static constexpr std::uint64_t kWindow = 1024;
    std::uint64_t high = 0, touched = 0;
    std::uint64_t seen[kWindow / 64] = {};

    bool bit(std::uint64_t n) const { return seen[n % kWindow / 64] >> (n % 64) & 1; }
    Sighting look(std::uint64_t n) const {
        if (n > high) return NEW_PUSH;
        if (high - n >= kWindow) return OLD_PUSH;
        return bit(n) ? SEEN_PUSH : NEW_PUSH;
    }
    void mark(std::uint64_t n) {
        if (n > high) {
            // a peer chooses n, so at most one window is cleared
            std::uint64_t skipped = n - high < kWindow ? n - high : kWindow;
            for (std::uint64_t i = 0; i < skipped; ++i)
                seen[(n - i) % kWindow / 64] &= ~(1ull << ((n - i) % 64));
            high = n;
        }
        seen[n % kWindow / 64] |= 1ull << (n % 64);
    }
};

static_assert(sizeof(Sequences) == 144, "snapshots hold it");

struct Change {  // one push: its rows in one table, and its worker
    std::uint32_t table, n;
    std::uint64_t worker, sequence;
};

struct Held {  // an answer that waits for followers
    std::uint64_t position;
    std::uint32_t conn, generation;
    std::uint64_t words[10];  // its head and its counts
};

struct Follower {
    bool on = false, waited = false, lost = false;
    std::uint64_t taken = 0, acknowledged = 0;  // positions: numbers of changes
    bool streams = false;    // its connection is sent changes as they come
    bool ends = false;       // the stream is to end
    bool replays = false;    // it gets pushes, and applies them
    bool apart = false;      // it reads on a thread of its own, which `wake_fd` wakes
    std::uint32_t conn = 0;  // the connection
    std::uint32_t messages = 0;  // received on this connection
    std::uint64_t clock = 0;     // of its last message; sent back with the next changes
    bool wants_reply = false;    // it wants a message at once, even if nothing has changed
};

struct ShardLog {
    static constexpr std::size_t kFollowers = 12;
    std::mutex guard;
    std::deque<Change> changes;
    std::deque<std::int64_t> ids;
    std::uint64_t first = 0;     // position of changes[0]
    std::uint64_t ids_max = 1u << 24, held_max = 1u << 16, workers_max = 1u << 16;
    Follower followers[kFollowers];
    std::deque<Held> held;
    std::unordered_map<std::uint64_t, Sequences> workers;
    std::uint64_t clock = 0;
    int fd = -1;                 // written when an answer waits for followers
    int wake_fd = -1;            // written at the next change if `asleep`: see ShardLoop.sleep_at
    bool asleep = false;

    std::uint64_t position() const { return first + changes.size(); }
    bool waits() const {
        for (auto& one : followers) if (one.on && one.waited) return true;
        return false;
    }
    bool polled() const {  // a follower that pushes wait for polls instead of having a stream
        for (auto& one : followers) if (one.on && one.waited && !one.streams && !one.apart)
            return true;
        return false;
    }
    bool listened() const {
        for (auto& one : followers) if (one.on && !one.lost) return true;
        return false;
    }
    Sighting look(std::uint64_t worker, std::uint64_t sequence) const {
        if (sequence == 0) return NEW_PUSH;
        auto at = workers.find(worker);
        return at == workers.end() ? NEW_PUSH : at->second.look(sequence);
    }
    Sequences* window(std::uint64_t worker) {  // nullptr: there is no memory
        try {
            if (workers.size() >= workers_max && workers.find(worker) == workers.end())
                forget_oldest();
            auto& one = workers[worker];
            one.touched = ++clock;
            return &one;
        } catch (const std::bad_alloc&) {
            return nullptr;
        }
    }
    const Sequences* find(std::uint64_t worker) const {  // nullptr: unknown
        auto at = workers.find(worker);
        return at == workers.end() ? nullptr : &at->second;
    }
    // false: there is no memory, and a repetition would not be recognized
    bool mark(std::uint64_t worker, std::uint64_t sequence) {
        if (sequence == 0) return true;
        auto one = window(worker);
        if (one != nullptr) one->mark(sequence);
        return one != nullptr;
    }
    std::uint64_t highest(std::uint64_t worker) const {
        auto at = workers.find(worker);
        return at == workers.end() ? 0 : at->second.high;
    }
    bool known(std::vector<std::uint64_t>& each) const {  // false: there is no memory
        if (!make_room(each, workers.size())) return false;
        for (auto& one : workers) each.push_back(one.first);
        return true;
    }
    void forget_oldest() {
        auto oldest = workers.begin();
        for (auto at = workers.begin(); at != workers.end(); ++at)
            if (at->second.touched < oldest->second.touched) oldest = at;
        if (oldest != workers.end()) workers.erase(oldest);
    }
    // Append a change. Without memory for it, every follower has to copy everything again. False:
    // there was no memory to mark the sequence.
    bool append(std::uint32_t table, const std::int64_t* each, std::uint32_t n,
                std::uint64_t worker, std::uint64_t sequence) {
        bool marked = mark(worker, sequence);
        if (asleep) {
            asleep = false;
            eventfd_signal(wake_fd);
        }
        if (!listened()) {
            ++first;             // no follower needs it any more
            return marked;
        }
        try {
            ids.insert(ids.end(), each, each + n);
            changes.push_back({table, n, worker, sequence});
        } catch (const std::bad_alloc&) {
            lose_all();
            return marked;
        }
        while (ids.size() > ids_max) lose_last();
        return marked;
    }
    void lose_all() {            // a change could not be noted
        for (auto& one : followers) one.lost = one.lost || one.on;
        drop_until(position());
        ids.clear();
        ++first;
    }
    // Collect the changes that `one` does not have, and advance its position: ids by table, and
    // (worker, sequence) pairs. False: no memory, and nothing changed.
    bool gather(Follower& one, std::vector<std::vector<std::int64_t>>& by_table,
                std::vector<std::uint64_t>& pushes, std::uint64_t most) {
        std::uint64_t taken = one.taken;
        std::size_t at = ids.size();
        for (std::size_t i = std::size_t(taken - first); i < changes.size(); ++i)
            at -= changes[i].n;
        std::size_t begin = at;
        try {
            for (; taken < position() && at - begin < most; ++taken) {
                const Change& change = changes[std::size_t(taken - first)];
                if (by_table.size() <= change.table) by_table.resize(change.table + 1);
                auto& into = by_table[change.table];
                into.insert(into.end(), ids.begin() + std::ptrdiff_t(at),
                            ids.begin() + std::ptrdiff_t(at + change.n));
                if (change.sequence) {
                    pushes.push_back(change.worker);
                    pushes.push_back(change.sequence);
                }
                at += change.n;
            }
        } catch (const std::bad_alloc&) {
            return false;
        }
        one.taken = taken;
        trim();
        return true;
    }
    void lose_last() {           // the follower that is farthest behind must copy everything again
        Follower* last = nullptr;
        for (auto& one : followers)
            if (one.on && !one.lost && (last == nullptr || one.taken < last->taken)) last = &one;
        if (last == nullptr) {
            drop_until(position());
            return;
        }
        last->lost = true;
        trim();
    }
    void drop_until(std::uint64_t until) {
        while (first < until && !changes.empty()) {
            ids.erase(ids.begin(), ids.begin() + changes.front().n);
            changes.pop_front();
            ++first;
        }
    }
    void trim() {
        std::uint64_t least = position();
        for (auto& one : followers) if (one.on && !one.lost && one.taken < least) least = one.taken;
        drop_until(least);
    }
    std::uint64_t sure() const {  // position that every follower that pushes wait for has reached
        std::uint64_t least = position();
        for (auto& one : followers)
            if (one.on && one.waited && one.acknowledged < least) least = one.acknowledged;
        return least;
    }
};

}  // namespace clipper
