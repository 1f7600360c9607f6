// Learned states that threads read without a lock and without waiting, while others publish new
// ones, as templates over the atomics of their arguments, so that the checker of schedules
// (tests/schedules) can run the same source.
//
// A state is an immutable block. A cell has the word of its newest block: the address, and how many
// readers took the block from this word. Who publishes a block replaces the whole word at once,
// and adds the count of the word to the references of the block that was there.
//
// A reader counts itself and learns the address in one step, so the block cannot be freed in
// between. It gives the block back to the word if that still has it, else to the block. Which of
// several readers of one block gives back where does not matter: only the sum counts.
//
//   references of a block: 1 for each owner (an object of Python; a reader that was in the word
//   when the block was replaced), kInCell for each cell whose word has it. So the references of a
//   block do not become 0 while its readers are still to be added, though some have given it back.
#pragma once
#include <cstdint>

#include "runtime/machine.hpp"

namespace clipper {

constexpr std::uint64_t kReader = std::uint64_t(1) << 48;   // in a word: 65 535 readers at a time
constexpr std::uint64_t kAddress = kReader - 1;             // in a word
constexpr std::uint64_t kInCell = std::uint64_t(1) << 32;   // in the references of a block

// Return the address of the newest block; 0: the cell has none, and nothing is to be given back.
template <class Word>
inline std::uint64_t cell_hold(Word& word) {
    return word.fetch_add(kReader, std::memory_order_acquire) & kAddress;
}
// True for exactly one caller, the last, which then frees the block.
template <class Block>
inline bool state_release(Block& block) {
    return block.refs.fetch_sub(1, std::memory_order_acq_rel) == 1;
}
// Give a block back that `cell_hold` returned. True: the caller frees it.
template <class Word, class Block>
inline bool cell_give_back(Word& word, Block& block, std::uint64_t address) {
    std::uint64_t seen = word.load(std::memory_order_relaxed);
    while ((seen & kAddress) == address && seen >= kReader)
        if (word.compare_exchange_weak(seen, seen - kReader, std::memory_order_release))
            return false;
    return state_release(block);
}
// Make a block, of which the caller is an owner, the newest one of a cell. Return the word before;
// its block, if it has one, is to be passed to `block_replaced`. Several threads may publish at
// once.
template <class Word, class Block>
inline std::uint64_t cell_publish(Word& word, Block& next, std::uint64_t address) {
    next.refs.fetch_add(kInCell, std::memory_order_relaxed);
    return word.exchange(address, std::memory_order_acq_rel);
}
// Leave a cell without a block. Return the word before, as `cell_publish` does.
template <class Word>
inline std::uint64_t cell_empty(Word& word) {
    return word.exchange(0, std::memory_order_acquire);
}
// Let a block go that was the newest one of a cell. before: the word then. True: the caller frees
// it.
template <class Block>
inline bool block_replaced(Block& block, std::uint64_t before) {
    const std::uint64_t readers = before / kReader;
    return block.refs.fetch_sub(kInCell - readers, std::memory_order_acq_rel) == kInCell - readers;
}

}  // namespace clipper
