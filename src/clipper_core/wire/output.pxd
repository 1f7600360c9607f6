# What a container returned, as values: one row of a REPLY, or its text.
#
# Threads: any (pure functions).
from clipper_core.runtime.machine cimport u32, u64, u8
from clipper_core.wire.codec cimport Header, Rows
from clipper_core.wire.prediction cimport Value

cdef bint output_value(const Header* header, const Rows* rows, u32 i, u64 at, u64 nbytes,
                       const u8* beside,
                       Value* value) noexcept nogil
# ^ row i, whose `nbytes` lie at offset `at` of the data, and whose qualifiers, if there are any,
# lie at `beside`; the caller's
#   reference. False when memory is out
# TAG_NONE when memory is out
cdef void output_text(const char* text, u64 n, Value* value) noexcept nogil
