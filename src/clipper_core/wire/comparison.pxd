# How outputs are compared: as labels, which are equal or not, and as numbers, which are near to
# each other or far apart.
#
# The key of an output is its value without its width: an i8, a u64 and an int of Python that are
# the same number have equal keys. Keys of different kinds are never equal: neither those of True
# and 1, nor of 1 and 1.0, nor of "a" and b"a".
#
# Threads: any. A key borrows the bytes of its output.
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.wire.record cimport RecordShape

cdef enum:
    LABEL_HASHES = 64           # how many hashes of labels there are

cdef enum KeyKind:
    BOOL_KEY = 1
    WHOLE_KEY = 2               # a whole number below 2^63
    LARGE_KEY = 3               # one from 2^63 to 2^64
    FLOAT_KEY = 4
    STR_KEY = 5
    BYTES_KEY = 6
    ARRAY_KEY = 7               # of numbers or strings
    RECORD_KEY = 8              # all of a record

cdef struct ValueKey:
    u64 bits                    # of a number: an i64, a u64 or a double, by its kind; of anything
                                # else, how many bytes it has
    const u8* data              # the bytes; NULL: a number
    u32[4] dims                 # of an array; of a record, the last is its type
    u8 kind                     # KeyKind
    u8 dtype                    # of an array, as the next
    u8 rank

cdef struct Field:              # the tensor of a record that is compared (docs/wire.md)
    const RecordShape* shape
    u32 record                  # the type of the record; 0: the whole output is compared
    u32 index

# Return the key of an output, or of its field. field: NULL compares all of it.
cdef ValueKey value_key(u64 word, u8 tag, const Field* field) noexcept nogil
cdef inline ValueKey whole_key(u64 number) noexcept nogil:      # number: of an i64
    cdef ValueKey key
    key.bits = number
    key.data = NULL
    key.kind = WHOLE_KEY
    return key
cdef ValueKey number_key(double number) noexcept nogil          # of a float
cdef inline ValueKey text_key(u8 kind, const char* data, u64 nbytes) noexcept nogil:
    cdef ValueKey key
    key.bits = nbytes
    key.data = <const u8*> data
    key.kind = kind
    return key
# Return whether an output may be answered with: it has no NaN and no infinity.
cdef bint key_is_usable(const ValueKey* key) noexcept nogil
cdef bint same_contents(const ValueKey* a, const ValueKey* b) noexcept nogil    # of equal `bits`
cdef inline bint keys_are_equal(const ValueKey* a, const ValueKey* b) noexcept nogil:
    if a.kind != b.kind or a.bits != b.bits:
        return False
    return a.kind <= LARGE_KEY or same_contents(a, b)
# Return the hash of a label: 0 to 63, the same in every process. It is 0 for floats and arrays.
cdef u32 key_hash(const ValueKey* key) noexcept nogil
# Return the value of a number, rounded to a double; 0 for anything else.
cdef double key_number(const ValueKey* key) noexcept nogil
# Return whether two outputs are the same answer, as in Python: equal keys are, and so are 1 and
# 1.0, and arrays of one shape and equal numbers.
cdef bint keys_agree(const ValueKey* a, const ValueKey* b) noexcept nogil
# Return the loss of an output, 0 (right) to 1 (wrong): of numbers d / (d + size of the label),
# where d is their distance.
cdef double key_loss(const ValueKey* output, const ValueKey* label) noexcept nogil
# Return how near two outputs are: 1 for the same label, else 0; of numbers s / (s + d), where s is
# their mean size and d their distance. 0 if one of them may not be answered with.
cdef double key_closeness(const ValueKey* a, const ValueKey* b) noexcept nogil

# -- Outputs as objects of Python. Threads: any, with the GIL.
# Set the key of an output, which has to live as long as the key. Return False if it cannot be read
# here: an int that is no i64, a str with half of a surrogate pair, and what is no int, bool, float,
# str, bytes or contiguous array of numbers.
cdef bint key_of_output(object output, ValueKey* key) except -1
# Set the key of a label, which has to live as long as the key. Return False if it is an int that is
# no i64. Raises UnicodeEncodeError for a str with half of a surrogate pair. kind: its type.
cdef bint key_of_label(object label, object kind, ValueKey* key) except -1
# Return the hash of a label of this type; of an int of any size.
cpdef u32 label_hash(object label, object kind) except? 64
# Return the label of a key, of this type.
cdef object label_of_key(const ValueKey* key, object kind)
