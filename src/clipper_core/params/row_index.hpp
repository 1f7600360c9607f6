// A bucket of the index of an embedding table: one cache line with five ids, their row numbers, and
// the lock of every row whose id belongs to the bucket.
//
// One cache line per probe, with the ids in it, is faster than tags that refer to ids elsewhere: a
// lookup in a table larger than the caches costs one miss, and one for the row. The lock needs no
// further line, because a lookup reads this one anyway.
//
// `index_look` reads ids while other threads may write them. This race is harmless: the result only
// determines what to prefetch and where to search first. A row is used only after it was found
// under the lock. The race detector is annotated accordingly.
//
// Functions that are called for each row of a pull or a push are here and not in
// embedding_rows.pyx, because calls between modules go through a pointer, which costs as much as
// the function itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sys/mman.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "params/initializer.hpp"
#include "runtime/machine.hpp"
#include "params/row_lock.hpp"

#if defined(__SANITIZE_THREAD__)
#define CLIPPER_RACES __attribute__((no_sanitize("thread"), noinline))
#else
#define CLIPPER_RACES inline
#endif

namespace clipper {

constexpr int kSlots = 5;
constexpr int kSpare = 24;  // spare buckets after the last one of a part; an id is at most this
                            // many buckets after its own
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
        else sched_yield();  // the holder may have been preempted
    }
}

// Under the lock.
inline void bucket_unlock(Bucket* b) { b->lock.give(); }
inline std::uint32_t bucket_count(const Bucket* b) { return b->lock.count(); }
inline bool bucket_overflowed(const Bucket* b) { return b->lock.overflowed(); }
inline void bucket_overflow(Bucket* b) { b->lock.overflow(); }

CLIPPER_RACES int slot_of(const Bucket* b, std::int64_t id, std::uint32_t count) {
#if defined(__AVX2__)
    const __m256i four = _mm256_cmpeq_epi64(
        _mm256_load_si256(reinterpret_cast<const __m256i*>(b->ids)), _mm256_set1_epi64x(id));
    unsigned found =
        unsigned(_mm256_movemask_pd(_mm256_castsi256_pd(four))) | unsigned(b->ids[4] == id) << 4;
#else
    unsigned found = 0;
#pragma GCC unroll 5
    for (int s = 0; s < kSlots; ++s) found |= unsigned(b->ids[s] == id) << s;
#endif
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
    b->lock.more(~0u);  // subtracts one; there was one, so the other bits do not change
}

inline std::uint64_t high_product(std::uint64_t a, std::uint64_t b) {
    return std::uint64_t((static_cast<unsigned __int128>(a) * b) >> 64);
}

// the least x of which high_product(x, n) is that much
inline std::uint64_t least_with(std::uint64_t product, std::uint64_t n) {
    return std::uint64_t(((static_cast<unsigned __int128>(product) << 64) + n - 1) / n);
}

// -- the whole
// -------------------------------------------------------------------------------------------------

struct Part {
    Bucket* buckets;
    std::uint64_t n;                  // number of them; spare ones follow, for ids that do not fit
                                      // into the last
    std::atomic<std::uint64_t> used;  // ids
    std::uint32_t depth;              // number of leading bits that their hashes share
};

struct Index {
    Part** directory;  // by the leading `depth` bits of a hash
    std::uint32_t depth;
};

inline std::uint64_t index_hash(std::int64_t id) {
    return mix64(std::uint64_t(id) + 0x9e3779b97f4a7c15u);
}

inline Part* index_part(const Index* index, std::uint64_t hash) {
    return index->directory[hash >> 1 >> (63 - index->depth)];
}

inline Bucket* part_home(const Part* part, std::uint64_t hash) {
    return part->buckets + high_product(hash << part->depth, part->n);
}

inline Bucket* index_bucket(const Index* index, std::uint64_t hash) {
    return part_home(index_part(index, hash), hash);
}

struct HeldRow {  // an id whose bucket is locked until bucket_unlock(home)
    Bucket* home;
    std::uint32_t row;  // kNoRow: it has none
};

