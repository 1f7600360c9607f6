// An allocator that fails by seed, for LD_PRELOAD: one in FAIL_ONE_IN calls of malloc, calloc, realloc, aligned_alloc,
// posix_memalign and operator new that a module of the core makes returns nullptr, or throws, while failing_on(1) holds.
//
// Only calls from clipper_core's modules fail: what Python, numpy and the C library do without memory is theirs to show.
// The caller is known by its return address: the address ranges of the modules are read when failing is switched on.
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" void* __libc_malloc(std::size_t);
extern "C" void* __libc_calloc(std::size_t, std::size_t);
extern "C" void* __libc_realloc(void*, std::size_t);
extern "C" void* __libc_memalign(std::size_t, std::size_t);

namespace {

struct Range {
    std::uintptr_t begin, end;
};
Range ranges[256];
int range_count = 0;
std::atomic<bool> on{false};
std::atomic<std::uint64_t> failed{0};
std::uint64_t one_in = 0;
std::atomic<std::uint64_t> state{1};

bool is_of_the_core(void* caller) {
    auto at = reinterpret_cast<std::uintptr_t>(caller);
    for (int i = 0; i < range_count; i++)
        if (at >= ranges[i].begin && at < ranges[i].end) return true;
    return false;
}

bool fails(void* caller) {
    if (!on.load(std::memory_order_relaxed) || !is_of_the_core(caller)) return false;
    std::uint64_t x = state.fetch_add(0x9E3779B97F4A7C15u, std::memory_order_relaxed);  // SplitMix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    if ((x ^ (x >> 31)) % one_in != 0) return false;
    failed.fetch_add(1, std::memory_order_relaxed);
    return true;
}

void find_modules() {
    range_count = 0;
    std::FILE* maps = std::fopen("/proc/self/maps", "r");
    char line[4096];
    while (maps != nullptr && range_count < 256 && std::fgets(line, sizeof line, maps) != nullptr) {
        unsigned long begin, end;
        char mode[8];
        if (std::strstr(line, "/clipper_core/") != nullptr && std::sscanf(line, "%lx-%lx %7s", &begin, &end, mode) == 3
            && mode[2] == 'x')
            ranges[range_count++] = {begin, end};
    }
    if (maps != nullptr) std::fclose(maps);
}

}  // namespace

#define CALLER __builtin_return_address(0)

extern "C" {

void failing_on(std::uint64_t seed, std::uint64_t each) {
    find_modules();
    state.store(seed * 0x9E3779B97F4A7C15u + 1);
    one_in = each;
    on.store(true);
}
std::uint64_t failing_off() {  // returns how many calls have failed
    on.store(false);
    return failed.exchange(0);
}

void* malloc(std::size_t n) {
    if (fails(CALLER)) return errno = ENOMEM, nullptr;
    return __libc_malloc(n);
}
void* calloc(std::size_t n, std::size_t size) {
    if (fails(CALLER)) return errno = ENOMEM, nullptr;
    return __libc_calloc(n, size);
}
void* realloc(void* p, std::size_t n) {
    if (fails(CALLER)) return errno = ENOMEM, nullptr;
    return __libc_realloc(p, n);
}
void* aligned_alloc(std::size_t align, std::size_t n) {
    if (fails(CALLER)) return errno = ENOMEM, nullptr;
    return __libc_memalign(align, n);
}
int posix_memalign(void** to, std::size_t align, std::size_t n) {
    if (fails(CALLER)) return ENOMEM;
    *to = __libc_memalign(align, n);
    return *to == nullptr ? ENOMEM : 0;
}

}  // extern "C"

void* operator new(std::size_t n) {
    void* p = fails(CALLER) ? nullptr : __libc_malloc(n ? n : 1);
    if (p == nullptr) throw std::bad_alloc();
    return p;
}
void* operator new[](std::size_t n) {
    void* p = fails(CALLER) ? nullptr : __libc_malloc(n ? n : 1);
    if (p == nullptr) throw std::bad_alloc();
    return p;
}
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
    return fails(CALLER) ? nullptr : __libc_malloc(n ? n : 1);
}
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept {
    return fails(CALLER) ? nullptr : __libc_malloc(n ? n : 1);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
