# Relays: bytes of clients with TLS, for readers without. A relay has the session of one client and
# one end of a pair of sockets; who reads the client's requests has the other end, and may give it
# back.
#
# Of each direction at most RELAY_BYTES and what the two kernels' buffers take wait, so who does not
# read slows only its own sender. A half-closed connection stays one: the end of what a client sends
# is passed on, and so is the end of what it is sent.
#
# Threads: all relays of one reactor are one thread's; `count` any.
from libcpp.vector cimport vector
from clipper_core.runtime.byte_buffer cimport Bytes, Lookup
from clipper_core.runtime.machine cimport atomic, u32, u64, u8
from clipper_core.runtime.reactor cimport Reactor
from clipper_core.tls.libssl cimport TlsSession

cdef enum:
    RELAY_BYTES = 65536         # of one read
    RELAY_BUFFER_BYTES = 196608     # what a read takes, and what it may be decrypted to
    LINGER_US = 2000000         # a client that was sent the end is read so long

cdef cppclass Relay:
    TlsSession* session
    int client
    int inner                   # our end of the pair
    u64 id
    u32 index
    u32 generation
    u32 client_watched          # what epoll reports
    u32 inner_watched
    Bytes received              # decrypted; the reader has not taken it
    bint client_ended           # the client sends no more
    bint client_told            # and the reader knows
    bint inner_ended            # the reader sends no more
    bint inner_told             # and the client knows
    bint inner_gone             # the reader has closed its end
    u64 stalled_us              # since when the client has not read; 0: it reads
    u64 told_us                 # when it was told the end

cdef cppclass Relays:
    Reactor* reactor
    u8* buffer                  # RELAY_BUFFER_BYTES, used within one call
    vector[Relay*] relays       # by index; NULL: free
    vector[u32] spare           # indexes that are free
    Lookup by_id
    u32 opened                  # so far
    atomic[u64] count

# Begin to relay. Return the reader's end of the pair; -1: there is no memory or no descriptor, and
# nothing was done. The relay has the session and the client's descriptor from then on.
cdef int relay_open(Relays* relays, TlsSession* session, int client, u64 id,
                    bint ended) noexcept nogil
# An event of the reactor with a tag of relays.
cdef void relay_handle(Relays* relays, u64 tag, u32 events, u64 now_us) noexcept nogil
# End a relay whose reader gives its end of the pair back, which is closed. `received` gets what the
# reader has not read, `session.out` what it has written. The caller has the session, the client's
# descriptor and the relay, which it deletes. NULL: there is no such relay any more.
cdef Relay* relay_take_back(Relays* relays, u64 id, int end) noexcept nogil
# Close relays whose times are over. idle_us: a client that reads nothing for so long is
# disconnected.
cdef void relays_check_times(Relays* relays, u64 now_us, u64 idle_us) noexcept nogil
cdef void relays_close(Relays* relays) noexcept nogil      # all of them
