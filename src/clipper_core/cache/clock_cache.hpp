// Operations of the prediction cache that run concurrently without a lock, as templates over
// Atomics.
//
// A bucket is a sequence lock over five ways. It needs no stand-alone fence (which the race
// detector does not understand), because the accesses of the data words are ordered:
//
//     writer   sequence: s -> s+1 by compare-exchange (acquire)
//              data words: store release
//              sequence: store s+2, release
//     reader   sequence: load acquire, even
//              data words: load acquire
//              sequence: load again, equal to the first
//
// If a reader's load of a data word sees a writer's store, the two synchronise (release, acquire);
// that writer made the sequence odd before its store; so the reader's second load of the sequence,
// which comes after its load, returns that odd number or a later one, and differs from the first
// one unless the writer had finished before it. If it sees no such store, it read what the last
// finished writer wrote, which the first load acquired. So if both are equal and even, all words
// are of one version. A torn read is discarded, and is not undefined behaviour, because every word
// is an atomic. On x86-64 all these loads and stores are plain moves. Source: Boehm, "Can seqlocks
// get along with programming language memory models?", MSPC 2012.
//
// A miss needs no second load: a key never changes its way while it is resident, so a key that is
// resident throughout is always found. If the holder of the lock has changed nothing, it restores
// the old sequence, and readers need not retry. The sequence wraps after 2^31 writes: a reader
// would have to sleep through exactly that many writes to one bucket between two loads.
//
// Reference bits are set by a plain store, only where clear: two threads at once may lose a bit,
// which costs a little hit ratio and never a wrong answer.
#pragma once

#include <sched.h>
#include <sys/mman.h>

#include "runtime/machine.hpp"
#include "runtime/row_hash.hpp"

