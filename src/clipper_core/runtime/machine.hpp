// Functions that Cython does not have: aligned memory, atomics by policy, invariants that abort,
// and system calls.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <climits>
#include <ctime>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

namespace clipper {

constexpr std::size_t kLine = 64;  // bytes of a cache line on every machine we build for

// The interpreter compiles extensions with -DNDEBUG, so assert() has no effect in release builds;
// invariants of the core are always checked.
[[noreturn]] inline void check_failed(const char* what, const char* file, int line) {
    std::fprintf(stderr, "clipper_core: broken invariant: %s (%s:%d)\n", what, file, line);
    std::abort();
}
#define CLIPPER_CHECK(ok, what) \
    (__builtin_expect(!(ok), 0) ? ::clipper::check_failed(what, __FILE__, __LINE__) : (void)0)
inline void check(bool ok, const char* what) {
    if (__builtin_expect(!ok, 0)) check_failed(what, "clipper_core", 0);
}

// Lock-free structures are templates over this policy, so that the checker of schedules can run the
// same source.
struct StdAtomics {
    template <class T> using atomic = std::atomic<T>;
};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline std::uint64_t monotonic_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return std::uint64_t(t.tv_sec) * 1000000u + std::uint64_t(t.tv_nsec) / 1000u;
}

// Owns one object on the heap, aligned as its type requires, because the memory of a Python object
// is aligned to 16 only.
inline void* aligned_new(std::size_t bytes) {
    void* p = nullptr;
    if (posix_memalign(&p, kLine, bytes ? bytes : 1) != 0) return nullptr;
    std::memset(p, 0, bytes);
    return p;
}

// 0 woken or value changed, 1 timed out, 2 interrupted by a signal.
inline int futex_wait(std::atomic<std::uint32_t>* word, std::uint32_t expected,
                      std::uint64_t timeout_us) {
    timespec t{time_t(timeout_us / 1000000u), long(timeout_us % 1000000u) * 1000};
    long rc = syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), FUTEX_WAIT_PRIVATE,
                      expected, &t, nullptr, 0);
    if (rc == 0 || errno == EAGAIN) return 0;
    return errno == ETIMEDOUT ? 1 : 2;
}
inline void futex_wake_all(std::atomic<std::uint32_t>* word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
            nullptr, 0);
}

inline void eventfd_signal(int fd) {
    std::uint64_t one = 1;
    while (::write(fd, &one, sizeof one) < 0 && errno == EINTR) {}
}
inline void eventfd_drain(int fd) {
    std::uint64_t n;
    while (::read(fd, &n, sizeof n) < 0 && errno == EINTR) {}
}

// Allocate memory that other processes can map to read: an anonymous file. It is sealed after it is
// mapped here, so it can neither shrink (which would kill a reader by SIGBUS) nor be written by
// another process. nullptr: the kernel does not support this, or memfds would use more than half of
// the descriptors, which connections need too.
inline void* shared_new(std::size_t bytes, int* fd) {
#if defined(MFD_ALLOW_SEALING) && defined(F_ADD_SEALS)
    constexpr unsigned kNoExecSeal = 0x0008u;       // MFD_NOEXEC_SEAL, Linux 6.3
    constexpr int kSealFutureWrite = 0x0010;        // F_SEAL_FUTURE_WRITE, Linux 5.1
    rlimit files;
    int f = memfd_create("clipper-rows", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
    if (f < 0 && errno == EINVAL) f = memfd_create("clipper-rows", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (f < 0) return nullptr;
    void* map = MAP_FAILED;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && rlim_t(f) < files.rlim_cur / 2 &&
        ftruncate(f, off_t(bytes)) == 0)
        map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, f, 0);
    if (map != MAP_FAILED &&
        fcntl(f, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | kSealFutureWrite | F_SEAL_SEAL) != 0) {
        munmap(map, bytes);
        map = MAP_FAILED;
    }
    if (map == MAP_FAILED) {
        close(f);
        return nullptr;
    }
    *fd = f;
    return map;
#else
    (void)bytes, (void)fd;
    return nullptr;
#endif
}

// Return whether descriptors can be sent over this socket.
inline bool passes_descriptors(int fd) {
    int domain = 0;
    socklen_t n = sizeof domain;
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n) == 0 && domain == AF_UNIX;
}

// Call sendmsg; the descriptor `passed` (-1: none) is sent with the first byte.
inline ssize_t send_iovecs(int fd, iovec* pieces, std::size_t n, int passed) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = n;
    if (passed >= 0) {
        std::memset(control, 0, sizeof control);
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof passed);
        std::memcpy(CMSG_DATA(head), &passed, sizeof passed);
    }
    return sendmsg(fd, &message, MSG_NOSIGNAL);
}

// Set the timer slack of the calling thread to 1 ns; by default, sleeping threads wake up to 50 us
// late.
inline void timer_slack_min() { prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0); }

}  // namespace clipper
