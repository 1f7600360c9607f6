// The command that the tests call: explorer COMMAND PREEMPTIONS STALE EXECUTIONS_MAX ARGUMENT...
//    list                                       every scenario
//    run ... NAME...                            each to the end, or to its first failure
//    mutants ... SITE:ORDER...                  each until a scenario of its header fails; ORDER may be "split"
//    replay P S 0 NAME CHOICES [SITE:ORDER]     one schedule, told step by step
#include "explorer.hpp"

#include <cstdio>
#include <cstdlib>

namespace schedules {
namespace {

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char c : text) {
        if (c == '"' || c == '\\') out += '\\';
        if (c == '\n') out += "\\n";
        else out += c;
    }
    return out + "\"";
}
std::string choice_list(const Result& r) {  // "3 3 0,0,1": preemptions, stale reads, choices
    if (!r.failed) return "";
    std::string text = std::to_string(r.preemptions) + " " + std::to_string(r.stale) + " ";
    for (std::size_t i = 0; i < r.taken.size(); ++i) text += (i ? "," : "") + std::to_string(r.taken[i]);
    return text;
}
const Entry* entry_of(const std::string& name) {
    for (const Entry& e : entries())
        if (e.name == name) return &e;
    std::fprintf(stderr, "no scenario %s\n", name.c_str());
    std::exit(2);
}
void print_result(const Entry& e, const Result& r, const char* extra) {
    std::printf("{\"name\": %s, \"executions\": %llu, \"seconds\": %.3f, \"exhausted\": %s, \"failure\": %s, \"choices\": %s%s",
                quoted(e.name).c_str(), static_cast<unsigned long long>(r.executions), r.seconds, r.exhausted ? "true" : "false",
                quoted(r.failure).c_str(), quoted(choice_list(r)).c_str(), extra);
    std::printf(", \"trace\": [");
    for (std::size_t i = 0; i < trace.size(); ++i) std::printf("%s%s", i ? ", " : "", quoted(trace[i]).c_str());
    std::printf("]}\n");
    std::fflush(stdout);
}

Mutant mutant_of(const std::string& text) {
    Mutant m;
    std::size_t colon = text.find(':');
    std::string to = text.substr(colon + 1);
    m.site = std::atoi(text.c_str());
    m.split = to == "split";
    m.mo = to == "relaxed" ? Mo::memory_order_relaxed : to == "acquire" ? Mo::memory_order_acquire
         : to == "release" ? Mo::memory_order_release : Mo::memory_order_acq_rel;
    return m;
}
void tell_failure(const Entry& e, Result& r, const char* extra) {
    if (r.failed) replay(e, r.preemptions, r.stale, r.taken);
    else trace.clear();
    print_result(e, r, extra);
}
int run(int preemptions, int stale, uint64_t executions_max, int n, char** names) {
    for (int i = 0; i < n; ++i) {
        const Entry& e = *entry_of(names[i]);
        Result r = e.broken ? explore_simplest_first(e, preemptions, stale, executions_max)
                            : explore(e, preemptions, stale, executions_max);
        if (r.failed && !e.broken) r = explore_simplest_first(e, preemptions, stale, executions_max);
        tell_failure(e, r, "");
    }
    return 0;
}
Result hunt(const std::string& header, int preemptions, int stale, uint64_t executions_max, const Entry** by) {
    Result all;
    all.exhausted = true;
    for (int p = 0; p <= preemptions; ++p) {  // few preemptions first, over all scenarios: most mutants fall at once
        all.exhausted = true;
        for (const Entry& e : entries()) {
            if (e.broken || e.size || (" " + std::string(e.headers) + " ").find(" " + header + " ") == std::string::npos)
                continue;
            Result r = explore(e, p, stale, executions_max);
            all.executions += r.executions, all.seconds += r.seconds;
            *by = &e;
            if (r.failed) {
                r.executions = all.executions, r.seconds = all.seconds;
                return r;
            }
            all.exhausted = all.exhausted && r.exhausted;
        }
    }
    return all;
}
int mutants(int preemptions, int stale, uint64_t executions_max, int n, char** list) {
    for (int i = 0; i < n; ++i) {
        mutant = mutant_of(list[i]);
        std::string site = kSites[mutant.site], header = site.substr(0, site.find('.'));
        const Entry* by = nullptr;
        Result r = hunt(header, preemptions, stale, executions_max, &by);
        if (!by) {
            std::fprintf(stderr, "no scenario exercises %s\n", header.c_str());
            return 2;
        }
        tell_failure(*by, r, (", \"mutant\": " + quoted(list[i]) + ", \"caught\": " + (r.failed ? "true" : "false")).c_str());
    }
    return 0;
}
int replay_one(int preemptions, int stale, int n, char** args) {
    if (n < 2) return 2;
    const Entry& e = *entry_of(args[0]);
    std::vector<int> taken;
    for (const char* at = args[1]; *at;) {
        char* end;
        taken.push_back(int(std::strtol(at, &end, 10)));
        at = *end ? end + 1 : end;
    }
    if (n > 2) mutant = mutant_of(args[2]);
    replay(e, preemptions, stale, taken);
    Result r;
    r.executions = 1, r.failed = failed, r.failure = failure, r.taken = taken, r.preemptions = preemptions, r.stale = stale;
    print_result(e, r, "");
    return 0;
}
int list() {
    for (const Entry& e : entries())
        std::printf("{\"name\": %s, \"says\": %s, \"headers\": %s, \"broken\": %s, \"deep\": %s}\n", quoted(e.name).c_str(),
                    quoted(e.says).c_str(), quoted(e.headers).c_str(), e.broken ? "true" : "false", e.size ? "true" : "false");
    return 0;
}

}  // namespace
}  // namespace schedules

int main(int argc, char** argv) {
    using namespace schedules;
    std::string command = argc > 1 ? argv[1] : "list";
    if (command == "list") return list();
    if (argc < 5) return 2;
    int preemptions = std::atoi(argv[2]), stale = std::atoi(argv[3]);
    uint64_t executions_max = std::strtoull(argv[4], nullptr, 10);
    if (command == "run") return run(preemptions, stale, executions_max, argc - 5, argv + 5);
    if (command == "mutants") return mutants(preemptions, stale, executions_max, argc - 5, argv + 5);
    if (command == "replay") return replay_one(preemptions, stale, argc - 5, argv + 5);
    return 2;
}
