// Checks of runtime/reactor.hpp over real sockets, by one thread. test_reactor.py runs each in a
// process of its own, by its name; what does not hold ends the process.
#include <sys/un.h>
#include <map>
#include <string>
#include "runtime/reactor.hpp"

namespace {

using clipper::connection_tag;
std::map<std::string, void (*)(clipper::Reactor&)> tests;

#define CHECK(ok) CLIPPER_CHECK(ok, #ok)
#define TEST(name)                                           \
    void name(clipper::Reactor& reactor);                    \
    const bool name##_listed = tests.emplace(#name, name).second; \
    void name(clipper::Reactor& reactor)

struct Listener {  // its address is chosen by the kernel
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    socklen_t size = sizeof address;
    Listener() {
        address.sun_family = AF_UNIX;
        CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) == 0);
        CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
        CHECK(listen(fd, 16) == 0);
    }
    void dial(int client) { CHECK(connect(client, reinterpret_cast<sockaddr*>(&address), size) == 0); }
};

int dialed(Listener& listener) {
    int client = socket(AF_UNIX, SOCK_STREAM, 0);
    listener.dial(client);
    return client;
}

TEST(events_say_what_they_are_of) {
    Listener listener;
    int wake_up = eventfd(1, EFD_NONBLOCK), pair[2], seen = 0;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && write(pair[1], "x", 1) == 1);
    CHECK(reactor.watch(wake_up, EPOLLIN, clipper::tag_of(clipper::kWakeUp, 7)));
    CHECK(reactor.watch(pair[0], EPOLLIN, connection_tag(8, ~0u)));
    CHECK(reactor.listen(listener.fd));
    dialed(listener);
    CHECK(reactor.wait(0) == 3);
    for (int i = 0; i < 3; ++i) {
        std::uint64_t tag = reactor.events[i].data.u64;
        std::uint32_t number = clipper::tag_number(tag);
        seen |= 1 << clipper::tag_kind(tag);
        if (clipper::tag_kind(tag) == clipper::kWakeUp) CHECK(number == 7);
        if (clipper::tag_kind(tag) == clipper::kConnection) CHECK(number == 8);
        if (clipper::tag_kind(tag) == clipper::kListener) CHECK(reactor.accept(number) >= 0);
    }
    CHECK(seen == 7);
}

TEST(connections_beyond_descriptors_are_rejected) {
    Listener listener;
    int clients[3], held, last = -1;
    for (int& client : clients) client = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(reactor.listen(listener.fd));
    rlimit files{64, 64};
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    while ((held = dup(0)) >= 0) last = held;
    for (int client : clients) listener.dial(client);
    for (int client : clients) {
        char byte;
        CHECK(reactor.wait(0) == 1);
        CHECK(reactor.accept(std::uint32_t(listener.fd)) == clipper::Reactor::kRejected);
        CHECK(read(client, &byte, 1) == 0);
    }
    CHECK(reactor.wait(0) == 0);
    close(last);
    close(clients[0]);
    dialed(listener);
    CHECK(reactor.accept(std::uint32_t(listener.fd)) >= 0);
}

TEST(a_late_event_does_not_reach_the_next_connection) {
    Listener listener;
    int former = dialed(listener), next = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(reactor.listen(listener.fd));
    int fd = reactor.accept(std::uint32_t(listener.fd));
    CHECK(reactor.watch(fd, EPOLLIN, connection_tag(5, 1)) && write(former, "x", 1) == 1);
    CHECK(reactor.wait(0) == 1);
    reactor.close(fd);  // before its event is handled
    listener.dial(next);
    CHECK(reactor.accept(std::uint32_t(listener.fd)) == fd);
    CHECK(reactor.watch(fd, EPOLLIN, connection_tag(5, 2)) && write(next, "x", 1) == 1);
    std::uint64_t late = reactor.events[0].data.u64;
    CHECK(clipper::tag_number(late) == 5 && late != connection_tag(5, 2));
    CHECK(reactor.wait(0) == 1 && reactor.events[0].data.u64 == connection_tag(5, 2));
}

TEST(a_closed_descriptor_is_silent_even_if_a_fork_holds_it) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && write(pair[1], "x", 1) == 1);
    CHECK(reactor.watch(pair[0], EPOLLIN, connection_tag(0, 1)) && dup(pair[0]) >= 0);
    CHECK(reactor.wait(0) == 1);
    reactor.close(pair[0]);
    close(pair[1]);
    CHECK(reactor.wait(0) == 0);
}

TEST(what_is_watched_can_change) {
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(reactor.watch(pair[0], EPOLLIN, connection_tag(0, 1)) && reactor.wait(0) == 0);
    reactor.change(pair[0], EPOLLOUT, connection_tag(0, 1));
    CHECK(reactor.wait(0) == 1 && reactor.events[0].events == EPOLLOUT);
    reactor.unwatch(pair[0]);
    CHECK(reactor.wait(0) == 0 && write(pair[0], "x", 1) == 1);
    CHECK(!reactor.listen(-1));
}

}  // namespace

int main(int, char** arguments) {
    clipper::Reactor reactor;
    CHECK(reactor.open());
    tests.at(arguments[1])(reactor);
}
