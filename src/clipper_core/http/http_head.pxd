# A strict parser of heads of HTTP/1.1 messages, the only one of the project. `head_read` reads
# plain POST requests for the compiled server, which passes every other request, with its
# connection, to frontend/http/connection.py. That module and the load generator use the functions
# of http_head.pyi. All share the scan of a line, so they cannot read the same head differently.
#
# Threads: any (pure functions).
from clipper_core.runtime.machine cimport u32, u64, u8

cdef enum:
    HEAD_OTHER = -1             # not plain: no POST, no HTTP/1.1, or a header that this parser does
                                # not support
    HEAD_UNFINISHED = 0         # plain so far, but incomplete
    HEAD_PLAIN = 1

cdef struct Head:               # its pointers are into the text
    const u8* path
    const u8* id                # X-Request-Id; NULL: none
    const u8* authorization     # NULL: none
    const u8* trace             # traceparent; NULL: none
    const u8* deadline          # Clipper-Deadline-Ms; NULL: none
    u32 path_bytes
    u32 id_bytes
    u32 authorization_bytes
    u32 trace_bytes
    u32 deadline_bytes
    u32 hosts                   # Host headers
    u64 bytes                   # of the head, the empty line included
    u64 body_bytes
    u64 json_bytes              # Inference-Header-Content-Length; NO_LENGTH: there is none

cdef u64 NO_LENGTH

cdef int head_read(const u8* text, u64 n, Head* head) noexcept nogil
