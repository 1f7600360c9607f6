# The owner of one engine: everything that decides (scheduler) and everything that waits (lanes,
# futures), made and freed here.
#
# Threads: any, except step, receive, outgoing, lost, which belong to the loop (or to a simulator in
# its place).
from clipper_core.results.completion cimport Completion
from clipper_core.runtime.machine cimport u32
from clipper_core.scheduling.model_state cimport ModelState
from clipper_core.scheduling.scheduler cimport Command, EngineState

cdef class Engine:
    cdef EngineState* state
    cdef readonly Completion completion
    cdef readonly object models          # list of Model, kept alive
    cdef readonly object limits
    cdef readonly list peers             # deliveries of the engines it has met, kept alive
    cdef object __weakref__

    cdef ModelState* new_model(self) except NULL
    cdef int command(self, Command* command) except -1
    cdef int _free_connections(self) except -1
    cdef int _free_event(self) except -1
    cdef int _with_data(self, Command* command, bytes data) except -1
