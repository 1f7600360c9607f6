/* A load generator for HTTP/1.1: some keep-alive connections, one thread, epoll.

   http_load HOST PORT CONNECTIONS SECONDS RATE SEED FIRST EVERY LENGTH OTHER_LENGTH

   HOST may be tls:HOST; then connections speak TLS, by the system's libssl, and trust whoever
   answers. Their handshakes are before the first request.

   Standard input holds a request of LENGTH bytes, then another one of OTHER_LENGTH bytes. Eight
   characters # of a request are replaced by a number that is FIRST and then one more for each
   request. If EVERY is not 0, each EVERY-th request is the other one.

   RATE 0 is a closed loop: each connection sends its next request when it has its response.
   Otherwise requests are due at the times of a Poisson process of RATE a second, drawn from SEED;
   each goes out on the connection that has been free for the longest time, or waits for one.

   Standard output: a line "COUNT SECONDS", then COUNT records, see struct record. A connection that
   fails, or that has no response after PATIENCE_S, counts as status 0 and is opened again. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE_S 20.0
#define RETRY_S 0.01
#define RESPONSE_MAX (4 << 20)

struct record {
    double due_s;      /* when it was to leave, from the start */
    double latency_us; /* from then to the end of the response */
    double late_us;    /* by how much it left late though a connection was free; -1: none was */
    int32_t status;    /* of the response; 0: none */
    int32_t other;     /* 1: the other request */
};

struct connection {
    int fd;
    void *tls; /* NULL: without */
    int busy;
    double free_s; /* since when it is free; later than now: not before then */
    double sent_s;
    struct record record;
    char *response;
    size_t used, room;
};

struct times { /* a queue of due times */
    double *values;
    size_t begin, end, room;
};

static struct sockaddr_in server;
static struct connection *connections;
static int *free_ones; /* a ring of connections that are free, the longest first */
static size_t count, free_begin, free_count;
static struct record *records;
static size_t records_used, records_room;
static char *requests[2];
static size_t lengths[2];
static char *numbers[2];
static unsigned long number, every, sent;
static double start_s;
static uint64_t random_state;
static int poller;

/* Of libssl. Its headers need not be there. */
static void *tls_context;
static void *(*ssl_new)(void *);
static void (*ssl_free)(void *);
static int (*ssl_set_fd)(void *, int);
static int (*ssl_connect)(void *);
static int (*ssl_read)(void *, void *, int);
static int (*ssl_write)(void *, const void *, int);
static int (*ssl_get_error)(const void *, int);

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void *grown(void *old, size_t bytes) {
    void *bigger = realloc(old, bytes);
    if (!bigger) fail("realloc");
    return bigger;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9 - start_s;
}

/* A number in (0, 1], by splitmix64. */
static double uniform(void) {
    uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (((z ^ (z >> 31)) >> 11) + 1) * 0x1p-53;
}

static void *function(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) fail(name);
    return found;
}

static void start_tls(void) {
    void *library = dlopen("libssl.so.3", RTLD_NOW);
    if (!library) library = dlopen("libssl.so.1.1", RTLD_NOW);
    if (!library) fail("libssl");
    void *(*method)(void) = (void *(*)(void))function(library, "TLS_client_method");
    void *(*context_new)(void *) = (void *(*)(void *))function(library, "SSL_CTX_new");
    ssl_new = (void *(*)(void *))function(library, "SSL_new");
    ssl_free = (void (*)(void *))function(library, "SSL_free");
    ssl_set_fd = (int (*)(void *, int))function(library, "SSL_set_fd");
    ssl_connect = (int (*)(void *))function(library, "SSL_connect");
    ssl_read = (int (*)(void *, void *, int))function(library, "SSL_read");
    ssl_write = (int (*)(void *, const void *, int))function(library, "SSL_write");
    ssl_get_error = (int (*)(const void *, int))function(library, "SSL_get_error");
    tls_context = context_new(method());
    if (!tls_context) fail("SSL_CTX_new");
}

/* As recv and send, over TLS if the connection has it. */
static ssize_t received(struct connection *c, void *to, size_t room) {
    if (!c->tls) return recv(c->fd, to, room, MSG_DONTWAIT);
    int n = ssl_read(c->tls, to, (int)room);
    if (n > 0) return n;
    errno = ssl_get_error(c->tls, n) == 2 ? EAGAIN : ECONNRESET; /* SSL_ERROR_WANT_READ */
    return errno == EAGAIN ? -1 : 0;
}