// The row of an id whose home is locked.
inline std::uint32_t row_in(Bucket* home, std::int64_t id) {
    int slot = bucket_find(home, id);
    if (slot >= 0) return home->rows[slot];
    std::uint32_t row = kNoRow;
    bool on = bucket_overflowed(home);
    for (Bucket* b = home + 1; on; ++b) {
        bucket_lock(b);
        slot = bucket_find(b, id);
        if (slot >= 0) row = b->rows[slot];
        on = slot < 0 && bucket_overflowed(b) && b < home + kSpare;
        bucket_unlock(b);
    }
    return row;
}

inline HeldRow index_hold(const Index* index, std::uint64_t hash, std::int64_t id) {
    Bucket* home = index_bucket(index, hash);
    bucket_lock(home);
    return HeldRow{home, row_in(home, id)};
}

// -- prefetching
// -------------------------------------------------------------------------------------------------

struct Seen {  // where an id was found without the lock; valid until a part moves
    Bucket* home;
    Bucket* bucket;
    std::uint32_t slot;
    std::uint32_t row;  // kNoRow: none was found
};

inline void fetch_to_write(const void* at) {
#if defined(__x86_64__)
    // prefetchw; ignored by processors without it
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
    __builtin_prefetch(at, 1);
#endif
}

CLIPPER_RACES void index_look(Seen* seen, std::int64_t id) {
    Bucket* b = seen->home;
    for (;; ++b) {
        const int slot = slot_of(b, id, b->lock.count());
        if (slot >= 0) {
            seen->bucket = b;
            seen->slot = std::uint32_t(slot);
            seen->row = b->rows[slot];
            return;
        }
        if (!b->lock.overflowed() || b == seen->home + kSpare) break;
    }
    seen->row = kNoRow;
}

inline bool still_there(const Seen* seen, std::int64_t id) {  // its bucket is locked
    const Bucket* b = seen->bucket;
    return seen->slot < b->lock.count() && b->ids[seen->slot] == id &&
           b->rows[seen->slot] == seen->row;
}

// As index_hold, for an id that index_look has searched. The processor speculates that the id is
// still there, so it need not wait for the check.
inline std::uint32_t hold_seen(const Seen* seen, std::int64_t id) {
    bucket_lock(seen->home);
    if (seen->row != kNoRow) {
        if (seen->bucket == seen->home) {
            if (still_there(seen, id)) return seen->row;
        } else {
            bucket_lock(seen->bucket);
            const bool there = still_there(seen, id);
            bucket_unlock(seen->bucket);
            if (there) return seen->row;
        }
    }
    return row_in(seen->home, id);
}

// -- large memory: huge pages where available, released to the system at once
// ------------------------------------

constexpr std::size_t kHuge = 2u << 20;

inline void* row_pages_new(std::size_t bytes) {  // zeroed; NULL: no memory
    const std::size_t slack = bytes >= kHuge ? kHuge : 0;
    void* at = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    if (!slack) return at;
    char* begin = static_cast<char*>(at);
    char* aligned = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(begin) + kHuge - 1) /
                                            kHuge * kHuge);
    if (aligned > begin) munmap(begin, std::size_t(aligned - begin));
    const std::size_t pages = (bytes + 4095) / 4096 * 4096,
                      after = std::size_t(begin + bytes + slack - (aligned + pages));
    if (after >= 4096) munmap(aligned + pages, after);
    madvise(aligned, pages, MADV_HUGEPAGE);
    return aligned;
}

inline void row_pages_free(void* at, std::size_t bytes) {
    if (at) munmap(at, bytes);
}

inline void row_pages_touch(void* at, std::size_t bytes) {  // allocate the pages, so that their
                                                            // first use causes no page fault
#ifdef MADV_POPULATE_WRITE
    if (madvise(at, bytes, MADV_POPULATE_WRITE) == 0) return;
#endif
    for (std::size_t i = 0; i < bytes; i += 4096)
        static_cast<volatile char*>(at)[i] = static_cast<volatile char*>(at)[i];
}

}  // namespace clipper
