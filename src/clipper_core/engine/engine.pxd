# One engine: it creates, owns and frees the scheduler, the lanes and the result slots.
#
# Threads: any, except step, receive, outgoing and lost, which only the loop, or a simulator in its
# place, may call.
from clipper_core.results.completion cimport Completion
from clipper_core.runtime.machine cimport u32
from clipper_core.scheduling.model_state cimport ModelState
from clipper_core.scheduling.scheduler cimport Command, EngineState

cdef class Engine:
    cdef EngineState* state
    cdef readonly Completion completion
    cdef readonly object models          # list of Model, kept alive
    cdef readonly object limits
    cdef readonly list peers             # completions of the engines that it is linked with, kept
                                         # alive
    cdef object __weakref__

    cdef ModelState* new_model(self) except NULL
    cdef int command(self, Command* command) except -1
    cdef int _free_connections(self) except -1
    cdef int _free_event(self) except -1
    cdef int _with_data(self, Command* command, bytes data) except -1
