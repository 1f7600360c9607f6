# The server for HTTP without the GIL: threads that accept, read, answer and hand over; Python's
# side of them.
#
# One worker listens and gives each connection to the one that has fewest; so the balance is exact,
# and a port is bound once. Each sleeps in an epoll of its own, on its connections, its post and a
# mailbox of each engine.
#
# Threads: run(i) is the body of worker i; the rest any.
from clipper_core.engine.engine cimport Engine
from clipper_core.http.hot_calls cimport HotCalls
from clipper_core.http.http2_protocol cimport Http2Protocol, Http2State
from clipper_core.http.http_connection cimport HandedOver, Shared, Worker
from clipper_core.http.http_route cimport HotRoute, TableState
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u32, u64
from clipper_core.tls.libssl cimport TlsContextState
from clipper_core.tls.tls_context cimport TlsContext

cdef enum WorkerCommandKind:
    ADOPT = 0                   # a connection
    ANSWERED = 1                # a response, of an ending
    SET_TABLE = 2               # another table
    DRAIN = 3                   # drain
    STOP = 4
    RESUME = 5                  # a connection with TLS, that Python gives back
    SET_TLS = 6                 # another certificate
    SET_CALLS = 7               # another table of calls
    CALL_ANSWERED = 8           # a reply, of an ending that is a call's

cdef cppclass WorkerCommand:
    u32 kind
    int fd                      # of RESUME: Python's end of its relay
    u32 returns
    u64 ticket                  # of RESUME: of the relay
    TlsContextState tls
    bint close
    Bytes bytes
    bint has_message            # of CALL_ANSWERED: the reply is in `bytes`
    Bytes fields                # and these end the call; none: it fails
    TableState* table
    Http2State* http2           # of ADOPT and RESUME; NULL: the connection speaks HTTP/1.1

cdef class HttpServer:
    cdef Shared* shared
    cdef list engines
    cdef list mailboxes                 # MailboxReader: they keep their places in the engines
    cdef object table                   # HotTable
    cdef HotCalls calls                 # None: connections of HTTP/2 are Python's
    cdef list retired                   # tables before it whose memory somebody still needs
    cdef object guard
    cdef object finish
    cdef object encode
    cdef tuple handshakes               # Counter, by HandshakeOutcome
    cdef bint draining
    cdef char[40] date                  # of responses that are made on the event loop's thread
    cdef u64 date_s
    cdef u64 draws                      # of `span_new`, for those responses

    cdef int _add_mailbox(self, Worker* w, Engine engine) except -1
    cdef int _secure(self, TlsContext tls, tuple handshakes) except -1
    cdef int _post_table(self, u32 kind, TableState* table) except -1
    cdef int _post_connection(self, Worker* w, WorkerCommand* command,
                              Http2Protocol protocol) except -1
    cdef int _command(self, u32 number, WorkerCommand* command) except -1
    cdef object _ending(self, HandedOver* handed)
    cdef object _schedule(self, HandedOver* handed)
    cdef object _feedback(self, HandedOver* handed)
    cdef int _send(self, HotRoute route, object read, bytes own, u64 json_bytes,
                   const Bytes* body) except -1
    cdef bint _respond_to_call(self, HotRoute route, object read, list answers) except -1
    cdef int _write(self, HotRoute route, object read, bytes own, u64 json_bytes,
                    const Bytes* body, Bytes* out) except -1
    cdef int _post(self, u32 worker, WorkerCommand* command) except -1
    cdef int _lose(self, HandedOver* handed) except -1
