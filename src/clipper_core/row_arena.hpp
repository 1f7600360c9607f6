// Where the rows of an embedding table lie, as far as every pull and push asks: the address of a row.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "machine.hpp"

namespace clipper {

struct Arena {
    std::atomic<std::uint8_t*>* chunks;  // of all rows that there is room for; NULL where nothing was made yet
    std::uint32_t shift;    // a chunk has 1 << shift rows, and behind them a stamp for each
    std::uint64_t row_bytes;
    std::uint64_t rows_max;  // at most `room`
    std::uint64_t room;      // rows that there are chunks for
    std::atomic<std::uint32_t> lock;  // of the rest
    std::uint64_t next;               // rows handed out so far
    std::uint32_t free;               // the first of a list through the rows given back, or kNoRow
    std::uint64_t free_count;
    std::uint64_t chunk_count;
};

// Relaxed: who may touch the row took its bucket's lock after the thread that made the chunk gave it back; who only fetches it ahead
// of that may come while the chunk is made.
inline std::uint8_t* arena_chunk(const Arena* arena, std::uint32_t row) {
    return arena->chunks[row >> arena->shift].load(std::memory_order_relaxed);
}

inline float* arena_row(const Arena* arena, std::uint32_t row) {
    const std::uint64_t place = row & ((std::uint64_t(1) << arena->shift) - 1);
    return reinterpret_cast<float*>(arena_chunk(arena, row) + place * arena->row_bytes);
}

inline std::uint32_t* arena_stamp(const Arena* arena, std::uint32_t row) {
    const std::uint64_t place = row & ((std::uint64_t(1) << arena->shift) - 1);
    return reinterpret_cast<std::uint32_t*>(arena_chunk(arena, row) + (arena->row_bytes << arena->shift)) + place;
}

}  // namespace clipper
