# System calls and atomics that Cython does not have, declared from machine.hpp. All functions are
# nogil and may be called by any thread.
from libc.stdint cimport (uint8_t as u8, uint16_t as u16, uint32_t as u32, uint64_t as u64,
                          int32_t as i32, int64_t as i64)

cdef extern from "<atomic>" namespace "std" nogil:
    cdef enum memory_order:
        relaxed "std::memory_order_relaxed"
        acquire "std::memory_order_acquire"
        release "std::memory_order_release"
        acq_rel "std::memory_order_acq_rel"
        seq_cst "std::memory_order_seq_cst"
    cdef cppclass atomic[T]:
        T load(memory_order) noexcept
        void store(T, memory_order) noexcept
        T exchange(T, memory_order) noexcept
        T fetch_add(T, memory_order) noexcept
        T fetch_sub(T, memory_order) noexcept
        T fetch_or(T, memory_order) noexcept
        bint compare_exchange_strong(T&, T, memory_order) noexcept

cdef extern from "runtime/machine.hpp" namespace "clipper" nogil:
    size_t LINE "clipper::kLine"
    void CHECK "clipper::check"(bint ok, const char* what) noexcept   # aborts, in release too
    void pause() noexcept
    u64 monotonic_us() noexcept
    void* aligned_new(size_t bytes) noexcept          # zeroed, 64-byte aligned, free() it; NULL
                                                      # when memory is out
    # 0 woken, 1 timed out, 2 signal
    int futex_wait(atomic[u32]* word, u32 expected, u64 timeout_us) noexcept
    void futex_wake_all(atomic[u32]* word) noexcept
    void eventfd_signal(int fd) noexcept
    void eventfd_drain(int fd) noexcept
    void timer_slack_min() noexcept
    void* shared_new(size_t bytes, int* fd) noexcept  # zeroed pages of a sealed memfd; NULL: not
                                                      # available. Release by munmap and close
    bint passes_descriptors(int fd) noexcept          # a unix socket

cdef extern from "<sys/eventfd.h>" nogil:
    int EFD_NONBLOCK
    int EFD_CLOEXEC
    int eventfd(unsigned int initial, int flags) noexcept

cdef extern from "<sys/uio.h>" nogil:
    cdef struct iovec:
        void* iov_base
        size_t iov_len

cdef extern from "runtime/machine.hpp" namespace "clipper" nogil:
    # passed: a descriptor to send with the bytes, or -1
    ssize_t send_iovecs(int fd, iovec* pieces, size_t n, int passed) noexcept
