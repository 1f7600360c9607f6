# The head of a request of HTTP/2: its fields are checked one by one and written as a head of
# HTTP/1.1, which `http_head` reads as any other.
#
# A head that this module writes has exactly the fields of the request: bytes that would end a line
# early, and fields that frame a message of HTTP/1.1, are malformed in HTTP/2.
#
# Threads: a RequestHead belongs to one thread.
from clipper_core.http.hpack cimport HpackField
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.runtime.machine cimport u32, u64, u8

cdef enum:
    FIELDS_MAX = 128            # of one request: 431

cdef cppclass RequestHead:
    u32 count                   # fields so far
    u64 list_bytes              # of them, as RFC 9113, section 6.5.2, counts them
    u64 length                  # Content-Length; NO_LENGTH: there is none
    u32 seen                    # bits of the fields that come once
    bint regular                # a field without colon has come
    bint trailers               # the fields come after a body, and are not kept
    bint wrong                  # the request is malformed
    bint large                  # there are too many fields: they are not kept
    bint is_grpc                # its content is of gRPC
    bint strips                 # blanks at the ends of a value are dropped, as gRPC has it; else
                                # they are malformed
    Bytes method
    Bytes path
    Bytes authority
    Bytes host
    Bytes lines                 # the other fields

cdef void request_head_clear(RequestHead* head, bint trailers) noexcept nogil
cdef void request_head_add(RequestHead* head, HpackField* field,
                           u64 list_bytes_max) noexcept nogil
# Append the head to `out`. ended: the request has no body. Return False if it is malformed.
cdef bint request_head_write(RequestHead* head, bint ended, Bytes* out) noexcept nogil
