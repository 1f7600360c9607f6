// The part that the loops of containers, of HTTP and of shards share: an epoll, with a tag for each
// descriptor, and functions that accept and close connections. The loop that holds a reactor
// decides which connections it takes and what their bytes mean.
//
// A tag has the kind of a descriptor and its number: a wake-up (an eventfd), a listener (its number
// is the descriptor), a connection or one end of a relay, with its generation. All events of a turn
// are fetched before the first is handled. If that closes a connection which has another event, the
// next connection may get its number: the loop compares the tags and ignores the event.
#pragma once

#include <sys/epoll.h>
#include "runtime/allocation.hpp"
#include "runtime/machine.hpp"

namespace clipper {

enum TagKind : std::uint32_t { kConnection = 0, kListener = 1, kWakeUp = 2, kRelay = 3 };

inline std::uint64_t tag_of(TagKind kind, std::uint32_t number) {
    return std::uint64_t(kind) << 62 | number;
}
inline std::uint64_t connection_tag(std::uint32_t number, std::uint32_t generation) {
    return std::uint64_t(generation & 0x3fffffffu) << 32 | number;
}
inline std::uint64_t relay_tag(std::uint32_t number, std::uint32_t generation) {
    return std::uint64_t(kRelay) << 62 | connection_tag(number, generation);
}
inline TagKind tag_kind(std::uint64_t tag) { return TagKind(tag >> 62); }
inline std::uint32_t tag_number(std::uint64_t tag) { return std::uint32_t(tag); }

struct Reactor {
    enum : int { kEventsMax = 256, kRejected = -2 };

    int epoll_fd = -1;
    int spare_fd = -1;  // closed for a moment to reject a connection when no descriptor is free
    std::vector<int> listeners;
    epoll_event events[kEventsMax];

    Reactor() = default;
    Reactor(const Reactor&) = delete;
    Reactor& operator=(const Reactor&) = delete;
    ~Reactor() {
        ::close(epoll_fd);
        ::close(spare_fd);
    }

    bool open() {  // false: no descriptor is free
        epoll_fd = epoll_create1(EPOLL_CLOEXEC);
        spare_fd = spare();
        return epoll_fd >= 0 && spare_fd >= 0;
    }

    // -- any thread
    bool watch(int fd, std::uint32_t events, std::uint64_t tag) {
        return control(EPOLL_CTL_ADD, fd, events, tag);
    }
    bool listen(int fd) {  // one thread at a time. False: fd is no socket, or there is no memory
        if (!make_room(listeners, listeners.size() + 1) || fcntl(fd, F_SETFL, O_NONBLOCK) < 0 ||
            !watch(fd, EPOLLIN, tag_of(kListener, std::uint32_t(fd))))
            return false;
        listeners.push_back(fd);
        return true;
    }

    // -- the loop
    void change(int fd, std::uint32_t events, std::uint64_t tag) {
        control(EPOLL_CTL_MOD, fd, events, tag);
    }
    void unwatch(int fd) { control(EPOLL_CTL_DEL, fd, 0, 0); }
    void close(int fd) {
        unwatch(fd);  // epoll would keep a descriptor that a fork holds too
        ::close(fd);
    }
    void close_listeners() {
        for (int fd : listeners) close(fd);
        listeners.clear();
    }

    // Wait for `events` and return their number; 0 when the time is over, -1 after a signal. Where
    // the kernel has no epoll_pwait2 (before 5.11) the time is rounded up to milliseconds.
    int wait(std::uint64_t timeout_us) {
#ifdef SYS_epoll_pwait2
        timespec t{time_t(timeout_us / 1000000u), long(timeout_us % 1000000u) * 1000};
        long rc = syscall(SYS_epoll_pwait2, epoll_fd, events, kEventsMax, &t, nullptr, 0);
        if (rc >= 0 || errno != ENOSYS) return int(rc);
#endif
        std::uint64_t ms = (timeout_us + 999u) / 1000u;
        return epoll_wait(epoll_fd, events, kEventsMax, ms > 1000000u ? 1000000 : int(ms));
    }

    // Accept a connection, non-blocking. Return -1 if none waits; kRejected if no descriptor was
    // free and the connection was closed: in the backlog it would wake the loop for ever.
    int accept(std::uint32_t listener) {
        int fd = accept4(int(listener), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0 || (errno != EMFILE && errno != ENFILE)) return fd;
        ::close(spare_fd);
        fd = accept4(int(listener), nullptr, nullptr, SOCK_CLOEXEC);
        if (fd >= 0) ::close(fd);
        else usleep(1000);  // another thread took the spare one: do not spin until one is free
        spare_fd = spare();
        return fd >= 0 ? kRejected : -1;
    }

  private:
    static int spare() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }
    bool control(int op, int fd, std::uint32_t reported, std::uint64_t tag) {
        epoll_event event{};
        event.events = reported;
        event.data.u64 = tag;
        return epoll_ctl(epoll_fd, op, fd, &event) == 0;
    }
};

}  // namespace clipper
