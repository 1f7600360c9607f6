// A bucket of the index of an embedding table: one cache line, which holds five ids, the rows they have, and the lock of every
// row whose id belongs here.
//
// One line a probe, with the ids in it, beats tags that lead to ids elsewhere: a lookup in a table larger than the caches costs
// one miss and the row's own. The lock costs no line of its own either, since whoever looks up must read this one.
//
// `fetch_row` reads ids while others may write them: a race, and a harmless one, since it only says what to fetch ahead; whoever uses
// a row finds it again under the lock. The race detector is told so.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sys/mman.h>

#include "machine.hpp"
#include "row_lock.hpp"

#if defined(__SANITIZE_THREAD__)
#define CLIPPER_RACES __attribute__((no_sanitize("thread"), noinline))
#else
#define CLIPPER_RACES inline
#endif

namespace clipper {

constexpr int kSlots = 5;
constexpr std::uint32_t kNoRow = 0xffffffffu;

struct alignas(64) Bucket {
    std::int64_t ids[kSlots];
    std::uint32_t rows[kSlots];
    RowLock<> lock;
};
static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

inline void bucket_lock(Bucket* b) {
    for (unsigned spins = 0; !b->lock.take(); ++spins) {
        if (spins < 64) pause();
        else sched_yield();  // its holder may have been put off the core
    }
}

// Under the lock.
inline void bucket_unlock(Bucket* b) { b->lock.give(); }
inline std::uint32_t bucket_count(const Bucket* b) { return b->lock.count(); }
inline bool bucket_overflowed(const Bucket* b) { return b->lock.overflowed(); }
inline void bucket_overflow(Bucket* b) { b->lock.overflow(); }

CLIPPER_RACES int slot_of(const Bucket* b, std::int64_t id, std::uint32_t count) {
    unsigned found = 0;
#pragma GCC unroll 5
    for (int s = 0; s < kSlots; ++s) found |= unsigned(b->ids[s] == id) << s;
    found &= (1u << count) - 1;
    return found ? __builtin_ctz(found) : -1;
}

inline int bucket_find(const Bucket* b, std::int64_t id) { return slot_of(b, id, bucket_count(b)); }

inline void bucket_add(Bucket* b, std::int64_t id, std::uint32_t row) {
    const std::uint32_t n = b->lock.count();
    b->ids[n] = id;
    b->rows[n] = row;
    b->lock.more(1);
}

inline void bucket_remove(Bucket* b, int slot) {
    const std::uint32_t last = b->lock.count() - 1;
    b->ids[slot] = b->ids[last];
    b->rows[slot] = b->rows[last];
    b->lock.more(~0u);  // one less; there was one, so the other bits stay
}

inline std::uint64_t high_product(std::uint64_t a, std::uint64_t b) {
    return std::uint64_t((static_cast<unsigned __int128>(a) * b) >> 64);
}

inline std::uint64_t least_with(std::uint64_t product, std::uint64_t n) {  // the least x of which high_product(x, n) is that much
    return std::uint64_t(((static_cast<unsigned __int128>(product) << 64) + n - 1) / n);
}

inline void fetch_bucket(const Bucket* b) { __builtin_prefetch(b, 1); }

// The row that an id seems to have.
CLIPPER_RACES void fetch_row(
    const Bucket* b, std::int64_t id, std::uint8_t* const* chunks, std::uint32_t shift, std::uint64_t row_bytes, std::size_t bytes) {
    const int slot = slot_of(b, id, b->lock.count());
    if (slot < 0) return;
    const std::uint32_t row = b->rows[slot];
    const char* at = reinterpret_cast<const char*>(chunks[row >> shift]) + (row & ((std::uint64_t(1) << shift) - 1)) * row_bytes;
    for (std::size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(at + i);
    __builtin_prefetch(at + bytes - 1);
}

// -- memory that is large: huge pages where the system has them, given back at once ------------------------------------

constexpr std::size_t kHuge = 2u << 20;

inline void* pages_new(std::size_t bytes) {  // zeroed; NULL: not to be had
    const std::size_t slack = bytes >= kHuge ? kHuge : 0;
    void* at = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    if (!slack) return at;
    char* begin = static_cast<char*>(at);
    char* aligned = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(begin) + kHuge - 1) / kHuge * kHuge);
    if (aligned > begin) munmap(begin, std::size_t(aligned - begin));
    const std::size_t pages = (bytes + 4095) / 4096 * 4096, after = std::size_t(begin + bytes + slack - (aligned + pages));
    if (after >= 4096) munmap(aligned + pages, after);
    madvise(aligned, pages, MADV_HUGEPAGE);
    return aligned;
}

inline void pages_free(void* at, std::size_t bytes) {
    if (at) munmap(at, bytes);
}

inline void pages_touch(void* at, std::size_t bytes) {  // so that nobody waits for the first use of each
#ifdef MADV_POPULATE_WRITE
    if (madvise(at, bytes, MADV_POPULATE_WRITE) == 0) return;
#endif
    for (std::size_t i = 0; i < bytes; i += 4096) static_cast<volatile char*>(at)[i] = static_cast<volatile char*>(at)[i];
}

}  // namespace clipper
