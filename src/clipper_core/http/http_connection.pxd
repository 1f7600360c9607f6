# A client's connection as one worker of the server holds it: bytes in, requests in their order,
# bytes out; and when it goes to Python, with every byte that was not yet used.
#
# Threads: a Worker and all its connections are one thread's. What others give it comes by its post;
# what it gives, by `away`.
from libcpp.vector cimport vector
from clipper_core.http.hot_calls cimport HotCall, HotCallsShared, HotCallState
from clipper_core.http.http2_protocol cimport Http2Settings, Http2State
from clipper_core.http.http_route cimport Query, TableState
from clipper_core.http.json_value cimport LargeBody
from clipper_core.http.query_waits cimport QueryWaits
from clipper_core.runtime.byte_buffer cimport Bytes, Lookup, Post
from clipper_core.runtime.machine cimport atomic, u32, u64, u8
from clipper_core.runtime.reactor cimport Reactor
from clipper_core.tls.libssl cimport TlsContextState, TlsSession
from clipper_core.tls.relay cimport Relay, Relays
from clipper_core.tls.tls_context cimport HandshakeOutcome

cdef enum Answered:             # of an exchange
    NOT_YET = 0                 # its slot is pending
    BY_PYTHON = 1               # its future went there
    READY = 2                   # its response is in `text`, and `rest`
    SCHEDULED = 3               # its rows went to Python

cdef enum LineState:            # of the bytes of a connection
    IN_PLAIN = 0
    SECURED = 1                 # they are TLS's
    UNSEEN = 2                  # they are to be TLS's, and none has come
    SHAKING = 3                 # in a handshake

cdef enum GivenKind:            # to Python
    CONNECTION = 0              # a connection
    ENDING = 1                  # a query whose response is to be made there
    ROWS = 2                    # a query that is to be scheduled and answered there
    GONE = 3                    # the client of such a query does not wait any more
    LATE = 5                    # an answer to such a query, whose connection has gone to Python
    WITHOUT_TLS = 4             # a connection that was to speak TLS, and does not

cdef struct Settings:
    u64 header_us, idle_us, check_us
    u64 connections_max, header_bytes_max, body_bytes_max, bodies_bytes_max, unsent_bytes_max
    u32 pipeline_max

cdef extern from *:
    """
    #include <sys/socket.h>
    // The addresses of both ends of a connection; without any if they are not known.
    struct ConnectionEnds {
        sockaddr_storage peer{}, own{};
        void look_up(int fd) {
            socklen_t n = sizeof peer, m = sizeof own;
            if (getpeername(fd, (sockaddr*) &peer, &n)) peer.ss_family = 0;
            if (getsockname(fd, (sockaddr*) &own, &m)) own.ss_family = 0;
        }
    };
    """
    cdef cppclass sockaddr_storage:
        unsigned short ss_family
    cdef cppclass ConnectionEnds:
        sockaddr_storage peer
        sockaddr_storage own
        void look_up(int fd) noexcept nogil

cdef cppclass HandedOver:
    u32 kind
    int fd
    Bytes bytes                 # read and not used; the rows of a query
    Http2State* http2           # of a connection of HTTP/2; NULL: it speaks HTTP/1.1
    u64 age_us                  # since the request that is partly there began; of HTTP/2: since its
                                # last one was answered
    u32 returns                 # how often it has come back
    u32 worker
    u64 ticket                  # of a query: to answer by. Of a connection with TLS: of its relay
    vector[u64] tickets         # of a connection of HTTP/2: the ticket and the stream of each query
                                # that goes with it
    Query query
    bint is_call                # the query is that of a call
    bint has_message            # LATE, of a call: its reply is in `bytes`
    Bytes fields                # and these end it
    ConnectionEnds ends         # of a connection with TLS

cdef cppclass HttpConnection:
    int fd
    u8 line                     # LineState
    TlsSession* tls             # NULL: in plain, or nothing has come
    u64 tag                     # index in the worker, and number of connections opened before
    u32 watched                 # what epoll reports
    u32 open                    # exchanges
    u32 returns
    bint leaving                # the next request is Python's: it goes there once all before it are
                                # answered
    bint last                   # closed once `out` is sent
    bint ended                  # its client sends no more: closed once all requests are answered
    bint probed                 # it was sent a response that is skipped since then
    bint partial                # a request is partly there
    bint accepted               # the head of the request that `input` begins with is whole, and it
                                # may be made: the bytes of `input` count as kept
    bint full                   # there may be whole requests left, beyond pipeline_max or
                                # unsent_bytes_max, or for another turn
    bint small                  # its last answer was, as far as it was made at once
    bint starved                # memory ran out: 503 once all before it are answered, then closed
    u64 since_us                # when that request began, or the last response left
    u64 stalled_us              # since when the client has not read; 0: it reads
    u64 ready_bytes             # of responses that wait for those before them, and of outputs that
                                # are not written yet
    bint begun                  # a request was taken
    bint touched                # it is one of `touched` of its worker
    Http2State* http2           # it speaks HTTP/2; NULL: HTTP/1.1. It then has what is received and
                                # not used, and what is to be sent
    Exchange* rests             # of HTTP/2: whose large responses are not written to their ends;
    Exchange* last_rest         # they take turns
    u32 held_stream             # the first of its streams whose requests are not complete
    u64 held_until_us           # when it goes to Python if they still are not; 0: there is none
    Bytes input, out            # with TLS: decrypted, and not encrypted yet
    u64 kept                    # bytes of `input` that are counted in `kept` of the server
    Exchange* first
    Exchange* tail

