// What the command asks of the explorer.
#pragma once
#include "checker.hpp"

namespace schedules {

extern const char* const kSites[];  // "ring.hpp:31" and so on, by number

struct Mutant {
    int site = -1;
    bool split = false;  // a read-modify-write as a load and a store
    Mo mo = Mo::memory_order_seq_cst;
};

struct Result {
    uint64_t executions = 0;
    bool exhausted = false, failed = false;
    std::string failure;
    std::vector<int> taken;
    int preemptions = 0, stale = 0;
    double seconds = 0;
};

// One schedule after the other, to the first failure, to the end, or to `executions_max`.
Result explore(const Entry& entry, int preemptions, int stale, uint64_t executions_max);
Result explore_simplest_first(const Entry& entry, int preemptions, int stale, uint64_t executions_max);
void replay(const Entry& entry, int preemptions, int stale, const std::vector<int>& taken);

extern Mutant mutant;                   // the one that runs now
extern bool failed;                     // of the last schedule
extern std::string failure;
extern std::vector<std::string> trace;  // of the last replay

}  // namespace schedules