static ssize_t sent_of(struct connection *c, const void *from, size_t n) {
    return c->tls ? ssl_write(c->tls, from, (int)n) : send(c->fd, from, n, MSG_NOSIGNAL);
}

static void disconnect(struct connection *c) {
    if (c->tls) ssl_free(c->tls);
    c->tls = NULL;
    close(c->fd);
    c->fd = -1;
}

static void push_free(size_t index, double since_s) {
    connections[index].busy = 0;
    connections[index].free_s = since_s;
    free_ones[(free_begin + free_count++) % count] = (int)index;
}

static void finish(size_t index, int status) {
    struct connection *c = &connections[index];
    double now = now_s();
    c->record.latency_us = (now - c->record.due_s) * 1e6;
    c->record.status = status;
    if (records_used == records_room) {
        records_room = records_room ? 2 * records_room : 1 << 16;
        records = grown(records, records_room * sizeof *records);
    }
    records[records_used++] = c->record;
    c->used = 0;
    if (!status && c->fd >= 0) {
        disconnect(c);
    }
    push_free(index, status ? now : now + RETRY_S);
}

static int connected(size_t index) {
    struct connection *c = &connections[index];
    if (c->fd >= 0) return 1;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) fail("socket");
    if (connect(fd, (struct sockaddr *)&server, sizeof server)) {
        close(fd);
        return 0;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (tls_context) {
        c->tls = ssl_new(tls_context);
        if (!c->tls || !ssl_set_fd(c->tls, fd)) fail("SSL_new");
        if (ssl_connect(c->tls) != 1) {
            ssl_free(c->tls);
            c->tls = NULL;
            close(fd);
            return 0;
        }
        if (fcntl(fd, F_SETFL, O_NONBLOCK)) fail("fcntl");
    }
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = index};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event)) fail("epoll_ctl");
    c->fd = fd;
    return 1;
}

static void send_next(size_t index, double due_s, double late_us) {
    struct connection *c = &connections[index];
    int other = every && ++sent % every == 0;
    c->busy = 1;
    c->sent_s = now_s();
    c->record = (struct record){due_s, 0, late_us, 0, other};
    if (numbers[other]) {
        char digits[16];
        snprintf(digits, sizeof digits, "%08lu", number++ % 100000000);
        memcpy(numbers[other], digits, 8);
    }
    if (!connected(index)) {
        finish(index, 0);
        return;
    }
    for (size_t at = 0; at < lengths[other];) {
        ssize_t n = sent_of(c, requests[other] + at, lengths[other] - at);
        if (n > 0) {
            at += n;
        } else if (errno != EINTR) {
            finish(index, 0);
            return;
        }
    }
}

/* Return the status of a whole response, 0 if there is more to come, -1 if it is not HTTP. */
static int whole(struct connection *c, int *closes) {
    c->response[c->used] = 0;
    char *end = strstr(c->response, "\r\n\r\n");
    if (!end) return 0;
    if (strncmp(c->response, "HTTP/1.", 7)) return -1;
    size_t head = end + 4 - c->response;
    *end = 0;
    char *length = strcasestr(c->response, "\r\ncontent-length:");
    *closes = strcasestr(c->response, "\r\nconnection: close") != NULL;
    int status = atoi(c->response + 9);
    long body = length ? atol(length + 17) : -1;
    *end = '\r';
    if (body >= 0) return c->used >= head + body ? status : 0;
    return c->used >= 5 && !memcmp(c->response + c->used - 5, "0\r\n\r\n", 5) ? status : 0;
}

static void receive(size_t index) {
    struct connection *c = &connections[index];
    if (c->room < c->used + 4097) {
        c->room = c->room ? 2 * c->room : 16384;
        if (c->room > RESPONSE_MAX) fail("a response that is too large");
        c->response = grown(c->response, c->room);
    }
    ssize_t n = received(c, c->response + c->used, c->room - c->used - 1);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (!c->busy || n <= 0) { /* closed, or what nobody asked for */
        if (c->busy) {
            finish(index, 0);
        } else {
            disconnect(c);
        }
        return;
    }
    c->used += n;
    int closes = 0, status = whole(c, &closes);
    if (!status) return;
    finish(index, status > 0 ? status : 0);
    if (closes && c->fd >= 0) {
        disconnect(c);
    }
}

