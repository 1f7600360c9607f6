/* The machine's floor without Python: `transport n` a line on stdin, nanoseconds an operation a line on stdout.

   unix, tcp: 64 bytes there and back, both sides blocked in recv(). spin: one cache line there and back, both sides spinning.
   futex: the same, both sides asleep. add: one atomic add, in CPU time. No thread is pinned: the kernel places them as it does clipper's. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/futex.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 64 };

typedef struct {
    _Alignas(64) atomic_uint ping;
    _Alignas(64) atomic_uint pong;
    char row[BYTES];
} Line;

static double read_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static double now_ns(void) { return read_ns(CLOCK_MONOTONIC); }

static void fail(const char* what) {
    perror(what);
    exit(1);
}

static void move(int fd, char* bytes, int reading) {
    for (size_t done = 0; done < BYTES;) {
        ssize_t n = reading ? recv(fd, bytes + done, BYTES - done, 0) : send(fd, bytes + done, BYTES - done, MSG_NOSIGNAL);
        if (n <= 0) exit(0);
        done += (size_t)n;
    }
}

static void echo_socket(int fd) {
    char bytes[BYTES];
    for (;;) {
        move(fd, bytes, 1);
        move(fd, bytes, 0);
    }
}

/* A connected pair; the child echoes on its end. */
static int start_socket(int tcp) {
    int pair[2], one = 1;
    if (!tcp) {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) fail("socketpair");
    } else {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t size = sizeof at;
        int listener = socket(AF_INET, SOCK_STREAM, 0);
        if (bind(listener, (struct sockaddr*)&at, size) || listen(listener, 1)) fail("listen");
        getsockname(listener, (struct sockaddr*)&at, &size);
        pair[0] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(pair[0], (struct sockaddr*)&at, size)) fail("connect");
        pair[1] = accept(listener, NULL, NULL);
        for (int i = 0; i < 2; ++i) setsockopt(pair[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        close(listener);
    }
    if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(pair[0]);
        echo_socket(pair[1]);
    }
    close(pair[1]);
    return pair[0];
}

static void wait_for(atomic_uint* word, unsigned value, int sleeping) {
    for (unsigned seen; (seen = atomic_load_explicit(word, memory_order_acquire)) != value;)
        if (sleeping) syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void say(atomic_uint* word, unsigned value, int sleeping) {
    atomic_store_explicit(word, value, memory_order_release);
    if (sleeping) syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static double through_memory(unsigned n, int sleeping) {
    Line* line = mmap(NULL, sizeof(Line), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (line == MAP_FAILED) fail("mmap");
    if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (unsigned turn = 1; turn <= n + 1; ++turn) {
            wait_for(&line->ping, turn, sleeping);
            line->row[0] = (char)turn;
            say(&line->pong, turn, sleeping);
        }
        _exit(0);
    }
    double begun = 0;
    for (unsigned turn = 1; turn <= n + 1; ++turn) {
        if (turn == 2) begun = now_ns();  /* the first turn waits for the fork */
        say(&line->ping, turn, sleeping);
        wait_for(&line->pong, turn, sleeping);
    }
    double took = (now_ns() - begun) / n;
    munmap(line, sizeof(Line));
    return took;
}

static double through_socket(int fd, unsigned n) {
    char bytes[BYTES] = {0};
    double begun = now_ns();
    for (unsigned i = 0; i < n; ++i) {
        move(fd, bytes, 0);
        move(fd, bytes, 1);
    }
    return (now_ns() - begun) / n;
}

static double adds(unsigned n) {
    static _Alignas(64) atomic_ulong counter;
    double begun = read_ns(CLOCK_PROCESS_CPUTIME_ID);
    for (unsigned i = 0; i < n; ++i) atomic_fetch_add_explicit(&counter, 1, memory_order_relaxed);
    return (read_ns(CLOCK_PROCESS_CPUTIME_ID) - begun) / n;
}

int main(void) {
    char what[16];
    unsigned n;
    int unix_fd = -1, tcp_fd = -1;
    signal(SIGCHLD, SIG_IGN);
    while (scanf("%15s %u", what, &n) == 2 && n) {
        double ns = 0;
        if (!strcmp(what, "unix")) ns = through_socket(unix_fd < 0 ? (unix_fd = start_socket(0)) : unix_fd, n);
        else if (!strcmp(what, "tcp")) ns = through_socket(tcp_fd < 0 ? (tcp_fd = start_socket(1)) : tcp_fd, n);
        else if (!strcmp(what, "spin")) ns = through_memory(n, 0);
        else if (!strcmp(what, "futex")) ns = through_memory(n, 1);
        else if (!strcmp(what, "add")) ns = adds(n);
        else return 2;
        printf("%.3f\n", ns);
        fflush(stdout);
    }
    return 0;
}
