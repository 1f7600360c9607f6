# Records: the named tensors of one row as contiguous bytes (docs/wire.md).
#
# A layout is compiled once from a schema: element types, shapes, and the length of the head. It
# packs a dict of values into a record in one pass, opens a record as arrays without a copy, and
# finds, without the GIL, where a tensor is in a record.
#
# Threads: any; a layout is immutable.
from clipper_core.runtime.machine cimport i64, u32, u64, u8

cdef enum:
    DIMS_MAX = 8

cdef struct RecordPart:         # a tensor
    u8 dtype
    u8 rank
    u32 item_bytes
    int typenum                 # numpy's; -1: strings or bytes
    i64 dims[8]                 # negative: the size differs between records

cdef struct RecordShape:
    RecordPart* parts
    u32 count
    u64 head_bytes              # the sizes at the front of a record, padded; 0: all are fixed

cdef struct RecordPlace:        # where a tensor is in a record
    u64 at                      # its first byte
    u64 nbytes
    u64 items                   # numbers, or strings
    i64 dims[8]

cdef struct Taken:              # a tensor of a row that is being packed
    const void* data
    u64 nbytes
    u64 word                    # value of a scalar; `data` points to it
    i64 dims[8]

# Set where a tensor is. False: the record is cut short or damaged.
cdef bint record_place(const RecordShape* shape, const u8* record, u64 nbytes, u32 index,
                       RecordPlace* place) noexcept nogil

cdef class RecordLayout:
    cdef RecordShape shape
    cdef readonly tuple names
    cdef tuple types                # numpy's; None: strings or bytes
    cdef bint finite                # pack() leaves NaN and infinities to the slower path in Python
    cdef bint simple                # no tensor is an array of strings

    # Open a record. Arrays are views of `base`, an object whose bytes are `record`. Return None if
    # the slower path in Python has to read the record, or to explain what is wrong.
    cdef object open(self, object base, const u8* record, u64 nbytes)
    cdef void _write(self, const Taken* taken, u8* to) noexcept
    cdef object _opened(self, u32 k, object base, const u8* data, const RecordPlace* place)
