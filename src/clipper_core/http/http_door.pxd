# The door for HTTP without the GIL: threads that accept, read, answer and hand over; Python's side
# of them.
#
# One worker listens and gives each connection to the one that has fewest; so the balance is exact,
# and a port is bound once. Each sleeps in an epoll of its own, on its lines, its post and a mailbox
# of each engine.
#
# Threads: run(i) is the body of worker i; the rest any.
from clipper_core.engine.engine cimport Engine
from clipper_core.http.http_line cimport Given, Shared, Worker
from clipper_core.http.http_route cimport TableState
from clipper_core.runtime.http_bytes cimport Bytes
from clipper_core.runtime.machine cimport u32, u64

cdef enum OrderKind:
    ADOPT = 0                   # a connection
    ANSWERED = 1                # a response, of an ending
    LOOK_AT = 2                 # another table
    CLOSE_UP = 3                # drain
    STOP = 4

cdef cppclass Order:
    u32 kind
    int fd
    u32 returns
    u64 ticket
    bint close
    Bytes bytes
    TableState* table

cdef class Door:
    cdef Shared* shared
    cdef list engines
    cdef list mailboxes                 # MailboxReader: they keep their places in the engines
    cdef object table                   # HotTable
    cdef list retired                   # tables before it whose memory somebody still needs
    cdef object guard
    cdef object finish

    cdef int _add_mailbox(self, Worker* w, Engine engine) except -1
    cdef int _order(self, u32 number, Order* order) except -1
    cdef object _ending(self, Given* given)
    cdef int _lose(self, Given* given) except -1
