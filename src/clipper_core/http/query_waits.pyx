"""Waiting by mailboxes (results/completion). A mailbox is armed only before a sleep, so that a
batch of answers costs one write of an eventfd, and none while the thread is awake.
"""
from libcpp.vector cimport vector

from clipper_core.http.http_route cimport Query, query_first_open, query_home
from clipper_core.results.completion cimport (
    CompletionState, Mailbox, completion_wake_loop_thread, mailbox_arm, mailbox_must_rescan,
    slot_state, slot_watch,
)
from clipper_core.results.future cimport MailboxReader
from clipper_core.runtime.allocation cimport make_room
from clipper_core.runtime.machine cimport u32, u64
from clipper_core.runtime.status cimport PENDING


cdef int waits_add(QueryWaits* w, MailboxReader reader) except -1:
    cdef Inbox inbox
    inbox.completion = reader.completion.state
    inbox.box = reader.box
    inbox.bit = reader.bit
    w.inboxes.push_back(inbox)
    return 0


cdef bint query_wait(QueryWaits* w, Query* q, u32 slot) noexcept nogil:
    cdef size_t i
    cdef CompletionState* d = query_home(q)
    q.waits_for = q.block.first_id + slot
    # for all that wait, should a mailbox overflow
    if not (make_room(w.over, w.over.size() + w.waiting.size() + 1)
            and w.waiting.put(q.waits_for, q)):
        return False
    for i in range(w.inboxes.size()):
        if w.inboxes[i].completion == d:
            if slot_watch(q.block[0], slot, w.inboxes[i].bit):
                completion_wake_loop_thread(d)
                return True
    w.over.push_back(q.waits_for)
    return True


cdef void query_wait_no_more(QueryWaits* w, Query* q) noexcept nogil:
    w.waiting.take(q.waits_for)


cdef u32 query_next_open(const Query* q) noexcept nogil:
    return query_first_open(q, <u32> (q.waits_for - q.block.first_id))


cdef bint _next_id(QueryWaits* w, u64* id) noexcept nogil:
    """Return whether there is news of a slot, and its id."""
    cdef const vector[u64]* keys
    cdef Mailbox* box
    cdef size_t i, k
    for i in range(w.inboxes.size()):
        box = w.inboxes[i].box
        if w.over.size() == 0 and box.ids.pop(id):
            return True
        if w.over.size() == 0 and mailbox_must_rescan(box[0]):
            keys = w.waiting.all()
            for k in range(keys.size()):
                w.over.push_back(keys[0][k])
    if w.over.size() == 0:
        return False
    id[0] = w.over.back()
    w.over.pop_back()
    return True


cdef bint _arm(QueryWaits* w) noexcept nogil:
    """Arm the mailboxes. Return False if one has something."""
    cdef bint armed = True
    cdef size_t i
    for i in range(w.inboxes.size()):
        if mailbox_arm(w.inboxes[i].box[0], w.inboxes[i].box.ids[0]):
            armed = False
    return armed


cdef Query* query_next_ended(QueryWaits* w) noexcept nogil:
    cdef Query* q
    cdef u64 id = 0
    while True:
        if not _next_id(w, &id):
            if _arm(w):
                return NULL
            continue
        q = <Query*> w.waiting.get(id)
        if q != NULL and slot_state(q.block[0], <u32> (id - q.block.first_id)) != PENDING:
            w.waiting.take(id)
            return q