namespace clipper {

using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// -- buckets
// -------------------------------------------------------------------------------------------------

constexpr int kWays = 5;
// a way's tag is the top byte of its hi; 0 is an empty way
constexpr int kTagShift = 56;
constexpr uint64_t kKeyHi = (uint64_t(1) << kTagShift) - 1;
// a lookup that meets so many writers in a row is a miss
constexpr int kLookupTries = 128;

template <class Atomics>
struct alignas(128) Bucket {  // a miss reads the first of its two cache lines only
    template <class T> using atomic = typename Atomics::template atomic<T>;
    atomic<uint32_t> sequence;
    atomic<uint8_t> referenced;  // one bit per way
    uint8_t hand;                // under the lock: the next way that eviction considers
    uint8_t spare[2];
    // lo ends within the first line: bucket_match_by
    atomic<uint64_t> lo[kWays], hi[kWays], word[kWays];
};
static_assert(sizeof(Bucket<StdAtomics>) == 128, "a bucket is two cache lines");

struct Found {
    uint64_t word;
    uint8_t tag;
};

// Return a bit for each way with this lo. It uses compares and shifts only, because a mispredicted
// branch costs more than everything else.
template <class Atomics>
inline unsigned bucket_match(const Bucket<Atomics>& b, uint64_t lo) {
    unsigned ways = 0;
#pragma GCC unroll 5
    for (int w = 0; w < kWays; ++w)
        ways |= unsigned(b.lo[w].load(std::memory_order_acquire) == lo) << w;
    return ways;
}

// The same, in the fastest way of this machine. On x86-64 an aligned vector load reads each aligned
// word in it whole and in order, as the loads above do; but C++ has no name for that, and a plain
// vector load beside another thread's store would be a race. So the load is assembly, opaque to the
// compiler, with a barrier to its reordering. It also needs no separate function with a target
// attribute, which could not be inlined. The race detector cannot see these loads, so it, and the
// checker of schedules, use the loads above.
template <class Atomics>
inline unsigned bucket_match_by(Variant, const Bucket<Atomics>& b, uint64_t lo) {
    return bucket_match(b, lo);
}

#if CLIPPER_VECTORS
#ifdef __AVX512F__
#define CLIPPER_CLOBBERS "memory", "xmm4", "xmm5", "xmm6", "xmm16", "k1"
#else  // the compiler does not use zmm16 and k1
#define CLIPPER_CLOBBERS "memory", "xmm4", "xmm5", "xmm6"
#endif
template <>
inline unsigned bucket_match_by(Variant variant, const Bucket<StdAtomics>& b, uint64_t lo) {
    struct Half { char bytes[32]; };
    struct Line { Half half[2]; };
    const Line& line = reinterpret_cast<const Line&>(b);  // sequence and bits; lo[0..4]; hi[0..1]
    if (variant == kAvx512) {  // one compare; zmm16 and up do not slow SSE code that follows
        uint32_t equal;
        asm volatile(
            "vpbroadcastq %[lo], %%zmm16\n\tvpcmpeqq %[line], %%zmm16, %%k1\n\tkmovw %%k1, %[equal]"
            : [equal] "=r"(equal)
            : [lo] "r"(lo), [line] "m"(line)
            : CLIPPER_CLOBBERS);
        return equal >> 1 & 31;
    }
    if (variant == kAvx2) {
        uint32_t low, high;
        asm volatile(
            "vmovq %[lo], %%xmm4\n\tvpbroadcastq %%xmm4, %%ymm4\n\t"
            "vpcmpeqq %[first], %%ymm4, %%ymm5\n\tvpcmpeqq %[second], %%ymm4, %%ymm6\n\t"
            "vmovmskpd %%ymm5, %[low]\n\tvmovmskpd %%ymm6, %[high]"
            : [low] "=&r"(low), [high] "=r"(high)
            : [lo] "r"(lo), [first] "m"(line.half[0]), [second] "m"(line.half[1])
            : CLIPPER_CLOBBERS);
        return (low >> 1 | high << 3) & 31;
    }
    return bucket_match(b, lo);
}
#undef CLIPPER_CLOBBERS
#endif

template <class Atomics>
inline void bucket_touch(Bucket<Atomics>& b, int way) {
    uint8_t bits = b.referenced.load(std::memory_order_relaxed), bit = uint8_t(1u << way);
    if (!(bits & bit)) b.referenced.store(uint8_t(bits | bit), std::memory_order_relaxed);
}

// Look up without the lock. Tag 0: not found. A word that is a pointer may be dangling already:
// look it up again under the lock.
template <class Atomics>
inline Found bucket_find(Bucket<Atomics>& b, uint64_t lo, uint64_t hi, Variant variant = kPlain) {
    for (int tries = 0; tries < kLookupTries; ++tries) {
        uint32_t before = b.sequence.load(std::memory_order_acquire);
        unsigned ways = bucket_match_by(variant, b, lo);
        if (!ways) return {0, 0};
        int way = __builtin_ctz(ways);
        uint64_t held = b.hi[way].load(std::memory_order_acquire);
        uint64_t word = b.word[way].load(std::memory_order_acquire);
        if (!(before & 1) && b.sequence.load(std::memory_order_relaxed) == before) {
            if ((held & kKeyHi) != hi || !(held >> kTagShift)) return {0, 0};
            bucket_touch(b, way);
            return {word, uint8_t(held >> kTagShift)};
        }
        pause();
    }
    return {0, 0};
}

template <class Atomics>
inline bool bucket_try_lock(Bucket<Atomics>& b, uint32_t* sequence) {
    *sequence = b.sequence.load(std::memory_order_relaxed);
    return !(*sequence & 1) &&
           b.sequence.compare_exchange_strong(*sequence, *sequence + 1, std::memory_order_acquire);
}
template <class Atomics>
inline uint32_t bucket_lock(Bucket<Atomics>& b) {
    uint32_t sequence;
    for (unsigned spins = 1; !bucket_try_lock(b, &sequence); ++spins) {
        if (spins % 64) pause(); else sched_yield();  // the holder may have been preempted
    }
    return sequence;
}
template <class Atomics>
inline void bucket_unlock(Bucket<Atomics>& b, uint32_t sequence) {
    b.sequence.store(sequence + 2, std::memory_order_release);
}
template <class Atomics>
inline void bucket_unlock_unchanged(Bucket<Atomics>& b, uint32_t sequence) {
    b.sequence.store(sequence, std::memory_order_release);
}

// -- under the lock
// -------------------------------------------------------------------------------------------------

template <class Atomics>
inline Found bucket_peek(const Bucket<Atomics>& b, int way) {
    uint64_t held = b.hi[way].load(std::memory_order_relaxed);
    return {b.word[way].load(std::memory_order_relaxed), uint8_t(held >> kTagShift)};
}

template <class Atomics>
// way of a key; -1: not found
inline int bucket_way(const Bucket<Atomics>& b, uint64_t lo, uint64_t hi) {
    unsigned ways = bucket_match(b, lo);
    if (!ways) return -1;
    int way = __builtin_ctz(ways);
    uint64_t held = b.hi[way].load(std::memory_order_relaxed);
    return (held & kKeyHi) == hi && held >> kTagShift ? way : -1;
}

// With the lock, for a word that is a pointer: hold(word) counts a reference before an eviction can
// free it.
template <class Atomics, class Hold>
inline Found bucket_find_held(Bucket<Atomics>& b, uint64_t lo, uint64_t hi, Hold hold) {
    Found found = {0, 0};
    uint32_t sequence;
    for (int tries = 0; !bucket_try_lock(b, &sequence); pause())
        if (++tries == kLookupTries) return found;
    int way = bucket_way(b, lo, hi);
    if (way >= 0) {
        found = bucket_peek(b, way);
        hold(found);
        bucket_touch(b, way);
    }
    bucket_unlock_unchanged(b, sequence);
    return found;
}

// The victim in a full bucket: the hand moves until it finds a way whose reference bit is clear,
// and clears the bits that it passes. A new entry starts with its bit clear; starting with it set
// costs some two points of hit ratio.
//   kClock  the hand moves on, so that each entry has a whole turn to be used again.
//   kSieve  the hand stays on the new entry, which is evicted first unless it is used: an entry
//           that is used once is soon evicted, one that is used twice stays. This keeps lazy
//           promotion and quick demotion of SIEVE (Zhang et al., NSDI 2024). Its queue from oldest
//           to newest, within the five ways, lost 1 to 3 points. Compared with CLOCK: 1 to 9 points
//           more hits with a static skew, 3 to 5 fewer when popularity drifts fast.
enum Policy : uint8_t { kClock, kSieve };

template <class Atomics>
inline int bucket_victim(Bucket<Atomics>& b, Policy policy) {
    unsigned bits = b.referenced.load(std::memory_order_relaxed);
    int hand = b.hand;
    for (; bits >> hand & 1; hand = (hand + 1) % kWays) bits &= ~(1u << hand);
    b.referenced.store(uint8_t(bits), std::memory_order_relaxed);
    b.hand = uint8_t(policy == kSieve ? hand : (hand + 1) % kWays);
    return hand;
}

// The way of a fill: the one with the same lo (so that a lo is in a bucket once), else an empty
// one, else the victim.
template <class Atomics>
inline int bucket_choose(Bucket<Atomics>& b, uint64_t lo, Policy policy) {
    unsigned ways = bucket_match(b, lo);
    if (ways) return __builtin_ctz(ways);
    for (int w = 0; w < kWays; ++w)
        if (!bucket_peek(b, w).tag) return w;
    return bucket_victim(b, policy);
}

// An empty way is all zeros, as the table starts: tag 0, lo 0, word 0.
template <class Atomics>
inline void bucket_write(Bucket<Atomics>& b, int way, uint64_t lo, uint64_t hi, uint8_t tag,
                         uint64_t word) {
    b.lo[way].store(lo, std::memory_order_release);
    b.hi[way].store(hi | uint64_t(tag) << kTagShift, std::memory_order_release);
    b.word[way].store(word, std::memory_order_release);
}

// Clear the reference bit of a way. True: it was set.
template <class Atomics>
inline bool bucket_spend(Bucket<Atomics>& b, int way) {
    uint8_t bits = b.referenced.load(std::memory_order_relaxed), bit = uint8_t(1u << way);
    b.referenced.store(uint8_t(bits & ~bit), std::memory_order_relaxed);
    return bits & bit;
}

// Fill a way, under the lock. Return its previous content. evicted: whether it belonged to another
// key.
template <class Atomics>
inline Found bucket_fill(Bucket<Atomics>& b, uint64_t lo, uint64_t hi, Found value, bool* evicted,
                         Policy policy = kClock) {
    bool replaced = bucket_way(b, lo, hi) >= 0;
    int way = bucket_choose(b, lo, policy);
    Found gone = bucket_peek(b, way);
    bucket_write(b, way, lo, hi, value.tag, value.word);
    *evicted = gone.tag && !replaced;
    return gone;
}

template <class Atomics>
inline Found bucket_take(Bucket<Atomics>& b, int way) {
    Found gone = bucket_peek(b, way);
    bucket_write(b, way, 0, 0, 0, 0);
    bucket_spend(b, way);
    return gone;
}

// CLOCK over the ways of one tag: a bit for each that was not referenced since the last time.
template <class Atomics>
inline uint32_t bucket_sweep(Bucket<Atomics>& b, uint8_t tag) {
    uint32_t ways = 0;
    for (int w = 0; w < kWays; ++w)
        if (bucket_peek(b, w).tag == tag && !bucket_spend(b, w)) ways |= 1u << w;
    return ways;
}

template <class Atomics>
inline bool bucket_holds(const Bucket<Atomics>& b, uint8_t tag) {
    for (int w = 0; w < kWays; ++w)
        if (bucket_peek(b, w).tag == tag) return true;
    return false;
}

// One bit of a bit map that many threads write, each bit under its own bucket's lock.
template <class Word>
inline void map_write(Word* words, uint64_t index, bool set) {
    uint64_t bit = uint64_t(1) << (index & 63);
    if (set == bool(words[index >> 6].load(std::memory_order_relaxed) & bit)) return;
    if (set) words[index >> 6].fetch_or(bit, std::memory_order_relaxed);
    else words[index >> 6].fetch_and(~bit, std::memory_order_relaxed);
}

inline int first_bit(uint64_t word) { return __builtin_ctzll(word); }

// -- memory
// -------------------------------------------------------------------------------------------------

// Write to the bucket without changing it, so that its page is allocated. No lock is needed.
template <class Atomics>
inline void bucket_touch(Bucket<Atomics>& b) {
    uint32_t sequence = b.sequence.load(std::memory_order_relaxed);
    b.sequence.compare_exchange_strong(sequence, sequence, std::memory_order_relaxed);
}

// Words that every fill writes, in a cache line of their own, because the words before are read by
// every lookup.
struct alignas(kLine) CacheMeters {
    std::atomic<uint64_t> blob_bytes, entries, evictions, blob_hand;
};

inline void fetch_lines(const void* bucket) {
    __builtin_prefetch(bucket);
    __builtin_prefetch(static_cast<const char*>(bucket) + kLine);
}

// Allocate zeroed pages, which use no memory until they are written; NULL: no memory. Huge pages
// halve the time of a lookup that misses the CPU's caches. They need an aligned start, which
// kernels before 6.7 do not ensure.
constexpr std::size_t kHugePage = std::size_t(2) << 20;
inline std::size_t whole_pages(std::size_t bytes) {
    return (bytes + 0xffff) & ~std::size_t(0xffff);
}

inline void* pages_new(std::size_t bytes) {
    std::size_t length = whole_pages(bytes), spare = length >= 2 * kHugePage ? kHugePage : 0;
    void* p =
        mmap(nullptr, length + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    if (!spare) return p;
    char* start = static_cast<char*>(p);
    std::size_t before = -reinterpret_cast<std::uintptr_t>(start) & (kHugePage - 1);
    if (before) munmap(start, before);
    if (before < spare) munmap(start + before + length, spare - before);
    madvise(start + before, length, MADV_HUGEPAGE);
    return start + before;
}
inline void pages_free(void* p, std::size_t bytes) { munmap(p, whole_pages(bytes)); }

}  // namespace clipper
