// The head of each message between a worker and a shard: 64 bytes, little-endian. docs/params.md
// has it as a table.
#pragma once

#include <cstdint>
#include <cstring>

namespace clipper {

enum ShardKind {
    SHARD_PULL = 1,
    SHARD_PUSH = 2,
    SHARD_CALL = 3,
    SHARD_ANSWER = 4,
    SHARD_REFUSED = 5,
    SHARD_SHARE = 6,
    SHARD_PULL_TABLES = 7,  // rows of several tables
    SHARD_PUSH_STEP = 8,    // one step of a model: rows of several tables, and dense variables
    SHARD_PULL_DENSE = 9,   // dense variables that have changed
    SHARD_CHANGES = 10,     // to a follower: rows that have changed; flag STREAM_ENDS: the stream
                            // ends
    SHARD_RECEIVED = 11,    // from a follower: it has all changes up to a position
    SHARD_REPLAY = 12       // to a follower: a push, to be applied as the shard applies it
};

// How a request is refused: a Status, or one of these.
enum ShardRefusal {
    NOT_ADMITTED = 101,
    NOT_READY = 102,
    OTHER_EPOCH = 103,
    TOO_STALE = 104,
    TOO_OLD = 105,
    NOT_SHARED = 107,
    WORKER_IN_USE = 108,  // another open connection has this worker number and another incarnation
    OVER_QUOTA = 111,     // nothing was applied
    READS_ONLY = 110,     // the connection may pull, but not push
    STATE_LOST = 109,     // the shard restarted without its data, and waits for `begin_anew`
    MOVED = 112           // another set has the rows now: `whereabouts` has its addresses
};

struct ShardHead {
    char magic[4];
    std::uint8_t version, kind, dtype, flags;
    std::uint32_t table, rows;
    std::uint64_t id, epoch, worker, sequence, model;
    float scale;
    std::uint32_t payload_bytes;  // a multiple of 8
};
static_assert(sizeof(ShardHead) == 64, "as the document has it");

// One table, or one dense variable, in a message about several.
struct ShardPart {
    std::uint32_t table;  // its number; kDenseBit and the number of a dense variable
    std::uint32_t n;      // ids; floats of a dense variable
};
constexpr std::uint32_t kDenseBit = 1u << 31;

// One table, or one dense variable, of CHANGES.
struct ChangedPart {
    std::uint32_t table, n;
    std::uint64_t steps;  // of the table
};

// One table, or one dense variable, of a push that a follower replays.
struct ReplayPart {
    std::uint32_t table, n;
    std::uint64_t steps;        // of the table or the variable, with this one
    float rate, first, second;  // factors of the optimizer's step
    std::uint32_t stamp;        // of the rows
};
static_assert(sizeof(ReplayPart) == 32, "as the document has it");

inline bool shard_head_is_one(const ShardHead& h) {
    return std::memcmp(h.magic, "CLPT", 4) == 0 && h.version == 1 && h.kind >= SHARD_PULL &&
           h.kind <= SHARD_REPLAY && h.payload_bytes % 8 == 0;
}

inline ShardHead shard_answer(const ShardHead& to, std::uint8_t kind, std::uint64_t epoch,
                              std::uint64_t model) {
    ShardHead head{};
    std::memcpy(head.magic, "CLPT", 4);
    head.version = 1;
    head.kind = kind;
    head.dtype = to.dtype;
    head.table = to.table;
    head.rows = to.rows;
    head.id = to.id;
    head.epoch = epoch;
    head.worker = to.worker;
    head.sequence = to.sequence;
    head.model = model;
    return head;
}

inline std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) & ~7ull; }

}  // namespace clipper
