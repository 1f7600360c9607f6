# Predictions as JSON, byte by byte as msgspec writes them; what is not plain is left to it.
#
# Threads: any (pure functions).
from clipper_core.runtime.byte_buffer cimport Bytes
from clipper_core.wire.prediction cimport Value

cdef void json_f64(Bytes* out, double value) noexcept nogil               # finite
# False: it is not plain, and nothing was put
cdef bint json_value(Bytes* out, const Value* value) noexcept nogil
# those of an array one after another; one of a scalar
cdef bint json_elements(Bytes* out, const Value* value) noexcept nogil
# its confidence, brought into 0 to 1; 1: it gives none
cdef double value_belief(const Value* value) noexcept nogil
