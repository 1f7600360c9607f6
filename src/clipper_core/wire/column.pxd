# Many predictions as numpy arrays, without a Python object a row. Threads: any, with the GIL; slots
# may be ending meanwhile.
from clipper_core.runtime.machine cimport atomic, u32, u64, u8

cdef struct Column:             # n slots of a block, as they lie there
    const u64* word
    const u8* tag
    atomic[u8]* state           # Status: what it says first is read after it
    const u32* latency_us       # NULL: all 0
    u32 n

cdef u32 column_first_failed(const Column* column) noexcept nogil   # the first that is not OK, or n
cdef object column_states(const Column* column)          # u8 (n,)
# u32 (n,); 0 for what is pending or was cancelled
cdef object column_latencies_us(const Column* column)
cdef object column_outputs(const Column* column, object missing, object name)
# ^ name: of records only this tensor; "": all of them
# ndarray of shape (n, ...) when all that arrived are numbers of one dtype and shape, and
# `missing` fits among them; else a list
# f64 (n,): NaN where the model gave none, 0 where it gave NaN
cdef object column_confidences(const Column* column)