cdef cppclass Exchange:
    Query query                 # first: `query_waits` gives it back
    HttpConnection* connection  # NULL: the client is gone
    Exchange* next
    u64 key                     # its ticket
    u32 stream                  # of HTTP/2; 0: it is one of HTTP/1.1, in the order of `first`
    u8 how
    bint close
    Bytes text
    LargeBody* rest             # of its response, after `text`; NULL: none

cdef cppclass Shared:           # of all workers of one server
    Settings settings
    bint secured                # all connections speak TLS
    atomic[u64]* handshakes[6]   # by their outcome
    Post away                   # HandedOver*, to Python
    Http2Settings http2
    HotCallsShared* calls       # of connections of HTTP/2; NULL: all of these are Python's
    atomic[u64] held            # connections
    atomic[u64] handing         # connections that are on their way to Python
    atomic[u64] outside         # connections that Python holds; with TLS each has a relay
    atomic[u64] kept            # bytes of requests that are not complete, and of rows that were
                                # not scheduled yet
    atomic[u64] kept_outside    # the same, that Python holds
    atomic[u64] version         # counts orders to all
    atomic[u64] tickets
    Bytes prefix                # of ids made up for requests
    vector[void*] workers       # Worker*

cdef cppclass Worker:
    Shared* shared
    u32 number
    Reactor reactor
    TlsContextState tls         # of new connections
    Relays relays               # connections that Python holds
    u32 shakes                  # of handshakes, in this turn
    Post post                   # WorkerCommand*
    QueryWaits waits            # of exchanges whose queries have not ended
    vector[HttpConnection*] connections         # by index; NULL: free
    vector[u32] free_connections
    u32 opened                  # connections so far
    Lookup tickets              # by ticket: Exchange* that Python answers
    Exchange* spare
    TableState* table
    HotCallState calls
    TableState* calls_table     # NULL: connections of HTTP/2 are Python's
    vector[HttpConnection*] touched     # of HTTP/2: to be settled at the end of the turn
    u64 holds_until_us          # the first `held_until_us`; 0: there is none
    u64 version                 # of the orders that were seen
    u64 now_us
    u64 turn_bytes              # of responses made in this turn
    u64 turns
    bint draining
    bint stopping
    vector[void*] later         # WorkerCommand*, seen in the middle of a turn
    Bytes rows, body, made
    u8* buffer
    char[40] date
    u64 date_s
    u64 draws                   # of `span_new`
    atomic[u64] count           # its connections
    void (*apply_commands)(Worker* w) noexcept nogil          # look at the post for another table

cdef enum:
    TURN_BYTES = 65536          # of responses of one turn; then connections with large answers or
                                # pipelined requests wait
    PIECE_BYTES = 32768         # of a large answer, that one connection gets in a turn
    PIECE_COST = 2              # bytes of other answers are made in the time of one of a piece,
                                # whose numbers are written
    SMALL_BYTES = 4096          # of an answer that is small
    STREAM_BYTES = 65536        # of a large answer on a stream of HTTP/2, that wait; then no more
                                # of it is written until its client has read
    SHAKES_MAX = 8              # steps of handshakes in a turn; then the others' turn comes, since
                                # one takes as long as a hundred requests
    LOOKED_THROUGH = 64         # bytes of an output are looked through in the time in which one of
                                # its text is written
    HELD_BYTES_MAX = 65536      # of requests of a connection of HTTP/2 that are not complete;
                                # above, it is Python's
    HELD_US = 500000            # and so it is if they are not complete so long
    HELD_CALL_US = 5000         # the same of calls, which may have deadlines

cdef inline u64 connection_unsent(const HttpConnection* connection) noexcept nogil:
    """Return how many bytes wait until the client reads."""
    return ((connection.out.size() if connection.http2 == NULL else connection.http2.out.size())
            + (0 if connection.tls == NULL else connection.tls.out.size()))

# NULL: no memory; the descriptor is closed
cdef HttpConnection* http_connection_open(Worker* w, int fd, u32 returns) noexcept nogil
# A connection with TLS that Python gives back; the relay is at its end. NULL: as of
# http_connection_open
cdef HttpConnection* http_connection_resume(Worker* w, Relay* relay, u32 returns) noexcept nogil
# Go on with a connection that Python gives back. state: of HTTP/2, its calls come with it; NULL: it
# speaks HTTP/1.1. connection: NULL: it is closed
cdef void http_connection_go_on(Worker* w, HttpConnection* connection, Http2State* state,
                                Bytes* received) noexcept nogil
cdef void http_connection_close(Worker* w, HttpConnection* connection) noexcept nogil
cdef void http_connection_read(Worker* w, HttpConnection* connection) noexcept nogil
# send, go, or close: after anything happened to it
cdef void http_connection_settle(Worker* w, HttpConnection* connection) noexcept nogil
# its times
cdef void http_connection_check_times(Worker* w, HttpConnection* connection) noexcept nogil
cdef void http_connection_drain(Worker* w, HttpConnection* connection) noexcept nogil
# Settle the connections of HTTP/2 to which anything happened.
cdef void http_connections_settle(Worker* w) noexcept nogil
# Hand over those whose calls do not become complete.
cdef void http_connections_check_held(Worker* w) noexcept nogil
# The slot that a call waited for has ended.
cdef void http_call_slot_ended(Worker* w, HotCall* call) noexcept nogil
# By Python: answer a call. message: NULL: there is none. fields: end it; without any it fails
cdef void http_call_answered(Worker* w, u64 ticket, const u8* message, u64 n,
                             Bytes* fields) noexcept nogil
# The slot that it waited for has ended.
cdef void exchange_slot_ended(Worker* w, Exchange* x) noexcept nogil
# by Python
cdef void exchange_answered(Worker* w, u64 ticket, const Bytes* text, bint close) noexcept nogil
