# Messages of gRPC from the bytes of a call: each has a byte that tells whether it is compressed,
# and its length (PROTOCOL-HTTP2 of gRPC, "Length-Prefixed-Message").
#
# Threads: a reader belongs to one thread.
cdef enum:
    PREFIX_BYTES = 5
