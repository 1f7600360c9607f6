"""A reader's end of the news about futures: for an event loop, or for the thread that runs
callbacks."""
from libc.stdlib cimport free

from clipper_core.results.completion cimport (
    MAILBOXES_MAX, Completion, CompletionState, Mailbox, completion_wake_loop_thread, mailbox_arm,
    mailbox_must_rescan, slot_watch,
)
from clipper_core.results.future cimport Future
from clipper_core.runtime.machine cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, aligned_new, eventfd, eventfd_drain, relaxed, u32, u64,
)
from clipper_core.runtime.ring cimport spsc_free, spsc_new
from clipper_core.runtime.status cimport NO_MEMORY, raise_for

cdef enum:
    MAILBOX_WORDS = 8192


cdef class MailboxReader:
    """Threads: one at a time (its event loop's, or the callback thread); the loop thread of the
    engine is the other side.

    `add(future, item)` asks for news of a future; when `fd` becomes readable, `drain()` returns the
    (future, item) pairs that are done. One eventfd write per batch of news, none while the reader
    is awake.
    """
    def __cinit__(self, Completion completion):
        cdef CompletionState* d = completion.state
        cdef u32 i
        self.completion = completion
        self.waiting = {}
        for i in range(MAILBOXES_MAX):
            if d.boxes[i] == NULL:
                d.boxes[i] = _mailbox_new()
                if d.boxes[i] == NULL:
                    raise_for(NO_MEMORY, "no memory for a mailbox")
            if not d.boxes[i].taken:
                d.boxes[i].taken = True
                self.box = d.boxes[i]
                self.bit = i
                return
        raise RuntimeError(f"{MAILBOXES_MAX} event loops already wait for this engine")

    def __dealloc__(self):
        if self.box != NULL:
            self.box.taken = False

    @property
    def fd(self):
        """An eventfd, readable when there is news."""
        return self.box.fd

    def __len__(self):
        return len(self.waiting)

    def add(self, Future future, item):
        """Wait for `future`. False if it is done already, and then nothing was registered."""
        return bool(self._register(future, item))

    cdef bint _register(self, Future future, item):
        cdef u32 slot
        cdef u32 open = future.first_open()
        cdef u64 slot_id
        while open < future.slots:
            slot = future.first + open
            slot_id = future.block.first_id + slot
            pairs = self.waiting.setdefault(slot_id, [])
            pairs.append((future, item))
            if slot_watch(future.block[0], slot, self.bit):
                completion_wake_loop_thread(self.completion.state)
                return True
            pairs.pop()
            if not pairs:
                del self.waiting[slot_id]
            open = future.first_open()
        return False

    def drain(self):
        """The (future, item) pairs that are done, in the order of their completion. Does not
        block."""
        cdef list done = []
        eventfd_drain(self.box.fd)
        while self._drain_once(done) or self._arm():
            pass
        return done

    cdef bint _arm(self):
        """Ready to be woken; True if news came in the meantime."""
        return mailbox_arm(self.box[0], self.box.ids[0])

    cdef bint _drain_once(self, list done) except -1:
        cdef u64 slot_id
        cdef bint any = False
        while self.box.ids.pop(&slot_id):
            self._collect(slot_id, done)
            any = True
        if mailbox_must_rescan(self.box[0]):
            for key in list(self.waiting):
                self._collect(key, done)
            any = True
        return any

    cdef int _collect(self, object slot_id, list done) except -1:
        cdef Future future
        for future, item in self.waiting.pop(slot_id, ()):
            if not self._register(future, item):
                done.append((future, item))
        return 0


cdef Mailbox* _mailbox_new() noexcept nogil:
    cdef Mailbox* box = <Mailbox*> aligned_new(sizeof(Mailbox))
    if box == NULL:
        return NULL
    box.ids = spsc_new(MAILBOX_WORDS)
    box.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    box.armed.store(1, relaxed)
    if box.ids == NULL or box.fd < 0:
        spsc_free(box.ids)
        free(box)
        return NULL
    return box
