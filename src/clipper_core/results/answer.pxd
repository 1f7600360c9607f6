# The answer to a query as Python sees it, `clipper.types.Answer`. What is rarely read is made when
# it is read: the id as a text, and the dict of qualifiers. An answer holds values, no slot of its
# query, so that it can be read when its server is closed.
#
# Threads: any, with the GIL. Nothing changes after it is made, except that a part is made.
from clipper_core.runtime.machine cimport u64

cdef class Answer:
    cdef readonly object output, confidence, is_default, reason
    cdef readonly object models, missing        # tuples of models
    cdef readonly object latency_us, agreement, decided_by, set, request_id
    cdef object node            # id is the text `node-number`; None: `text` has it
    cdef u64 number             # of the query
    cdef object text            # the id; None until it is read
    cdef object beside          # qualifiers by model; None until they are read, if there are none

    # the constructor's arguments
    cdef tuple _parts(self)
