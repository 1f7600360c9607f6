# A certificate and its key, as sessions take them; and how a handshake can end.
#
# Threads: a context never changes; any thread may share it.
from clipper_core.tls.libssl cimport TlsContextState

cdef enum HandshakeOutcome:     # HANDSHAKES has their names
    SHAKEN = 0
    SHAKE_FAILED = 1
    SHAKE_PLAIN = 2             # the client speaks without TLS
    SHAKE_SLOW = 3
    SHAKE_GONE = 4              # the client has left
    SHAKE_FULL = 5              # there were too many connections
    HANDSHAKE_OUTCOMES = 6

cdef class TlsContext:
    cdef TlsContextState state

    cdef int _set_up(self, like) except -1
    cdef int _use(self, bytes cert, bytes key) except -1
    cdef int _trust(self, bytes client_ca) except -1