static void read_request(int which, size_t length) {
    lengths[which] = length;
    requests[which] = grown(NULL, length + 1);
    if (fread(requests[which], 1, length, stdin) != length) fail("the request on standard input");
    requests[which][length] = 0;
    numbers[which] = memmem(requests[which], length, "########", 8);
}

static void add(struct times *queue, double value) {
    if (queue->end == queue->room) {
        queue->room = queue->room ? 2 * queue->room : 4096;
        queue->values = grown(queue->values, queue->room * sizeof(double));
    }
    queue->values[queue->end++] = value;
}

/* Send what is due on the connections that are free. Returns whether a connection is being kept
   back because it failed a moment ago. */
static int send_due(struct times *due, double rate, double seconds) {
    double now = now_s();
    for (size_t left = free_count; left; left--) {
        if (rate ? due->begin == due->end : now >= seconds) return 0;
        size_t index = free_ones[free_begin];
        free_begin = (free_begin + 1) % count;
        free_count--;
        double since = connections[index].free_s;
        if (since > now) {
            push_free(index, since);
            continue;
        }
        double at = rate ? due->values[due->begin++] : now;
        send_next(index, at, since <= at ? (now_s() - at) * 1e6 : -1);
        now = now_s();
    }
    return free_count > 0;
}

int main(int argc, char **argv) {
    if (argc != 11) {
        fprintf(stderr, "usage: http_load HOST PORT CONNECTIONS SECONDS RATE SEED FIRST EVERY"
                        " LENGTH OTHER_LENGTH\n");
        return 2;
    }
    if (!strncmp(argv[1], "tls:", 4)) {
        argv[1] += 4;
        start_tls();
    }
    server.sin_family = AF_INET;
    server.sin_port = htons(atoi(argv[2]));
    if (inet_pton(AF_INET, argv[1], &server.sin_addr) != 1) fail(argv[1]);
    count = atol(argv[3]);
    double seconds = atof(argv[4]), rate = atof(argv[5]);
    random_state = atol(argv[6]);
    number = atol(argv[7]);
    every = atol(argv[8]);
    read_request(0, atol(argv[9]));
    if (every) read_request(1, atol(argv[10]));
    prctl(PR_SET_TIMERSLACK, 1UL);
    poller = epoll_create1(EPOLL_CLOEXEC);
    connections = calloc(count, sizeof *connections);
    free_ones = calloc(count, sizeof *free_ones);
    if (poller < 0 || !connections || !free_ones) fail("start");
    for (size_t i = 0; i < count; i++) {
        connections[i].fd = -1;
        if (!connected(i)) fail("connect");
        push_free(i, 0);
    }
    start_s = now_s();
    struct times due = {0};
    double next_s = rate ? -log(uniform()) / rate : 0, looked_s = 0;
    struct epoll_event events[64];
    for (;;) {
        double now = now_s();
        for (; rate && next_s <= now && next_s < seconds; next_s -= log(uniform()) / rate)
            add(&due, next_s);
        int kept_back = send_due(&due, rate, seconds);
        now = now_s();
        int more = rate ? next_s < seconds || due.begin < due.end : now < seconds;
        if (!more && free_count == count) break;
        double wait_s = kept_back ? RETRY_S / 2 : 0.1;
        if (rate && next_s < seconds && next_s - now < wait_s) wait_s = next_s - now;
        if (wait_s < 0) wait_s = 0;
        struct timespec wait = {0, (long)(wait_s * 1e9)};
        int ready = epoll_pwait2(poller, events, 64, &wait, NULL);
        for (int i = 0; i < ready; i++)
            if (connections[events[i].data.u64].fd >= 0) receive(events[i].data.u64);
        if (now - looked_s > 0.5) {
            looked_s = now;
            for (size_t i = 0; i < count; i++)
                if (connections[i].busy && now - connections[i].sent_s > PATIENCE_S)
                    finish(i, 0);
        }
    }
    printf("%zu %.9f\n", records_used, now_s());
    fwrite(records, sizeof *records, records_used, stdout);
    return 0;
}
